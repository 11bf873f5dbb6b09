"""The story of `make demo`, checked: a gang placed whole, broken by a fault, put back together."""

import pytest

from gpunode.cluster.cluster import Cluster
from gpunode.cluster.install import kubectl
from gpunode.cluster.story import NAMESPACE, Stage, stage
from tests.e2e.checkers import Checkers, checkers

pytestmark = pytest.mark.e2e

# How long a gang may be partly bound: between the first and the last bind of one commit, or the first and the last
# deletion of one eviction. Bounded by API writes, so generous on a slow machine and far below any pod's life.
WINDOW_S = 5.0


def assert_whole(check: Checkers) -> None:
    assert check.gang.still_partial_s() == 0
    assert all(seconds < WINDOW_S for seconds in check.gang.partial_s), check.gang.partial_s
    assert check.devices.changes > 0, "the checker saw no claims: it checked nothing"


async def test_a_gang_is_placed_broken_and_put_back_together(cluster: Cluster) -> None:
    async with stage(cluster) as it:
        it.apply("team-a")
        await it.clear()
        async with checkers(cluster) as check:
            it.apply("train")
            await it.until_running("train", 8, 60)
            before = it.ranks("train")
            assert [rank.rank for rank in before] == list(range(8))
            assert len({rank.node for rank in before}) == 8
            assert all(len(set(rank.devices)) == 8 for rank in before)
            check_container(cluster, it, before[0].pod)

            broken = await it.break_one("train", 79)
            assert "XID 79" in broken.message
            assert broken.device in broken.message
            assert len(broken.ranks) == 8
            assert broken.rank.node not in {rank.node for rank in broken.ranks}, "placed on the faulty node again"
            assert not {rank.uid for rank in broken.ranks} & {rank.uid for rank in before}

            it.apply("too-large")
            await it.until("a reason", 20, lambda: it.placed("too-large")[1] == "WaitingForDevices")
            assert not [pod for pod in it.members("too-large") if pod.spec.node_name]
            reason = it.placed("too-large")[2]
            assert "2 pods × 8 GPUs" in reason
            assert "0 of 9 nodes" in reason

            await it.until("Job train is Complete", 120, lambda: it.complete("train"))
            job = it.jobs.items[f"{NAMESPACE}/train"]
            assert (job.status.succeeded, job.status.failed) == (8, 0)
            assert check.jobs.suspensions == {f"{NAMESPACE}/train": 1}
            assert check.jobs.suspended == set()
            assert_whole(check)
            # The way is free now: the second gang runs without anyone's help.
            await it.until("Job too-large is Complete", 60, lambda: it.complete("too-large"))
        await it.clear()


def check_container(cluster: Cluster, it: Stage, pod: str) -> None:
    """What the container itself sees: one variable and one device node a GPU, and nothing of its neighbours."""
    seen = kubectl(cluster, "exec", "-n", NAMESPACE, pod, "--", "env")
    variables = dict(line.split("=", 1) for line in seen.splitlines() if line.startswith("GPUNODE_GPU_"))
    devices = {name.removeprefix("GPUNODE_GPU_").replace("_", "-").lower() for name in variables}
    rank = next(rank for rank in it.ranks("train") if rank.pod == pod)
    assert {f"gpu-{device}" for device in devices} == set(rank.devices)
    visible = next(line for line in seen.splitlines() if line.startswith("NVIDIA_VISIBLE_DEVICES="))
    assert set(visible.partition("=")[2].split(",")) == set(variables.values())
    nodes = kubectl(cluster, "exec", "-n", NAMESPACE, pod, "--", "sh", "-c", "ls -l /dev/nvidia[0-9]*")
    lines = nodes.splitlines()
    assert len(lines) == 8
    assert all(line.startswith("c") and "195," in line for line in lines), nodes
