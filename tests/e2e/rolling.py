"""What a node goes through without its pods noticing: its kubelet restarted, its agent killed or replaced by another.

The end-to-end tests do it beside a running gang, the benchmark to measure how long the node had no slices.
"""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gpunode.cluster.cluster import Cluster, Node
from gpunode.cluster.install import Installation, agent_name, start_agent
from gpunode.cluster.nodes import NODE_MARKER, process_name
from gpunode.cluster.processes import environment, stop_pids
from gpunode.kube.cache import Cache, following
from gpunode.kube.client import Api
from gpunode.kube.kinds import SLICES
from gpunode.model.names import DEFAULT_DRIVER
from gpunode.model.resource import ResourceSlice

READY = "ready: slices published"


@dataclass
class SliceGaps:
    """How long one node's pool was not whole (gone, or fewer slices than it says), as a watch saw it, in seconds."""

    gaps_s: list[float] = field(default_factory=list)
    uids: set[str] = field(default_factory=set)
    _slices: dict[str, ResourceSlice] = field(default_factory=dict)
    _since: float | None = None

    def on_slice(self, key: str, found: ResourceSlice | None) -> None:
        """Take in one version of one slice of the node."""
        if found is None:
            self._slices.pop(key, None)
        else:
            self._slices[key] = found
            self.uids.add(found.metadata.uid)
        now = time.monotonic()
        if not self._whole() and self._since is None:
            self._since = now
        elif self._whole() and self._since is not None:
            self.gaps_s.append(now - self._since)
            self._since = None

    def _whole(self) -> bool:
        newest = max((s.spec.pool.generation for s in self._slices.values()), default=0)
        current = [s.spec.pool for s in self._slices.values() if s.spec.pool.generation == newest]
        return bool(current) and len(current) == current[0].resource_slice_count

    @property
    def longest_s(self) -> float:
        """The longest gap, one that lasts included."""
        return max([*self.gaps_s, 0.0 if self._since is None else time.monotonic() - self._since], default=0.0)


@asynccontextmanager
async def slice_gaps(cluster: Cluster, node: Node) -> AsyncIterator[SliceGaps]:
    """Watch a node's slices while the block runs."""
    gaps = SliceGaps()
    selector = {"fieldSelector": f"spec.nodeName={node.name},spec.driver={DEFAULT_DRIVER}"}
    async with await Api.connect(cluster.kubeconfig, "gpunode-checker") as api:
        cache = Cache(api, SLICES, params=selector, on_change=gaps.on_slice)
        async with following(cache):
            gaps.gaps_s.clear()
            yield gaps


async def restart_kubelet(cluster: Cluster, node: Node, gaps: SliceGaps) -> None:
    """Restart it and wait until the slices that it deletes at its start are there again."""
    before = set(gaps.uids)
    await asyncio.to_thread(cluster.restart_kubelet, node.name)
    await until(lambda: bool(gaps.uids - before), f"new slices of {node.name} after its kubelet's restart")


async def kill_agent(cluster: Cluster, node: Node, pause_s: float = 0.0) -> None:
    """kill -9, and a new one after a pause; returns when that is ready."""
    mark = log_end(cluster, node)
    await asyncio.to_thread(cluster.processes.kill, agent_name(node.name))
    await asyncio.sleep(pause_s)
    await asyncio.to_thread(start_agent, cluster, node, Installation())
    await until(lambda: ready(cluster, node, mark), f"the agent of {node.name} to be ready")


async def reboot(cluster: Cluster, node: Node) -> None:
    """The node loses power and boots: every process of it dies at once, /run and the kernel log are empty, and the
    agent finds a boot id that is new to it. Returns when the agent is ready."""
    mark = log_end(cluster, node)
    await asyncio.to_thread(_lose_power, cluster, node)
    (node.state / "fake" / "machine.json").unlink()
    node.kmsg.write_text("")
    runner = cluster.runner(node.name)
    await asyncio.to_thread(runner.start_runtime)
    await asyncio.to_thread(runner.start_kubelet)
    await asyncio.to_thread(start_agent, cluster, node, Installation())
    await until(lambda: ready(cluster, node, mark), f"the agent of {node.name} to be ready")


def _lose_power(cluster: Cluster, node: Node) -> None:
    runner = cluster.runner(node.name)
    for name in (agent_name(node.name), process_name(node.name, "kubelet")):
        cluster.processes.kill(name)
    ctr = (runner.binaries["ctr"], "--address", str(runner.files.socket), "--namespace", "k8s.io", "tasks")
    tasks = subprocess.run([*ctr, "ls", "-q"], capture_output=True, text=True, check=True).stdout.split()
    for task in tasks:  # one that has ended meanwhile is what is wanted
        subprocess.run([*ctr, "kill", "--all", "--signal", "KILL", task], capture_output=True, check=False)
    marked = cluster.processes.marked().items()
    stop_pids({pid: ticks for pid, ticks in marked if environment(pid).get(NODE_MARKER) == node.name}, grace=0)


async def replace_agent(cluster: Cluster, node: Node, old: str, new: str, metrics_port: int = 0) -> None:
    """A rolling update of one node: the new instance is started, and once it is ready the old one is stopped."""
    mark = log_end(cluster, node, new)
    await asyncio.to_thread(start_agent, cluster, node, Installation(metrics_port=metrics_port), new)
    await until(lambda: ready(cluster, node, mark, new), f"agent {new!r} of {node.name} to be ready")
    await asyncio.to_thread(cluster.processes.stop, agent_name(node.name, old))


def log_end(cluster: Cluster, node: Node, instance: str = "") -> int:
    """Size of an agent's log now, to look for what comes after."""
    log = cluster.processes.log(agent_name(node.name, instance))
    return log.stat().st_size if log.exists() else 0


def ready(cluster: Cluster, node: Node, after: int, instance: str = "") -> bool:
    """Whether an agent has said that it is ready, behind that place of its log."""
    log = cluster.processes.log(agent_name(node.name, instance))
    return log.exists() and READY.encode() in log.read_bytes()[after:]


async def until(true: Callable[[], bool], what: str, seconds: float = 60.0, every_s: float = 0.1) -> None:
    """Raises TimeoutError naming what did not happen."""
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(true):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        await asyncio.sleep(every_s)
