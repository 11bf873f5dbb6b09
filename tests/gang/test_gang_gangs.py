"""Which pods make a gang, and what makes a gang invalid."""

from dataclasses import replace as with_fields

import pytest
from msgspec.structs import replace
from scenario import CONFIG, NOW, places, reasons, scenario

from gpunode.gang.decide import decide
from gpunode.model.core import Pod, SchedulingPolicy
from gpunode.model.gang import EnsureTaintRule
from gpunode.model.meta import ObjectMeta
from gpunode.model.names import MANAGED_TAINT
from gpunode.model.resource import (
    CelSelector,
    DeviceClass,
    DeviceClassSpec,
    DeviceRequest,
    DeviceSelector,
    DeviceTaint,
    ExactRequest,
)


def test_a_basic_group_is_that_many_gangs_of_one() -> None:
    world = scenario("node n1\ngang g pods=8,8")
    group = world.groups["default/g"]
    policy = SchedulingPolicy()
    world.groups["default/g"] = replace(group, spec=replace(group.spec, scheduling_policy=policy))
    actions = decide(world.snapshot(), NOW, CONFIG)
    assert places(actions) == {"g-0": ["n1"]} and set(reasons(actions)) == {"g-1"}


def test_a_group_that_does_not_exist_yet_is_waited_for() -> None:
    world = scenario("node n1\ngang g pods=1")
    world.groups.clear()
    assert "PodGroup default/g does not exist" in reasons(decide(world.snapshot(), NOW, CONFIG))["g"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("priority", 7), ("scheduler_name", "other"), ("preemption_policy", "Never")],
)
def test_members_must_agree_on_what_kube_scheduler_compares(field: str, value: object) -> None:
    world = scenario("node n1\ngang g pods=1,1")
    pod = world.pods["default/g-1"]
    world.pods["default/g-1"] = replace(pod, spec=replace(pod.spec, **{field: value}))
    reason = reasons(decide(world.snapshot(), NOW, CONFIG))["g"]
    assert reason.startswith("InvalidGang: all pods of a PodGroup must have the same")


@pytest.mark.parametrize(("phase", "placed"), [("Succeeded", True), ("Failed", False)])
def test_succeeded_members_count_towards_min_count_and_failed_ones_do_not(phase: str, placed: bool) -> None:
    world = scenario("node n1\ngang g pods=1,1,1")
    pod = world.pods["default/g-0"]
    world.pods["default/g-0"] = replace(pod, status=replace(pod.status, phase=phase))
    assert bool(places(decide(world.snapshot(), NOW, CONFIG))) == placed


def test_pods_that_are_none_of_ours_are_ignored() -> None:
    world = scenario("node n1\npod p gpus=0 ungated\npod q gpus=1 ungated class=other")
    snapshot = replace_classes(world, "other", 'device.driver == "nic.example.com"')
    assert decide(snapshot, NOW, CONFIG) == ()


def replace_classes(world, name: str, expression: str):  # type: ignore[no-untyped-def]
    snapshot = world.snapshot()
    selector = DeviceSelector(cel=CelSelector(expression=expression))
    snapshot.classes[name] = DeviceClass(metadata=ObjectMeta(name=name), spec=DeviceClassSpec(selectors=(selector,)))
    return snapshot


def test_a_claim_that_mixes_managed_and_other_drivers_is_refused() -> None:
    world = scenario("node n1\npod p gpus=1")
    claim = world.claims["default/p-gpu"]
    nic = DeviceRequest(name="nic", exactly=ExactRequest(device_class_name="nic"))
    spec = replace(claim.spec, devices=replace(claim.spec.devices, requests=(*claim.spec.devices.requests, nic)))
    world.claims["default/p-gpu"] = replace(claim, spec=spec)
    snapshot = replace_classes(world, "nic", 'device.driver == "nic.example.com"')
    assert (
        "claim default/p-gpu asks for devices of managed and of other drivers"
        in reasons(decide(snapshot, NOW, CONFIG))["p"]
    )


