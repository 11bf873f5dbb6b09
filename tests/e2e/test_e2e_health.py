"""Health on a real cluster: what a fault changes and what not, restarts around it, and the way back."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import msgspec
import pytest

from gpunode.agent.orders import give_order, new_order
from gpunode.cluster.cluster import Cluster, Node
from gpunode.cluster.install import Installation, agent_name, start_agent
from gpunode.model.names import PLACED_CONDITION, QUARANTINE_TAINT
from gpunode.model.resource import DeviceTaint
from tests.bench.bench_health import storm_on
from tests.ward import Ward, log_xid, ward

pytestmark = pytest.mark.e2e


@pytest.fixture
async def it(cluster: Cluster) -> AsyncIterator[Ward]:
    async with ward(cluster) as found:
        await found.recover_all()
        yield found
        await found.recover_all()
        await found.discharge()


@pytest.fixture
def node(cluster: Cluster) -> Node:
    return cluster.nodes[-1]


def gpunode(cluster: Cluster, *arguments: str) -> str:
    """Run the command as an administrator would."""
    command = [sys.executable, "-m", "gpunode", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def play(it: Ward, node: Node, *steps: dict[str, object]) -> None:
    """Let something happen to a node's fake GPUs, named by index."""
    script = {"name": "test", "description": "A test.", "steps": [{"at": 0, **step} for step in steps]}
    await give_order(it.api, node.name, new_order(scenario=msgspec.json.encode(script).decode()))


async def tainted(it: Ward, node: Node, device: str, key: str) -> DeviceTaint:
    """The taint, as soon as it is there."""

    def found() -> list[DeviceTaint]:
        return [t for t in it.taints(node.name, device) if t.key == f"gpunode.dev/{key}"]

    await it.until(f"{key} on {device}", 20, lambda: bool(found()))
    return found()[0]


def why_not(it: Ward, node: Node) -> str:
    """The reason that the node's patient is not placed, or ""."""
    pod = it.patient(node)
    conditions = pod.status.conditions if pod is not None else ()
    return next((c.message for c in conditions if c.type == PLACED_CONDITION and c.status == "False"), "")


async def test_a_device_goes_out_of_use_and_comes_back(it: Ward, node: Node) -> None:
    device = sorted(it.devices(node.name))[0]
    await play(it, node, {"do": "remap-failed", "gpu": 0})
    taint = await tainted(it, node, device, "remap")
    assert (taint.value, taint.effect) == ("failed", "NoSchedule")
    it.admit(node)
    await it.until("a reason why the pod waits", 20, lambda: bool(why_not(it, node)))
    after = max(int(e.metadata.resource_version) for e in it.events.items.values())
    await it.recover(node.name, device)
    await it.until("the pod that needs the device runs", 30, lambda: it.is_running(node))
    await it.until("the Event", 10, lambda: bool(it.told("GpuRecovered", device, node.name, after)))
    assert any("is over: cleared by fault order" in note for note in it.told("GpuRecovered", device, node.name, after))


