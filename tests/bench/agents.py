"""Figures of one agent on a real node: its start, its slices over restarts, and what it uses when nothing happens."""

import asyncio
import re
import time
from datetime import datetime

import psutil

from gpunode.cluster.cluster import Cluster, Node
from gpunode.cluster.install import Installation, agent_name, start_agent
from tests.e2e.rolling import kill_agent, replace_agent, restart_kubelet, slice_gaps

_READY = re.compile(r"^(\S+ \S+) INFO .*ready: slices published", re.MULTILINE)


def start_s(cluster: Cluster, samples: int = 10) -> list[float]:
    """Seconds from starting the process to slices published and plugin registered, on a node with no slices before.

    The end is the agent's own word, by its log, which it gives after the API server's answer and the kubelet's call.
    """
    node = cluster.nodes[-1]
    found = []
    for _ in range(samples):
        stop_agent(cluster, node)
        log = cluster.processes.log(agent_name(node.name))
        before = log.stat().st_size
        began = time.time()
        start_agent(cluster, node, Installation())
        found.append(_ready_at(cluster, node, before) - began)
    return found


def stop_agent(cluster: Cluster, node: Node) -> None:
    """Stop the agent and take its slices away, so that the next one has everything to do."""
    cluster.processes.stop(agent_name(node.name))
    path = f"/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.nodeName%3D{node.name}"
    cluster.api.call("DELETE", path)


def _ready_at(cluster: Cluster, node: Node, after: int) -> float:
    log = cluster.processes.log(agent_name(node.name))
    deadline = time.time() + 30
    while time.time() < deadline:
        with log.open() as file:
            file.seek(after)
            if match := _READY.search(file.read()):
                return datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        time.sleep(0.05)
    raise TimeoutError(f"the agent of {node.name} is not ready: {cluster.processes.tail(agent_name(node.name))}")


def slice_gap_s(cluster: Cluster, rounds: int = 3) -> list[float]:
    """The longest time without the node's slices in each of: a kubelet restart, kill -9 of the agent, a rolling update
    there and one back. As a watch sees it, which is how the controller and kube-scheduler do."""
    return asyncio.run(_slice_gaps(cluster, rounds))


async def _slice_gaps(cluster: Cluster, rounds: int) -> list[float]:
    node = cluster.nodes[-1]
    found = []
    for _ in range(rounds):
        async with slice_gaps(cluster, node) as gaps:
            await restart_kubelet(cluster, node, gaps)
            found.append(gaps.longest_s)
        async with slice_gaps(cluster, node) as gaps:
            await kill_agent(cluster, node)
            found.append(gaps.longest_s)
        async with slice_gaps(cluster, node) as gaps:
            await replace_agent(cluster, node, old="", new="next")
            await replace_agent(cluster, node, old="next", new="")
            found.append(gaps.longest_s)
    return found


def rss_mb(cluster: Cluster) -> list[float]:
    """Resident memory of every agent, in MB (10^6 bytes)."""
    return [psutil.Process(pid).memory_info().rss / 1e6 for pid in _pids(cluster)]


def cpu_idle_percent(cluster: Cluster, seconds: float = 60.0) -> list[float]:
    """Share of one core that every agent used over a quiet minute, in percent."""
    processes = [psutil.Process(pid) for pid in _pids(cluster)]
    before = [sum(p.cpu_times()[:2]) for p in processes]
    time.sleep(seconds)
    return [(sum(p.cpu_times()[:2]) - b) / seconds * 100 for p, b in zip(processes, before, strict=True)]


def _pids(cluster: Cluster) -> list[int]:
    records = [cluster.processes.get(agent_name(node.name)) for node in cluster.nodes]
    return [record.pid for record in records if record is not None]
