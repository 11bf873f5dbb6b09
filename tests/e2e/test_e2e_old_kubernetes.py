"""The older Kubernetes: PodGroup v1alpha2, DeviceTaintRule v1beta2 and DRA health v1alpha1 carry the story as well.

Marked soak too, since its control plane takes minutes to compile once more.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpunode.cluster import build, packages
from gpunode.cluster.cluster import Cluster
from gpunode.cluster.story import NAMESPACE, stage
from gpunode.kube.client import Api
from gpunode.kube.kinds import discover
from tests.e2e.checkers import checkers
from tests.e2e.test_e2e_story import assert_whole
from tests.fixtures import fresh_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

VERSION = "1.36.3"
PAIR = Path(__file__).parent / "pair.yaml"


@pytest.fixture(scope="module")
def old() -> Iterator[Cluster]:
    """Three nodes of eight fake A100s: a gang of two has one to spare."""
    packages.install(print)
    build.build(VERSION, lambda step, done: print(f"[{done:4.0%}] {step}", flush=True))
    with fresh_cluster("old", 21443, nodes=3, kubernetes=VERSION) as found:
        yield found


async def test_it_serves_the_older_api_versions(old: Cluster) -> None:
    async with await Api.connect(old.kubeconfig, "gpunode-test") as api:
        served = await discover(api)
    assert served.pod_groups is not None
    assert served.pod_groups.group_version == "scheduling.k8s.io/v1alpha2"
    assert served.taint_rules is not None
    assert served.taint_rules.group_version == "resource.k8s.io/v1beta2"


async def test_a_gang_is_placed_broken_and_put_back_together(old: Cluster) -> None:
    async with stage(old) as it:
        it.apply("team-a")
        await it.clear()
        async with checkers(old, size=2) as check:
            it.apply(PAIR)
            await it.until_running("train", 2, 60)
            before = it.ranks("train")
            assert len({rank.node for rank in before}) == 2
            assert all(len(set(rank.devices)) == 8 for rank in before)
            assert it.placed("train")[0] == "True"

            broken = await it.break_one("train", 79, rank=1)
            assert "XID 79" in broken.message
            assert len(broken.ranks) == 2
            assert broken.rank.node not in {rank.node for rank in broken.ranks}, "placed on the faulty node again"
            assert not {rank.uid for rank in broken.ranks} & {rank.uid for rank in before}

            await it.until("Job train is Complete", 60, lambda: it.complete("train"))
            job = it.jobs.items[f"{NAMESPACE}/train"]
            assert (job.status.succeeded, job.status.failed) == (2, 0)
            assert check.jobs.suspensions == {f"{NAMESPACE}/train": 1}
            assert_whole(check)
        await it.clear()


async def test_a_rule_of_the_older_version_moves_a_gang(old: Cluster) -> None:
    async with stage(old) as it:
        await it.clear()
        it.apply(PAIR)
        await it.until_running("train", 2, 60)
        before = it.ranks("train")
        leaving = before[0].node
        command = [sys.executable, "-m", "gpunode", "quarantine", leaving, before[0].devices[0]]
        env = {**os.environ, "KUBECONFIG": str(old.kubeconfig)}
        subprocess.run([*command, "--reason", "test"], env=env, check=True, timeout=30)
        try:
            await it.until_running("train", 2, 60, after=[rank.uid for rank in before])
            assert leaving not in {rank.node for rank in it.ranks("train")}
        finally:
            subprocess.run([*command, "--lift"], env=env, check=True, timeout=30)
        await it.until("Job train is Complete", 60, lambda: it.complete("train"))
        await it.clear()