async def test_a_fault_concerns_one_device_of_one_pod_and_outlives_restarts(it: Ward, node: Node) -> None:
    """One story, for it is the same fault: raised, agent killed, kubelet restarted, over."""
    cluster = it.cluster
    it.admit(node)
    await it.until("a pod on all GPUs of the node", 30, lambda: it.is_running(node))
    before = {name: it.devices(name) for name in (n.name for n in cluster.nodes)}
    versions = {s.metadata.name: s.metadata.resource_version for s in it.slices.items.values()}
    uid = it.patient(node).metadata.uid  # type: ignore[union-attr]
    faulty, other = sorted(it.devices(node.name))[1:3]

    log_xid(node, faulty, 79, "GPU has fallen off the bus.")
    taint = await tainted(it, node, faulty, "xid")
    assert (taint.value, taint.effect) == ("79", "NoSchedule")
    await it.until("Unhealthy in pod.status", 20, lambda: bool(it.unhealthy(faulty, node.name)))
    assert it.unhealthy(faulty, node.name).startswith("XID 79 (GPU has fallen off the bus): restart the host")
    assert it.unhealthy(other, node.name) == ""
    assert {n: {d: v for d, v in ds.items() if (n, d) != (node.name, faulty)} for n, ds in before.items()} == {
        n: {d: v for d, v in it.devices(n).items() if (n, d) != (node.name, faulty)} for n in before
    }
    changed = {name for name, s in _versions(it).items() if s != versions.get(name)}
    assert len(changed) == 1, "one fault is one write to one slice"

    settled = _versions(it)
    await asyncio.to_thread(cluster.processes.kill, agent_name(node.name))
    told = cluster.processes.log(agent_name(node.name)).stat().st_size
    await asyncio.to_thread(start_agent, cluster, node, Installation())
    await _until_ready(cluster, node, told)
    assert it.taints(node.name, faulty) == (taint,)
    assert _versions(it) == settled, "an agent that comes back finds its slices in order"

    old = _uids(it, node)
    await asyncio.to_thread(cluster.restart_kubelet, node.name)
    await it.until(
        "new slices instead of those the kubelet wiped", 30, lambda: bool(_uids(it, node)) and not old & _uids(it, node)
    )
    assert it.taints(node.name, faulty) == (taint,), "the taint and its time are as they were"
    assert {d: v for d, v in it.devices(node.name).items() if d != faulty} == {
        d: v for d, v in before[node.name].items() if d != faulty
    }
    await asyncio.sleep(2)  # for the controller to misunderstand
    assert it.is_running(node)
    assert it.patient(node).metadata.uid == uid  # type: ignore[union-attr]

    await it.recover(node.name, faulty)
    await it.until("Healthy in pod.status", 20, lambda: not it.unhealthy(faulty, node.name))
    assert it.devices(node.name) == before[node.name]


def _uids(it: Ward, node: Node) -> set[str]:
    return {s.metadata.uid for s in it.slices.items.values() if s.spec.pool.name == node.name}


def _versions(it: Ward) -> dict[str, str]:
    return {s.metadata.name: s.metadata.resource_version for s in it.slices.items.values()}


async def _until_ready(cluster: Cluster, node: Node, told: int) -> None:
    """Until the agent that was just started says that it serves. told: what its log held before, in bytes."""
    log = cluster.processes.log(agent_name(node.name))
    for _ in range(300):
        if b"ready: slices published" in log.read_bytes()[told:]:
            return
        await asyncio.sleep(0.1)
    raise TimeoutError(cluster.processes.tail(agent_name(node.name)))


async def test_two_faults_and_an_operator_ends_one(it: Ward, node: Node) -> None:
    device = sorted(it.devices(node.name))[2]
    await play(it, node, {"do": "remap-failed", "gpu": 2})
    log_xid(node, device, 109, "CTX SWITCH TIMEOUT")
    for key in ("xid", "remap"):
        await tainted(it, node, device, key)
    state = str(node.state / "gpunode" / "health.json")
    gpunode(it.cluster, "health", "clear", device, "--dimension", "xid", "--state", state)
    await it.until(
        "only one is left", 20, lambda: [t.key for t in it.taints(node.name, device)] == ["gpunode.dev/remap"]
    )


async def test_a_quarantine_is_a_persons_word(it: Ward, node: Node) -> None:
    device = sorted(it.devices(node.name))[3]
    where = (node.name, device, "--kubeconfig", str(it.cluster.kubeconfig))
    gpunode(it.cluster, "quarantine", *where, "--reason", "end-to-end test")
    try:
        it.admit(node)
        await it.until("a reason why the pod waits", 20, lambda: bool(why_not(it, node)))
        assert QUARANTINE_TAINT in why_not(it, node)
    finally:
        gpunode(it.cluster, "quarantine", *where, "--lift")
    await it.until("the pod that needs the device runs", 30, lambda: it.is_running(node))


async def test_a_storm_is_one_state_and_hides_nothing(it: Ward) -> None:
    """A tenth of the one that `make bench` measures. The fault within it is waited for."""
    found = await storm_on(it.cluster, 10_000, 1.0)
    assert 1 <= found["writes"][0] <= 5
