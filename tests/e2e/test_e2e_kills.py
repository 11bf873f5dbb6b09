"""kill -9 of agent or controller at any time: the story still ends well. `make soak` runs many of these."""

import pytest

from gpunode.cluster.cluster import Cluster
from tests.e2e.kills import story_under_fire

pytestmark = pytest.mark.e2e


async def test_the_story_survives_kills_at_random_moments(cluster: Cluster) -> None:
    kills = await story_under_fire(cluster, seed=20)
    assert kills >= 10, "too few kills to mean anything"
