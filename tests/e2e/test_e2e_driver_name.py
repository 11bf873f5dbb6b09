"""A node whose agent comes back under another driver name: the old name's slices go, the new name's are offered."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gpunode.cluster.api import ApiStatusError
from gpunode.cluster.cluster import Cluster, Node
from gpunode.cluster.install import Installation, agent_name, start_agent
from gpunode.kube.kinds import CLASSES, PODS, SLICES
from gpunode.model.names import DEFAULT_DRIVER
from tests.e2e.nodes import slices_of
from tests.e2e.rolling import log_end, ready, until
from tests.e2e.scene import scene

pytestmark = pytest.mark.e2e

OTHER = "gpu.example.com"


async def replace(cluster: Cluster, node: Node, driver: str) -> None:
    """End the node's agent and start it under that name; its files stay."""
    await asyncio.to_thread(cluster.processes.stop, agent_name(node.name))
    mark = log_end(cluster, node)
    await asyncio.to_thread(start_agent, cluster, node, Installation(driver=driver))
    await until(lambda: ready(cluster, node, mark), f"the agent of {node.name} to be ready as {driver}")


@asynccontextmanager
async def renamed(cluster: Cluster, node: Node) -> AsyncIterator[None]:
    """The node's agent goes by the other name in the block; afterwards all is as it was."""
    try:
        await replace(cluster, node, OTHER)
        yield
    finally:
        await replace(cluster, node, DEFAULT_DRIVER)
        # The kubelet would, in half a minute; that it does is shown above.
        for one in slices_of(cluster, node, OTHER):
            cluster.api.call("DELETE", SLICES.path(name=one["metadata"]["name"]))


async def test_an_agent_comes_back_under_another_name(cluster: Cluster) -> None:
    node = cluster.nodes[-1]
    selector = f'device.driver == "{OTHER}" && device.attributes["{OTHER}"].type == "gpu"'
    device_class = {"metadata": {"name": OTHER}, "spec": {"selectors": [{"cel": {"expression": selector}}]}}
    assert slices_of(cluster, node) != []
    async with scene(cluster, "renamed", gangs=False) as here, renamed(cluster, node):
        assert slices_of(cluster, node, OTHER) != []
        cluster.api.call("POST", CLASSES.path(), device_class)
        try:
            request = {"name": "gpus", "exactly": {"deviceClassName": OTHER, "count": 2}}
            await here.template_of("two", {"requests": [request]})
            await here.api.create(PODS.path(here.namespace), here.pod("user", "two"))
            await here.until("the pod runs", lambda: bool(here.running("user")))
            (pod,) = here.running("user")
            assert pod.spec.node_name == node.name
            # The kubelet's own doing, half a minute after the old name's last socket; it backs off where it fails.
            await until(lambda: slices_of(cluster, node) == [], "the old name's slices to go", seconds=150)
            await here.clear()
        finally:
            with contextlib.suppress(ApiStatusError):
                cluster.api.call("DELETE", CLASSES.path(name=OTHER))
    assert slices_of(cluster, node) != []
