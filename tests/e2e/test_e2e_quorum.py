"""A member re-created after a sibling has succeeded: kube-scheduler would let it wait for ever."""

from pathlib import Path

import pytest

from gpunode.cluster.cluster import Cluster
from gpunode.cluster.install import kubectl
from gpunode.cluster.story import NAMESPACE, RANK_LABEL, stage
from gpunode.model.core import Pod
from tests.e2e.checkers import checkers

pytestmark = pytest.mark.e2e
MANIFEST = Path(__file__).parent / "straggler.yaml"


async def test_a_re_created_member_runs_although_a_sibling_is_done(cluster: Cluster) -> None:
    async with stage(cluster) as it, checkers(cluster, job="straggler", size=3):
        it.apply("team-a")
        it.apply(MANIFEST)

        def rank(number: int) -> list[Pod]:
            return [p for p in it.members("straggler") if p.metadata.labels.get(RANK_LABEL) == str(number)]

        await it.until("rank 0 has succeeded", 60, lambda: any(p.status.phase == "Succeeded" for p in rank(0)))
        await it.until("rank 1 runs", 60, lambda: any(p.status.phase == "Running" for p in rank(1)))
        (old,) = rank(1)
        kubectl(cluster, "delete", "pod", "-n", NAMESPACE, old.metadata.name, "--wait=false")
        await it.until(
            "a new rank 1 runs",
            60,
            lambda: any(p.status.phase == "Running" and p.metadata.uid != old.metadata.uid for p in rank(1)),
        )
        await it.until("Job straggler is Complete", 60, lambda: it.complete("straggler"))
        it.delete(MANIFEST)
        await it.until("its pods are gone", 60, lambda: not it.members("straggler"))
