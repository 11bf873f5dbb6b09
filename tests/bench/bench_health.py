"""How fast a fault is told, and what a storm costs. Run by the benchmark on a cluster; nothing is asserted here."""

import asyncio
import time
from itertools import count

import psutil

from gpunode.cluster.cluster import Cluster, Node
from gpunode.cluster.install import agent_name
from gpunode.hardware.fake import kernel_log
from tests.ward import Ward, log_xid, ward

_XID = 79
_STORM_LINES, _STORM_S = 100_000, 10.0
_CALM_SHARE, _CALM_WINDOW_S = 0.05, 0.5


def latency_ms(cluster: Cluster) -> dict[str, list[float]]:
    """Milliseconds from an XID in a node's kernel log to the taint, and to Unhealthy in pod.status.

    One fault after the other on every GPU of every node, each held by a running pod. The end is when a watch of the
    API server shows it here.
    """
    return asyncio.run(_latency(cluster))


async def _latency(cluster: Cluster) -> dict[str, list[float]]:
    taint: list[float] = []
    status: list[float] = []
    async with ward(cluster) as it:
        await it.recover_all()
        for node in cluster.nodes:
            it.admit(node)
        try:
            await it.until(
                "a running patient on every node",
                90,
                lambda: all(it.is_running(node) for node in cluster.nodes),
            )
            for node in cluster.nodes:
                for device in sorted(it.devices(node.name)):
                    one, other = await _fault(it, node, device)
                    taint.append(one)
                    status.append(other)
        finally:
            await it.recover_all()
            await it.discharge()
    return {"taint": taint, "status": status}


async def _fault(it: Ward, node: Node, device: str) -> tuple[float, float]:
    written = await asyncio.to_thread(log_xid, node, device, _XID, "GPU has fallen off the bus.")
    tainted, told = await asyncio.gather(
        it.until(f"a taint on {device} of {node.name}", 30, lambda: bool(it.taints(node.name, device))),
        it.until(f"{device} of {node.name} Unhealthy in pod.status", 30, lambda: bool(it.unhealthy(device, node.name))),
    )
    return (tainted - written) * 1000, (told - written) * 1000


def storm(cluster: Cluster) -> dict[str, list[float]]:
    """Writes to the API that the agent makes because of 100,000 lines of XID 45 in ten seconds with one XID 79 of
    another GPU among them, and seconds after the last line until the agent uses less than 5 % of a core again.

    Raises TimeoutError when the XID 79 is missed.
    """
    return asyncio.run(storm_on(cluster, _STORM_LINES, _STORM_S))


async def storm_on(cluster: Cluster, lines: int, seconds: float) -> dict[str, list[float]]:
    """`storm` of another size, on the first node."""
    node = cluster.nodes[0]
    record = cluster.processes.get(agent_name(node.name))
    if record is None:
        raise RuntimeError(f"no agent on {node.name}")
    async with ward(cluster) as it:
        await it.recover_all()
        noisy, broken, *_ = sorted(it.devices(node.name))
        await asyncio.sleep(2)
        before = it.writes.get(node.name, 0)
        ended = await asyncio.to_thread(_write_storm, node, noisy, broken, lines, seconds)
        calm = await asyncio.to_thread(_calm_after, psutil.Process(record.pid), ended)
        await it.until("the fault within the storm", 10, lambda: bool(it.taints(node.name, broken)))
        await asyncio.sleep(2)
        writes = it.writes.get(node.name, 0) - before
        await it.recover_all()
    return {"writes": [float(writes)], "settle": [calm]}


def _write_storm(node: Node, noisy: str, broken: str, lines: int, seconds: float) -> float:
    """Lines in portions of ten milliseconds, as the kernel would; time.monotonic() at the last one."""
    domain, bus, slot, _ = noisy.removeprefix("gpu-").split("-")
    text = f"NVRM: Xid (PCI:{domain}:{bus}:{slot}): 45, pid=4711, name=python3, Ch 00000010"
    kernel_log.append(node.kmsg, text)
    first = int(node.kmsg.read_bytes().rstrip().rpartition(b"\n")[2].split(b",")[1]) + 1
    began = time.monotonic()
    numbers = count(first)
    portions = int(seconds / 0.01)
    with node.kmsg.open("ab", buffering=0) as log:
        for portion in range(portions):
            now = time.monotonic_ns() // 1000
            log.write("".join(f"3,{next(numbers)},{now},-;{text}\n" for _ in range(lines // portions)).encode())
            if portion == portions // 2:
                log_xid(node, broken, _XID, "GPU has fallen off the bus.")
                next(numbers)
            time.sleep(max(0.0, began + 0.01 * (portion + 1) - time.monotonic()))
    return time.monotonic()


def _calm_after(process: psutil.Process, ended: float) -> float:
    while True:
        used, since = sum(process.cpu_times()[:2]), time.monotonic()
        time.sleep(_CALM_WINDOW_S)
        if sum(process.cpu_times()[:2]) - used < _CALM_SHARE * (time.monotonic() - since):
            return since - ended
