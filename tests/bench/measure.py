"""Everything that `make bench` can measure: name -> how, and in which unit.

Names are stable; a figure is one number over samples that are kept beside it.
"""

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from gpunode.cluster.cluster import Cluster
from gpunode.cluster.story import Break, stage
from tests.bench import agents, bench_health
from tests.bench.bench_decide import bench_decide
from tests.bench.bench_prepare import prepare8_ms
from tests.bench.bench_slices import discover8_ms, plan16_ms
from tests.bench.results import Measurement

Samples = list[float]
_STORIES = 3


@dataclass(frozen=True)
class Figure:
    """How to measure one name. A figure with `cluster` needs nine nodes with gpunode installed.

    group: figures of one group come from the same run and are measured together.
    """

    name: str
    unit: str
    summary: str
    group: str
    cluster: bool = False


FIGURES = (
    Figure("slices.plan16_ms", "ms", "median", "plan16"),
    Figure("slices.discover8_ms", "ms", "median", "discover8"),
    Figure("agent.prepare_p99_ms", "ms", "p99", "prepare8"),
    Figure("gang.decide_place_ms", "ms", "median", "decide"),
    Figure("gang.decide_waiting_ms", "ms", "median", "decide"),
    Figure("agent.start_s", "s", "max", "start", cluster=True),
    Figure("agent.slice_gap_s", "s", "max", "gap", cluster=True),
    Figure("agent.rss_mb", "MB", "max", "rss", cluster=True),
    Figure("agent.cpu_idle_percent", "% of a core", "max", "idle", cluster=True),
    Figure("health.taint_p99_ms", "ms", "p99", "fault", cluster=True),
    Figure("health.pod_status_p99_ms", "ms", "p99", "fault", cluster=True),
    Figure("health.storm_api_writes", "writes", "max", "storm", cluster=True),
    Figure("health.storm_settle_s", "s", "max", "storm", cluster=True),
    Figure("story.pod_status_s", "s", "max", "story", cluster=True),
    Figure("story.evicted_s", "s", "max", "story", cluster=True),
    Figure("story.running_again_s", "s", "max", "story", cluster=True),
)


def measure(group: str, cluster: Cluster | None) -> dict[str, Samples]:
    """Samples by name for all figures of a group."""
    if cluster is None:
        return _LOCAL[group]()
    return _ON_CLUSTER[group](cluster)


def summarise(figure: Figure, samples: Samples) -> Measurement:
    """The one number. p99 is the smallest sample that 99 % do not exceed."""
    ordered = sorted(samples)
    value = {
        "median": lambda: statistics.median(ordered),
        "max": lambda: ordered[-1],
        "p99": lambda: ordered[max(0, -(-len(ordered) * 99 // 100) - 1)],
    }[figure.summary]()
    return Measurement(value, figure.unit, tuple(samples), figure.summary)


def _decide() -> dict[str, Samples]:
    found = bench_decide()
    return {"gang.decide_place_ms": found["place"], "gang.decide_waiting_ms": found["waiting"]}


def _fault(cluster: Cluster) -> dict[str, Samples]:
    found = bench_health.latency_ms(cluster)
    return {"health.taint_p99_ms": found["taint"], "health.pod_status_p99_ms": found["status"]}


def _storm(cluster: Cluster) -> dict[str, Samples]:
    found = bench_health.storm(cluster)
    return {"health.storm_api_writes": found["writes"], "health.storm_settle_s": found["settle"]}


def _story(cluster: Cluster) -> dict[str, Samples]:
    broken = asyncio.run(_tell(cluster))
    return {
        "story.pod_status_s": [b.pod_status_s for b in broken],
        "story.evicted_s": [b.evicted_s for b in broken],
        "story.running_again_s": [b.running_again_s for b in broken],
    }


async def _tell(cluster: Cluster) -> list[Break]:
    """The story, several times, each on another rank and GPU."""
    found = []
    async with stage(cluster) as it:
        it.apply("team-a")
        for run in range(_STORIES):
            await it.clear()
            it.apply("train")
            await it.until_running("train", 8, 60)
            found.append(await it.break_one("train", 79, rank=run % 8, device=(3 * run) % 8))
        await it.clear()
    return found


_LOCAL: dict[str, Callable[[], dict[str, Samples]]] = {
    "plan16": lambda: {"slices.plan16_ms": plan16_ms()},
    "discover8": lambda: {"slices.discover8_ms": discover8_ms()},
    "prepare8": lambda: {"agent.prepare_p99_ms": prepare8_ms()},
    "decide": _decide,
}
_ON_CLUSTER: dict[str, Callable[[Cluster], dict[str, Samples]]] = {
    "start": lambda cluster: {"agent.start_s": agents.start_s(cluster)},
    "gap": lambda cluster: {"agent.slice_gap_s": agents.slice_gap_s(cluster)},
    "rss": lambda cluster: {"agent.rss_mb": agents.rss_mb(cluster)},
    "idle": lambda cluster: {"agent.cpu_idle_percent": agents.cpu_idle_percent(cluster)},
    "fault": _fault,
    "storm": _storm,
    "story": _story,
}
