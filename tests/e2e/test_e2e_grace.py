"""A health policy that gives gangs time: one class of faults for seconds, another for ever, on a real cluster."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import datetime, timedelta

import pytest

from gpunode.cluster.cluster import Cluster, Node
from gpunode.cluster.install import Installation, agent_name, start_agent
from gpunode.kube.kinds import PODS
from gpunode.model.core import Pod
from gpunode.model.names import DEFAULT_DRIVER
from gpunode.model.times import parse_time
from tests.e2e.rolling import log_end, ready, until
from tests.e2e.scene import Scene, scene
from tests.fixtures import fresh_cluster
from tests.ward import EVENTS, Ward, log_xid, ward

pytestmark = pytest.mark.e2e

GRACE_S = 8
# 48 is of the class workflow, 119 of reset; both make a GPU unhealthy.
SHORT, ENDLESS = 48, 119
POLICY = f"gangGraceSeconds:\n  workflow: {GRACE_S}\n  reset: forever\n"


@pytest.fixture(scope="module")
def wish(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    file = tmp_path_factory.mktemp("grace") / "policy.yaml"
    file.write_text(POLICY)
    return Installation(health_policy=file)


@pytest.fixture(scope="module")
def three(wish: Installation) -> Iterator[Cluster]:
    """A gang of two nodes has one to spare."""
    with fresh_cluster("grace", 23443, nodes=3, wish=wish) as found:
        yield found


@pytest.fixture
async def it(three: Cluster) -> AsyncIterator[Ward]:
    async with ward(three) as found:
        await found.recover_all()
        yield found
        await found.recover_all()


@pytest.fixture
async def gang(three: Cluster, it: Ward) -> AsyncIterator[Scene]:
    """A Job of two pods with eight GPUs each, running."""
    async with scene(three, "grace") as found:
        await found.template("eight")
        await found.job("train", 2, "eight")
        await found.until("the gang runs", lambda: len(found.running("train")) == 2)
        await found.until("it is told so", lambda: found.placed("train")[:2] == ("True", "Placed"))
        yield found


def where(gang: Scene) -> tuple[Node, str]:
    """A node of the gang and one of its GPUs."""
    first = gang.running("train")[0]
    node = next(n for n in gang.cluster.nodes if n.name == first.spec.node_name)
    held = next(
        r.device
        for c in gang.claims.items.values()
        if c.status.allocation is not None and c.status.reserved_for[0].uid == first.metadata.uid
        for r in c.status.allocation.devices.results
    )
    return node, held


def uids(pods: list[Pod]) -> set[str]:
    return {pod.metadata.uid for pod in pods}


def beside(it: Ward, node: Node, device: str) -> dict[str, tuple[str, str, str | None]]:
    """Value, effect and time of each taint of a device."""
    found = it.devices(node.name)[device]
    return {t.key: (t.value, t.effect, t.time_added) for t in found.taints}


async def break_it(it: Ward, gang: Scene, code: int) -> tuple[Node, str, datetime]:
    """Let a GPU of the gang fail; the time from which on its grace counts."""
    node, device = where(gang)
    log_xid(node, device, code)
    await it.until(f"XID {code} on {device}", 20, lambda: bool(it.taints(node.name, device)))
    since = parse_time(it.taints(node.name, device)[0].time_added)
    assert since is not None
    return node, device, since


async def told(gang: Scene, reason: str) -> list[str]:
    """Notes of the Events of one reason about the gang, in this test."""
    events, _ = await gang.api.list(EVENTS.path(gang.namespace), EVENTS.type)
    return [e.note for e in events if e.reason == reason]


async def until_told(gang: Scene, reason: str) -> None:
    """The Event follows the condition."""
    for _ in range(50):
        if await told(gang, reason):
            return
        await asyncio.sleep(0.1)
    raise TimeoutError(f"no Event {reason}")


async def forget(gang: Scene) -> None:
    await gang.api.delete(EVENTS.path(gang.namespace))


async def test_a_gang_stays_for_the_grace_and_is_then_evicted_once(it: Ward, gang: Scene) -> None:
    await forget(gang)
    before = uids(gang.running("train"))
    node, device, since = await break_it(it, gang, SHORT)
    assert beside(it, node, device) == {
        "gpunode.dev/xid": (str(SHORT), "NoSchedule", it.taints(node.name, device)[0].time_added),
        "grace.gpunode.dev/xid": (f"{GRACE_S}s", "None", it.taints(node.name, device)[0].time_added),
    }
    end = since + timedelta(seconds=GRACE_S)
    await gang.until("the reason", lambda: gang.placed("train")[1] == "DeviceFaultGrace", 5)
    assert gang.placed("train")[2] == (
        f"{DEFAULT_DRIVER}/{node.name}/{device} is tainted gpunode.dev/xid={SHORT} on {node.name}; "
        f"the health policy lets the gang stay until {end:%Y-%m-%dT%H:%M:%SZ}"
    )
    await until_told(gang, "DeviceFaultGrace")
    # Nothing else happens in the cluster until the controller finds by itself that the time has come.
    while (now := datetime.now(end.tzinfo)) < end - timedelta(seconds=0.5):
        assert uids(gang.running("train")) == before, f"evicted {end - now} before the grace ended"
        await asyncio.sleep(0.2)
    await gang.until("the gang is evicted", lambda: not before & uids(gang.running("train")), 10)
    assert datetime.now(end.tzinfo) >= end
    assert datetime.now(end.tzinfo) < end + timedelta(seconds=6)
    await gang.until("it runs elsewhere", lambda: len(gang.running("train")) == 2)
    after = uids(gang.running("train"))
    assert node.name not in {p.spec.node_name for p in gang.running("train")}
    await asyncio.sleep(GRACE_S)
    assert uids(gang.running("train")) == after, "evicted once"
    assert gang.placed("train")[:2] == ("True", "Placed")
    assert len(await told(gang, "DeviceFaultGrace")) == 1, "told once"


async def test_a_grace_without_end_outlives_the_agent_and_the_kubelet(
    it: Ward, gang: Scene, wish: Installation
) -> None:
    await forget(gang)
    cluster, before = it.cluster, uids(gang.running("train"))
    node, device, _ = await break_it(it, gang, ENDLESS)
    taints = beside(it, node, device)
    assert taints["grace.gpunode.dev/xid"][:2] == ("forever", "None")
    await gang.until("the reason", lambda: gang.placed("train")[1] == "DeviceFaultGrace", 5)
    assert gang.placed("train")[2].endswith("the health policy lets the gang stay as long as it likes")
    await until_told(gang, "DeviceFaultGrace")

    mark = log_end(cluster, node)
    await asyncio.to_thread(cluster.processes.kill, agent_name(node.name))
    await asyncio.to_thread(start_agent, cluster, node, wish)
    await until(lambda: ready(cluster, node, mark), "the agent is ready")
    assert beside(it, node, device) == taints
    old = {s.metadata.uid for s in it.slices.items.values() if s.spec.pool.name == node.name}
    await asyncio.to_thread(cluster.restart_kubelet, node.name)

    def anew() -> bool:
        found = {s.metadata.uid for s in it.slices.items.values() if s.spec.pool.name == node.name}
        return bool(found) and not old & found

    await it.until("new slices instead of those the kubelet wiped", 30, anew)
    assert beside(it, node, device) == taints

    await gang.api.create(PODS.path(gang.namespace), gang.pod("greedy", "eight"))
    await gang.api.create(PODS.path(gang.namespace), gang.pod("late", "eight"))
    await gang.until("one of them on the spare node", lambda: len(gang.running("greedy") + gang.running("late")) == 1)
    await asyncio.sleep(GRACE_S + 2)
    assert uids(gang.running("train")) == before
    assert len(gang.running("greedy") + gang.running("late")) == 1, "nobody new is placed on a faulty device"
    assert len(await told(gang, "DeviceFaultGrace")) == 1, "told once"


async def test_a_fault_that_ends_within_its_grace_moves_nobody(it: Ward, gang: Scene) -> None:
    before = uids(gang.running("train"))
    node, device, since = await break_it(it, gang, SHORT)
    await gang.until("the reason", lambda: gang.placed("train")[1] == "DeviceFaultGrace", 5)
    await it.recover(node.name, device)
    assert beside(it, node, device) == {}
    assert datetime.now(since.tzinfo) < since + timedelta(seconds=GRACE_S), "the test was too slow to mean anything"
    await gang.until("it is told that all is well", lambda: gang.placed("train")[:2] == ("True", "Placed"), 5)
    while datetime.now(since.tzinfo) < since + timedelta(seconds=GRACE_S + 3):
        await asyncio.sleep(0.2)
    assert uids(gang.running("train")) == before
    assert gang.placed("train")[0] == "True"
