"""kill -9 of agent or controller at any time: the story still ends well."""

import os
from collections.abc import Callable

import pytest

from gpunode.cluster.cluster import Cluster
from tests.e2e.kills import story_under_fire

pytestmark = pytest.mark.e2e


async def test_the_story_survives_kills_at_random_moments(cluster: Cluster) -> None:
    kills = await story_under_fire(cluster, seed=20)
    assert kills >= 5, "too few kills to mean anything"


@pytest.mark.soak
@pytest.mark.parametrize("run", range(20))
async def test_many_stories_survive_kills(
    cluster: Cluster, run: int, record_property: Callable[[str, object], None]
) -> None:
    seed = int(os.environ.get("GPUNODE_SEED", "0")) + run
    record_property("kill_seed", seed)
    record_property("kills", await story_under_fire(cluster, seed))