def test_a_class_that_names_no_driver_is_ours_if_it_selects_our_devices() -> None:
    world = scenario("node n1\npod p gpus=1 ungated class=big\npod q gpus=1 ungated class=none")
    snapshot = replace_classes(world, "big", 'device.capacity["gpu.gpunode.dev"].memory.isGreaterThan(quantity("1Gi"))')
    selector = DeviceSelector(cel=CelSelector(expression='has(device.attributes["x"].y)'))
    snapshot.classes["none"] = DeviceClass(spec=DeviceClassSpec(selectors=(selector,)))
    assert places(decide(snapshot, NOW, CONFIG)) == {"p": ["n1"]}


def test_an_ungated_pod_is_allocated_too() -> None:
    """Namespaces without the policy: the pod is waiting for its claim, not for a gate."""
    world = scenario("node n1\npod p gpus=1 ungated")
    actions = decide(world.snapshot(), NOW, CONFIG)
    assert places(actions) == {"p": ["n1"]}
    assert reasons(actions)["p"] == (
        "Placed: 1 of 1 pods got devices but no pin to their node: "
        "namespace default lacks the label gpunode.dev/gang-scheduling=enabled"
    )
    gated = with_fields(world.snapshot(), gang_namespaces=frozenset({"default"}))
    assert reasons(decide(gated, NOW, CONFIG)) == {}


@pytest.mark.parametrize("flag", ["foreign", "noclaim"])
def test_a_surplus_member_that_is_not_ready_does_not_stop_a_gang_that_runs(flag: str) -> None:
    text = f"node n1 rack=a\ngang g pods=1 bound=n1 topology=rack\npod g-1 gpus=1 group=g {flag}"
    assert decide(scenario(text).snapshot(), NOW, CONFIG) == ()
    both = decide(scenario(f"{text}\npod g-2 gpus=1 group=g").snapshot(), NOW, CONFIG)
    assert places(both) == {"g": ["n1"]}


def test_a_gated_gang_without_claims_is_placed_by_node_fit_alone() -> None:
    world = scenario("node n1 cpu=2 gpus=0\nnode n2 cpu=4 gpus=0\ngang g pods=0,0 cpu=2")
    assert sorted(places(decide(world.snapshot(), NOW, CONFIG))["g"]) == ["n1", "n2"] or places(
        decide(world.snapshot(), NOW, CONFIG)
    )["g"] == ["n2", "n2"]


def test_a_request_that_is_no_quantity_is_a_reason_not_a_crash() -> None:
    world = scenario("node n1\npod p gpus=1 cpu=lots")
    assert "not a Kubernetes quantity" in reasons(decide(world.snapshot(), NOW, CONFIG))["p"]


def test_an_empty_snapshot_only_asks_for_the_rule() -> None:
    world = scenario("norule")
    assert decide(world.snapshot(), NOW, CONFIG) == (EnsureTaintRule("gpu.gpunode.dev"),)


def test_no_rule_is_needed_where_the_slices_carry_the_taint() -> None:
    world = scenario("norule\nnode n1\npod p gpus=1")
    slice_ = world.slices["n1-s"]
    taint = DeviceTaint(key=MANAGED_TAINT, effect="NoSchedule")
    devices = tuple(replace(d, taints=(taint,)) for d in slice_.spec.devices)
    world.slices["n1-s"] = replace(slice_, spec=replace(slice_.spec, devices=devices))
    actions = decide(world.snapshot(), NOW, CONFIG)
    assert places(actions) == {"p": ["n1"]} and EnsureTaintRule("gpu.gpunode.dev") not in actions


def test_a_finished_pod_is_nobody() -> None:
    world = scenario("node n1\npod p gpus=8 on=n1\npod q gpus=8")
    pod = world.pods["default/p"]
    done: Pod = replace(pod, status=replace(pod.status, phase="Succeeded"))
    world.pods["default/p"] = done
    # Its claim is still allocated until kube-controller-manager releases it.
    assert places(decide(world.snapshot(), NOW, CONFIG)) == {}
    del world.claims["default/p-gpu"]
    assert places(decide(world.snapshot(), NOW, CONFIG)) == {"q": ["n1"]}
