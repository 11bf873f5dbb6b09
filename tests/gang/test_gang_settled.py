"""What is said about gangs that wait for nothing from us: only what is needed to keep the shown reason true."""

from datetime import timedelta

import pytest
from msgspec.structs import replace
from scenario import CONFIG, NOW, Scenario, reasons, scenario

from gpunode.gang.decide import decide
from gpunode.model.core import Container, ContainerResources, PodGroupStatus
from gpunode.model.meta import Condition, ObjectMeta
from gpunode.model.names import PLACED_CONDITION
from gpunode.model.resource import DeviceClass
from gpunode.model.times import parse_time


def said(world: Scenario, after_s: float = 0) -> dict[str, str]:
    return reasons(decide(world.snapshot(), NOW + timedelta(seconds=after_s), CONFIG))


def shows(world: Scenario, status: str, message: str) -> None:
    group = world.groups["default/g"]
    condition = Condition(type=PLACED_CONDITION, status=status, message=message)
    world.groups["default/g"] = replace(group, status=replace(group.status, conditions=(condition,)))


@pytest.mark.parametrize(
    ("status", "message", "corrected"),
    [
        ("True", "2 pods placed on n1", False),
        ("False", "gpu-3 is tainted", True),  # the fault is over
        ("True", "runs with 1 pods (minCount 1); the others wait: needs 1 pod", True),
    ],
)
def test_an_outdated_reason_is_corrected(status: str, message: str, corrected: bool) -> None:
    world = scenario("node n1\ngang g pods=4,4 bound=n1,n1 min=1")
    shows(world, status, message)
    assert said(world) == ({"g": "Placed: all 2 pods have their place on n1"} if corrected else {})


def test_what_a_controller_could_not_tell_before_it_died_is_told() -> None:
    world = scenario("node n1\ngang g pods=4,4 bound=n1,n1")
    world.groups["default/g"] = replace(world.groups["default/g"], status=PodGroupStatus())
    assert said(world) == {"g": "Placed: all 2 pods have their place on n1"}


def test_a_gang_that_somebody_else_placed_needs_no_word_of_ours() -> None:
    assert said(scenario("node n1\npod p gpus=4 on=n1 ungated")) == {}


def _released(world: Scenario) -> None:
    pod = world.pods["default/g-1"]
    waits = Condition(type="PodScheduled", status="False", message="0/1 nodes are available: 1 Insufficient cpu.")
    world.pods["default/g-1"] = replace(
        pod, spec=replace(pod.spec, node_name=""), status=replace(pod.status, conditions=(waits,))
    )
    claim = world.claims["default/g-1-gpu"]
    assert claim.status.allocation is not None
    allocation = replace(claim.status.allocation, allocation_timestamp="2026-11-29T12:00:00Z")
    world.claims["default/g-1-gpu"] = replace(claim, status=replace(claim.status, allocation=allocation))


@pytest.mark.parametrize(("after_s", "late"), [(30, False), (31, True)])
def test_a_placed_pod_that_is_not_bound_in_time_is_reported(after_s: float, late: bool) -> None:
    world = scenario("node n1\ngang g pods=4,4 bound=n1,n1")
    _released(world)
    expected = (
        "WaitingForBinding: 1 of 2 pods have their devices but are not bound after 30 s; "
        "kube-scheduler about g-1: 0/1 nodes are available: 1 Insufficient cpu."
    )
    assert said(world, after_s) == ({"g": expected} if late else {})


def test_a_gang_that_lost_a_member_says_so() -> None:
    world = scenario("node n1\ngang g pods=8 bound=n1 min=2\npod g-1 gpus=8 group=g")
    assert said(world)["g"].startswith("WaitingForDevices: only 1 of the 2 pods it needs have their place; needs 1 pod")


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "deviceclass.resource.kubernetes.io/gpu"])
def test_extended_resources_of_managed_classes_are_refused_with_the_reason(resource: str) -> None:
    world = scenario("node n1\npod p gpus=0 ungated")
    pod = world.pods["default/p"]
    container = Container(resources=ContainerResources(limits={resource: "1"}))
    world.pods["default/p"] = replace(pod, spec=replace(pod.spec, containers=(container,)))
    snapshot = world.snapshot()
    gpu = snapshot.classes["gpu"]
    snapshot.classes["gpu"] = DeviceClass(
        metadata=ObjectMeta(name="gpu"), spec=replace(gpu.spec, extended_resource_name="nvidia.com/gpu")
    )
    (reason,) = reasons(decide(snapshot, NOW, CONFIG)).values()
    assert reason.startswith(f"InvalidGang: pod default/p asks for the extended resource {resource}")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2026-11-29T12:00:00Z", 0), ("2026-11-29T12:00:05", 5), ("", None), ("x", None), (None, None)],
)
def test_timestamps(text: str | None, seconds: int | None) -> None:
    parsed = parse_time(text)
    assert (None if parsed is None else (parsed - NOW).total_seconds()) == seconds
