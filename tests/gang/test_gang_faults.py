"""Faults: a gang is restarted whole, once, and only with a place to go."""

from datetime import timedelta

import pytest
from msgspec.structs import replace
from scenario import CONFIG, NOW, places, reasons, run, scenario

from gpunode.gang.decide import decide
from gpunode.model.gang import Evict, ReasonCode, Report, Resume
from gpunode.model.meta import OwnerReference
from gpunode.model.names import EVICT_ON_FAULT_ANNOTATION, KUEUE_QUEUE_LABEL, RESTART_ANNOTATION

HIT = "node n1\nnode n2\nnode n3\ngang g pods=8,8 bound=n1,n2 job=j\n"


def evictions(text: str, after_s: float = 0) -> list[Evict]:
    actions = decide(scenario(text).snapshot(), NOW + timedelta(seconds=after_s), CONFIG)
    return [a for a in actions if isinstance(a, Evict)]


def test_the_whole_gang_is_evicted_through_its_job() -> None:
    (evict,) = evictions(HIT + "taint n1/gpu-3 xid=79")
    assert (evict.gang, evict.jobs, evict.pods) == ("podgroup/default/g", ("default/j",), ())
    assert evict.devices == ("gpu.gpunode.dev/n1/gpu-3",)
    assert evict.reason.code is ReasonCode.DEVICE_FAULT
    assert evict.reason.text == (
        "gpu.gpunode.dev/n1/gpu-3 is tainted gpunode.dev/xid=79 on n1; restarting all 2 pods, with room on n2, n3"
    )


@pytest.mark.parametrize(
    "text",
    [
        HIT + "taint n3/gpu-3 xid=79",  # a device that nobody holds
        HIT + "taint n1/gpu-3 xid=79 effect=None",
        HIT + "taint n1/gpu-3 other=79",  # not one of our health keys
        HIT,
        HIT.replace("node n1", "node n1 incomplete") + "taint n1/gpu-3 xid=79",  # unknown is not faulty
    ],
)
def test_no_fault_no_eviction(text: str) -> None:
    assert evictions(text) == []


def test_a_missing_pool_is_unknown() -> None:
    world = scenario(HIT + "taint n1/gpu-3 xid=79")
    del world.slices["n1-s"]
    assert decide(world.snapshot(), NOW, CONFIG) == ()


def test_without_room_the_gang_keeps_running_and_says_so() -> None:
    text = "node n1\nnode n2\ngang g pods=8,8 bound=n1,n2 job=j\ntaint n1/gpu-3 xid=79"
    assert evictions(text) == []
    assert reasons(run(text))["g"].startswith("DeviceFaultNoRoom: gpu.gpunode.dev/n1/gpu-3 is tainted")


def test_its_own_healthy_devices_count_as_room() -> None:
    (evict,) = evictions("node n1 gpus=4\ngang g pods=1,1 bound=n1,n1 job=j\ntaint n1/gpu-0 xid=79")
    assert "room on n1" in evict.reason.text


def test_two_hit_gangs_do_not_count_on_the_same_spare() -> None:
    actions = run(
        """
        node n1
        node n2
        node spare
        gang a pods=8 bound=n1 job=ja
        gang b pods=8 bound=n2 job=jb
        taint n1/gpu-0 xid=79
        taint n2/gpu-0 xid=79
        """
    )
    assert [a.gang for a in actions if isinstance(a, Evict)] == ["podgroup/default/a"]
    assert set(reasons(actions)) == {"b"}


def test_a_waiting_gang_does_not_take_the_room_of_the_plan() -> None:
    actions = run(HIT + "taint n1/gpu-3 xid=79\ngang w pods=8")
    assert any(isinstance(a, Evict) for a in actions) and places(actions) == {}


def test_the_devices_of_an_evicted_gang_are_in_use_until_its_pods_are_gone() -> None:
    """gpu-1 of n1 is healthy and about to be free, but not yet."""
    text = "node n1 gpus=4\nnode n2 gpus=2\ngang g pods=2 bound=n1 job=j\ntaint n1/gpu-0 xid=79\ngang w pods={}"
    assert "room on n2" in evictions(text.format(3))[0].reason.text
    assert places(run(text.format(3))) == {} and places(run(text.format(2))) == {"w": ["n1"]}


@pytest.mark.parametrize(
    ("tolerates", "since", "after_s", "evicted"),
    [
        ("xid:60", "2026-11-29T12:00:00Z", 59, False),
        ("xid:60", "2026-11-29T12:00:00Z", 60, True),
        ("xid", "2026-11-29T12:00:00Z", 10**6, False),  # for ever
        ("ecc:0", "2026-11-29T12:00:00Z", 0, True),  # another key
        ("xid:-5", "2026-11-29T12:00:00Z", 0, True),  # negative is zero
        ("xid:60", "", 10**6, False),  # since when is not known
        ("xid:60", "soon", 10**6, False),
    ],
)
def test_tolerations_of_the_claim(tolerates: str, since: str, after_s: float, evicted: bool) -> None:
    text = HIT.replace("job=j", f"job=j tolerates={tolerates}")
    text += "taint n1/gpu-3 xid=79 effect=NoExecute" + (f" since={since}" if since else "")
    assert bool(evictions(text, after_s)) == evicted


