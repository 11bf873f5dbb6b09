"""Fixtures that tests of several packages share."""

from collections.abc import Iterator

import pytest

from gpunode.cluster.cluster import Cluster
from tests.fixtures import fresh_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """One cluster for all end-to-end tests of a run: nine nodes of eight fake A100s with gpunode installed."""
    with fresh_cluster("e2e", 18443) as found:
        yield found
