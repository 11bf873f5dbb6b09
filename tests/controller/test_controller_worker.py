"""The decision worker: state kept over questions, replaced when it dies, errors reported."""

from datetime import UTC, datetime

import pytest
from msgspec import convert

from gpunode.controller.worker import DecideError, Worker
from gpunode.controller.world import Change, apply_changes
from gpunode.model.core import Node
from gpunode.model.gang import Config, EnsureTaintRule, Snapshot
from gpunode.model.resource import DeviceTaintRule, ResourceSlice

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CONFIG = Config(drivers=frozenset({"gpu.gpunode.dev"}))
SLICE = convert(
    {"metadata": {"name": "s"}, "spec": {"driver": "gpu.gpunode.dev", "nodeName": "n",
     "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1}, "devices": [{"name": "g"}]}},
    ResourceSlice,
)  # fmt: skip
RULE = convert(
    {"metadata": {"name": "r"}, "spec": {"deviceSelector": {"driver": "gpu.gpunode.dev"},
     "taint": {"key": "gpunode.dev/managed", "value": "true", "effect": "NoSchedule"}}},
    DeviceTaintRule,
)  # fmt: skip


async def test_the_worker_keeps_its_state_between_questions() -> None:
    everything: list[Change] = [("slices", "s", SLICE)]
    worker = Worker(lambda: everything)
    try:
        assert EnsureTaintRule("gpu.gpunode.dev") in await worker.decide([], NOW, CONFIG)
        # Only the rule is sent now; the slice is remembered.
        assert await worker.decide([("taint_rules", "r", RULE)], NOW, CONFIG) == ()
        assert EnsureTaintRule("gpu.gpunode.dev") in await worker.decide([("taint_rules", "r", None)], NOW, CONFIG)
    finally:
        await worker.close()


async def test_a_killed_worker_is_replaced_and_told_everything() -> None:
    everything: list[Change] = [("slices", "s", SLICE)]
    worker = Worker(lambda: everything)
    try:
        await worker.decide([], NOW, CONFIG)
        process = worker._process
        assert process is not None
        process.kill()
        everything.append(("taint_rules", "r", RULE))
        assert await worker.decide([], NOW, CONFIG) == ()
    finally:
        await worker.close()


async def test_an_error_in_deciding_reaches_the_parent() -> None:
    worker = Worker(list)
    try:
        assert await worker.decide([], NOW, CONFIG) == (EnsureTaintRule("gpu.gpunode.dev"),)
        with pytest.raises(DecideError, match="Traceback"):
            await worker.decide([("slices", "s", "not a slice")], NOW, CONFIG)
        with pytest.raises(DecideError):
            await worker.decide([], NOW, CONFIG)
        assert EnsureTaintRule("gpu.gpunode.dev") in await worker.decide([("slices", "s", SLICE)], NOW, CONFIG)
    finally:
        await worker.close()


def test_changes_set_replace_and_remove() -> None:
    node = convert({"metadata": {"name": "n"}}, Node)
    snapshot = apply_changes(Snapshot(), [("nodes", "n", node), ("gang_namespaces", "a", True)])
    assert snapshot.nodes == {"n": node}
    assert snapshot.gang_namespaces == frozenset({"a"})
    gone = apply_changes(snapshot, [("nodes", "n", None), ("gang_namespaces", "a", None), ("pods", "x/y", None)])
    assert gone.nodes == {}
    assert gone.gang_namespaces == frozenset()