def test_a_gang_that_is_stopping_is_left_alone() -> None:
    """Neither with a terminating member, nor while its Job is suspended by us."""
    assert evictions(HIT + "taint n1/gpu-3 xid=79\npod g-2 gpus=1 on=n3 group=g terminating") == []
    world = scenario(HIT + "taint n1/gpu-3 xid=79")
    _suspend(world)
    assert not [a for a in decide(world.snapshot(), NOW, CONFIG) if isinstance(a, Evict | Resume)]


def _suspend(world) -> None:  # type: ignore[no-untyped-def]
    job = world.jobs["default/j"]
    metadata = replace(job.metadata, annotations={RESTART_ANNOTATION: "{}"})
    world.jobs["default/j"] = replace(job, metadata=metadata, spec=replace(job.spec, suspend=True))


def test_a_suspended_job_resumes_once_its_pods_are_gone_or_going() -> None:
    world = scenario(HIT)
    _suspend(world)
    assert Resume("default/j") not in decide(world.snapshot(), NOW, CONFIG)
    job = world.jobs["default/j"]
    world.jobs["default/j"] = replace(job, spec=replace(job.spec, suspend=False))  # by JobSet: only the record is left
    assert Resume("default/j") in decide(world.snapshot(), NOW, CONFIG)
    world.jobs["default/j"] = job
    for key, pod in list(world.pods.items()):
        world.pods[key] = replace(pod, metadata=replace(pod.metadata, deletion_timestamp="2026-11-29T12:00:00Z"))
    assert Resume("default/j") in decide(world.snapshot(), NOW, CONFIG)
    world.pods.clear()
    assert Resume("default/j") in decide(world.snapshot(), NOW, CONFIG)


def test_a_job_suspended_by_someone_else_stays_suspended() -> None:
    world = scenario("node n1\ngang g pods=1 job=j")
    world.pods.clear()
    job = world.jobs["default/j"]
    world.jobs["default/j"] = replace(job, spec=replace(job.spec, suspend=True))
    assert decide(world.snapshot(), NOW, CONFIG) == ()


def test_a_pod_without_owner_is_evicted_only_where_an_annotation_asks() -> None:
    text = "node n1\nnode n2\npod p gpus=8 on=n1\ntaint n1/gpu-0 ecc=dbe"
    world = scenario(text)
    (report,) = decide(world.snapshot(), NOW, CONFIG)
    assert isinstance(report, Report) and "nobody would re-create pod default/p" in report.reason.text
    pod = world.pods["default/p"]
    annotations = {**pod.metadata.annotations, EVICT_ON_FAULT_ANNOTATION: "true"}
    world.pods["default/p"] = replace(pod, metadata=replace(pod.metadata, annotations=annotations))
    (evict,) = decide(world.snapshot(), NOW, CONFIG)
    assert isinstance(evict, Evict) and evict.pods == ("default/p",) and evict.jobs == ()


def test_pods_of_other_controllers_are_evicted_one_by_one() -> None:
    world = scenario("node n1\nnode n2\ngang g pods=8 bound=n1\ntaint n1/gpu-0 ecc=dbe")
    pod = world.pods["default/g-0"]
    owner = OwnerReference(kind="StatefulSet", name="s", uid="u", controller=True)
    world.pods["default/g-0"] = replace(pod, metadata=replace(pod.metadata, owner_references=(owner,)))
    (evict,) = decide(world.snapshot(), NOW, CONFIG)
    assert isinstance(evict, Evict) and evict.pods == ("default/g-0",)


def test_a_job_of_kueue_is_not_suspended() -> None:
    world = scenario(HIT + "taint n1/gpu-3 xid=79")
    job = world.jobs["default/j"]
    world.jobs["default/j"] = replace(job, metadata=replace(job.metadata, labels={KUEUE_QUEUE_LABEL: "q"}))
    (report,) = decide(world.snapshot(), NOW, CONFIG)
    assert isinstance(report, Report) and "Kueue" in report.reason.text


def test_the_plan_counts_on_what_terminating_pods_give_back() -> None:
    """The gang's own pods need their grace as well: nothing is gained by waiting for others first."""
    (evict,) = evictions(HIT + "pod old gpus=1 on=n3 terminating\ntaint n1/gpu-3 xid=79")
    assert "with room on n2, n3" in evict.reason.text
    assert evictions(HIT + "pod old gpus=1 on=n3\ntaint n1/gpu-3 xid=79") == []


def test_the_xid_is_named_before_the_loss_that_follows_it() -> None:
    (evict,) = evictions(HIT + "taint n1/gpu-3 presence=lost\ntaint n1/gpu-3 xid=79")
    assert "gpunode.dev/xid=79" in evict.reason.text
