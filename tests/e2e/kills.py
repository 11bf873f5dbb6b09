"""The story under fire: agents and the controller are killed at random moments and started again."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gpunode.cluster.cluster import Cluster
from gpunode.cluster.install import CONTROLLER, Installation, agent_name, start_agent, start_controller
from gpunode.cluster.story import NAMESPACE, stage
from tests.e2e.checkers import checkers

QUICK = Path(__file__).parent / "quick.yaml"
# Between the first and the last bind or deletion lies now, at worst, a restart of the controller: an interpreter
# start, listing the cluster and one decision, on two cores shared with nine kubelets.
WINDOW_S = 20.0


@asynccontextmanager
async def under_fire(cluster: Cluster, seed: int) -> AsyncIterator[list[str]]:
    """kill -9 the controller (two times of three) or a random agent, every 2.5 s on average; each starts again.

    Times are exponential, so kills also follow each other closely, and sometimes leave time to get something done.

    Yields the list of what was killed, which grows meanwhile. At the end everything runs.
    """
    dice = random.Random(seed)
    killed: list[str] = []
    wish = Installation()

    async def fire() -> None:
        while True:
            await asyncio.sleep(min(8.0, dice.expovariate(1 / 2.5)))
            node = dice.choice(cluster.nodes)
            name = CONTROLLER if dice.random() < 2 / 3 else agent_name(node.name)
            pause = dice.choice((0.0, 0.0, 1.0))
            await asyncio.to_thread(cluster.processes.kill, name)
            killed.append(name)
            await asyncio.sleep(pause)
            if name == CONTROLLER:
                await asyncio.to_thread(start_controller, cluster, wish)
            else:
                await asyncio.to_thread(start_agent, cluster, node, wish)

    task = asyncio.create_task(fire())
    try:
        yield killed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(start_controller, cluster, wish)
        for node in cluster.nodes:
            await asyncio.to_thread(start_agent, cluster, node, wish)


async def story_under_fire(cluster: Cluster, seed: int) -> int:
    """One quick story with kills all the way; the number of kills. Fails by assertion or TooSlowError."""
    async with stage(cluster) as it:
        it.apply("team-a")
        await it.clear()
        async with checkers(cluster) as check:
            async with under_fire(cluster, seed) as killed:
                it.apply(QUICK)
                await it.until_running("train", 8, 120)
                broken = await it.break_one("train", 79, rank=seed % 8, device=seed // 8 % 8, tries=4)
                assert len(broken.ranks) == 8
                assert broken.rank.node not in {rank.node for rank in broken.ranks}
                await it.until("Job train is Complete", 180, lambda: it.complete("train"))
            await it.until("no Job is left suspended", 30, lambda: not check.jobs.suspended)
            job = it.jobs.items[f"{NAMESPACE}/train"]
            assert (job.status.succeeded, job.status.failed) == (8, 0)
            assert check.jobs.suspensions == {f"{NAMESPACE}/train": 1}, "evicted more than once"
            assert all(seconds < WINDOW_S for seconds in check.gang.partial_s), check.gang.partial_s
        await it.clear()
        return len(killed)
