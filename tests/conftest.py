"""Fixtures that tests of several packages share."""

import os
from collections.abc import Iterator

import pytest

from gpunode.cluster.cluster import Cluster
from gpunode.cluster.down import down
from gpunode.cluster.install import Installation, install
from gpunode.cluster.lifecycle import up
from gpunode.cluster.spec import ClusterSpec

E2E_NAME = "e2e"
E2E_PORT = 18443


def _say(step: str, done: float) -> None:
    """Progress of the set-up, kept by pytest and shown when something fails."""
    print(f"[{done:4.0%}] {step}", flush=True)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Nine nodes of eight fake A100s with gpunode installed; taken down at the end unless GPUNODE_KEEP is set."""
    down(E2E_NAME)
    found = up(ClusterSpec(name=E2E_NAME, nodes=9, port=E2E_PORT), _say)
    try:
        install(found, Installation(), _say)
        yield found
    finally:
        if not os.environ.get("GPUNODE_KEEP"):
            down(E2E_NAME)
