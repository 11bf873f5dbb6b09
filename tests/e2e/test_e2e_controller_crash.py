"""I7: wherever the controller dies between two of its writes, its successor leaves nothing half done."""

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from gpunode.cluster.cluster import Cluster
from gpunode.model.core import Pod
from tests.e2e.checkers import checkers
from tests.e2e.scene import Scene, broken, controller_inside, gated, scene, without_controller

pytestmark = pytest.mark.e2e
SIZE = 3


@asynccontextmanager
async def _stage(cluster: Cluster) -> AsyncIterator[Scene]:
    async with without_controller(cluster), checkers(cluster), scene(cluster, "crash") as it:
        await it.template("node")
        yield it


async def _dies(cluster: Cluster, it: Scene, after: int, done: Callable[[], bool]) -> bool:
    """Run a controller until it is dead or `done`; whether it died."""
    async with controller_inside(cluster, after) as api:
        await it.until("dead, or done without it", lambda: api.dead.is_set() or done())
        return api.dead.is_set()


async def _successor(cluster: Cluster, it: Scene, done: Callable[[], bool]) -> None:
    async with controller_inside(cluster):
        await it.until("the successor is done", done)
        await it.until("no claim leaked", lambda: not it.leaked(), 20)
        assert not [job for job in it.jobs.items.values() if job.spec.suspend], it.state()


async def _place(cluster: Cluster, it: Scene, after: int) -> bool:
    await it.gang("gang", SIZE, "node")

    def whole() -> bool:
        return len(it.running("gang")) == SIZE and it.placed("gang")[0] == "True"

    died = await _dies(cluster, it, after, whole)
    await _successor(cluster, it, whole)
    await _end(it)
    return died


async def _restart(cluster: Cluster, it: Scene, after: int) -> bool:
    """A gang of a Job with a broken device: suspended, resumed and placed anew, once."""
    await it.job("gang", SIZE - 1, "node")
    async with controller_inside(cluster):
        await it.until("the Job runs", lambda: len(it.running("gang")) == SIZE - 1)
    old = {p.metadata.uid for p in it.running("gang")}
    victim = it.running("gang")[0]

    def again() -> bool:
        new = [p for p in it.running("gang") if p.metadata.uid not in old]
        return len(new) == SIZE - 1 and all(_node(p) != victim.spec.node_name for p in new)

    async with broken(it.api, victim.spec.node_name, _device(it, victim)):
        died = await _dies(cluster, it, after, again)
        await _successor(cluster, it, again)
    assert it.jobs.items["crash/gang"].status.failed == 0
    await _end(it)
    return died


async def _take_back(cluster: Cluster, it: Scene, after: int) -> bool:
    """Half a gang is allocated when the controller dies, and the other half never fits: all must come back."""
    nodes = len(cluster.nodes)
    await it.gang("gang", nodes, "node")
    async with controller_inside(cluster, nodes - 1) as api:
        await it.until("half of the claims are written", api.dead.is_set)
    await it.until("they are seen", lambda: sum(bool(c.status.allocation) for c in it.claims.items.values()) > 0)
    free = {n.name for n in cluster.nodes} - {
        r.pool for c in it.claims.items.values() if c.status.allocation for r in c.status.allocation.devices.results
    }
    async with contextlib.AsyncExitStack() as stack:
        for node in free or {cluster.nodes[-1].name}:
            await stack.enter_async_context(broken(it.api, node, _any_device(it)))

        def none() -> bool:
            return not [c for c in it.claims.items.values() if c.status.allocation] and it.placed("gang")[0] == "False"

        died = await _dies(cluster, it, after, none)
        await _successor(cluster, it, none)
        assert all(gated(p) for p in it.pods.items.values()), it.state()
    await _end(it)
    return died


def _node(pod: Pod) -> str:
    return pod.spec.node_name


def _device(it: Scene, pod: Pod) -> str:
    name = next(s.resource_claim_name for s in pod.status.resource_claim_statuses)
    allocation = it.claims.items[f"crash/{name}"].status.allocation
    assert allocation is not None
    return allocation.devices.results[0].device


def _any_device(it: Scene) -> str:
    """All nodes have the same board, so a name of one is a name of all."""
    return next(
        r.device for c in it.claims.items.values() if c.status.allocation for r in c.status.allocation.devices.results
    )


async def _end(it: Scene) -> None:
    await it.clear()
    await it.template("node")


ACTS = {"place": _place, "restart": _restart, "take back": _take_back}
# How many writes each act has at most; later points find the act done, which ends the matrix.
POINTS = [("place", 1), ("place", 4), ("restart", 1), ("take back", 1)]


@pytest.mark.parametrize(("act", "after"), POINTS, ids=str)
async def test_a_successor_finishes_what_a_dead_controller_began(act: str, after: int, cluster: Cluster) -> None:
    async with _stage(cluster) as it:
        assert await ACTS[act](cluster, it, after), "it has fewer writes than that"


@pytest.mark.soak
@pytest.mark.parametrize("act", ACTS)
async def test_every_crash_point(act: str, cluster: Cluster, record_property: Callable[[str, object], None]) -> None:
    async with _stage(cluster) as it:
        after = 1
        while await ACTS[act](cluster, it, after):
            after += 1
        record_property("crash points", after - 1)
        assert after > 3
