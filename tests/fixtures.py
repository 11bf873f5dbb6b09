"""Clusters for tests and measurements."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from gpunode.cluster.cluster import Cluster
from gpunode.cluster.down import down
from gpunode.cluster.install import Installation, install
from gpunode.cluster.lifecycle import up
from gpunode.cluster.spec import ClusterSpec

DEFAULT = Installation()


@contextmanager
def fresh_cluster(
    name: str, port: int, nodes: int = 9, kubernetes: str = "1.37.2", wish: Installation = DEFAULT
) -> Iterator[Cluster]:
    """Nodes of eight fake A100s with gpunode installed; taken down at the end unless GPUNODE_KEEP is set."""
    with bare_cluster(name, port, nodes, kubernetes) as found:
        install(found, wish, _say)
        yield found


@contextmanager
def bare_cluster(name: str, port: int, nodes: int, kubernetes: str = "1.37.2") -> Iterator[Cluster]:
    """The same without gpunode."""
    down(name)
    found = up(ClusterSpec(name=name, nodes=nodes, port=port, kubernetes=kubernetes), _say)
    try:
        yield found
    finally:
        if not os.environ.get("GPUNODE_KEEP"):
            down(name)


def _say(step: str, done: float) -> None:
    """Progress of the set-up, kept by pytest and shown when something fails."""
    print(f"[{done:4.0%}] {step}", flush=True)
