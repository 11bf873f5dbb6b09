"""status.devices once the node has released a claim that stays allocated, as a shared one does between two pods."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gpunode.cluster.api import ApiStatusError
from gpunode.cluster.cluster import Cluster, Node
from gpunode.cluster.install import Installation, agent_name, start_agent
from gpunode.kube.client import Api
from gpunode.kube.kinds import CLAIMS
from gpunode.kubelet.checkpoint import CheckpointFile
from gpunode.kubelet.plugin import KubeletPaths
from gpunode.kubelet.proto import dra_v1_pb2
from gpunode.kubelet.resolve import ClaimRef
from gpunode.model.names import DEFAULT_DRIVER
from tests.e2e.nodes import dra_socket, kubelet_root, slices_of
from tests.e2e.rolling import log_end, ready, until
from tests.kubelet.kubelet_fakes import dial, dra

pytestmark = pytest.mark.e2e

NAMESPACE, OTHER = "default", "other.example.com"
COLLECTION = CLAIMS.path(NAMESPACE)


@asynccontextmanager
async def shared_claim(cluster: Cluster, node: Node, name: str) -> AsyncIterator[ClaimRef]:
    """Allocated to a GPU of the node and to a device of another driver, which has described its own already."""
    (slice_,) = slices_of(cluster, node)
    results = [
        {"request": request, "driver": driver, "pool": node.name, "device": device}
        for request, driver, device in (
            ("gpu", DEFAULT_DRIVER, slice_["spec"]["devices"][-1]["name"]), ("nic", OTHER, "nic-0"),
        )
    ]  # fmt: skip
    requests = [{"name": r["request"], "exactly": {"deviceClassName": "gpu.gpunode.dev"}} for r in results]
    path = f"{COLLECTION}/{name}"
    cluster.api.call("POST", COLLECTION, {"metadata": {"name": name}, "spec": {"devices": {"requests": requests}}})
    try:
        claim = cluster.api.call("GET", path)
        field = {"key": "metadata.name", "operator": "In", "values": [node.name]}
        claim["status"] = {
            "allocation": {
                "devices": {"results": results}, "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
            }
        }  # fmt: skip
        claim = cluster.api.call("PUT", f"{path}/status", claim)
        theirs = [{"driver": OTHER, "pool": node.name, "device": "nic-0", "data": {"mac": "02:00:00:00:00:01"}}]
        body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name},
                "status": {"devices": theirs}}  # fmt: skip
        async with await Api.connect(cluster.kubeconfig, "gpunode-test") as api:
            await api.patch(f"{path}/status", body, "apply", {"fieldManager": "other-driver"})
        yield ClaimRef(NAMESPACE, name, claim["metadata"]["uid"])
    finally:
        await asyncio.to_thread(remove, cluster, path)


def remove(cluster: Cluster, path: str) -> None:
    """Whatever holds it: no controller deallocates a claim that a test allocated."""
    try:
        claim = cluster.api.call("GET", path)
        claim["status"] = {}
        claim = cluster.api.call("PUT", f"{path}/status", claim)
        claim["metadata"]["finalizers"] = []
        cluster.api.call("PUT", path, claim)
        cluster.api.call("DELETE", path)
    except ApiStatusError as error:
        assert error.code == 404, error


def described(cluster: Cluster, ref: ClaimRef) -> set[str]:
    """Drivers that have entries in the claim's status.devices."""
    claim: dict[str, Any] = cluster.api.call("GET", f"{COLLECTION}/{ref.name}")
    return {status["driver"] for status in claim["status"].get("devices", ())}


async def call(node: Node, what: str, ref: ClaimRef) -> None:
    async with dial(dra_socket(node)) as kubelet:
        answer = await dra(kubelet, dra_v1_pb2, what, [ref])
        assert not answer.claims[ref.uid].error


async def test_our_entries_go_with_the_release_and_others_stay(cluster: Cluster) -> None:
    node = cluster.nodes[-1]
    async with shared_claim(cluster, node, "between-pods") as ref:
        for _ in range(2):  # two pods, one after the other
            await call(node, "Prepare", ref)
            await until(lambda: described(cluster, ref) == {DEFAULT_DRIVER, OTHER}, "status.devices of the claim")
            await call(node, "Unprepare", ref)
            await until(lambda: described(cluster, ref) == {OTHER}, "our entries to go")


async def test_a_claim_that_is_deleted_before_its_release_is_no_error(cluster: Cluster) -> None:
    node = cluster.nodes[-1]
    mark = log_end(cluster, node)
    async with shared_claim(cluster, node, "deleted") as ref:
        await call(node, "Prepare", ref)
        await until(lambda: DEFAULT_DRIVER in described(cluster, ref), "status.devices of the claim")
        await asyncio.to_thread(remove, cluster, f"{COLLECTION}/{ref.name}")
        await call(node, "Unprepare", ref)
    async with shared_claim(cluster, node, "after") as ref:  # passes are in order, so the one before is over
        await call(node, "Prepare", ref)
        await until(lambda: DEFAULT_DRIVER in described(cluster, ref), "status.devices of the next claim")
        await call(node, "Unprepare", ref)
        await until(lambda: described(cluster, ref) == {OTHER}, "our entries to go")
    log = cluster.processes.log(agent_name(node.name)).read_bytes()[mark:].decode()
    assert "status of claim default/deleted" not in log


async def test_an_agent_killed_after_the_release_is_made_good_for_by_the_next(cluster: Cluster) -> None:
    node = cluster.nodes[-1]
    async with shared_claim(cluster, node, "left") as ref:
        await call(node, "Prepare", ref)
        await until(lambda: described(cluster, ref) == {DEFAULT_DRIVER, OTHER}, "status.devices of the claim")
        mark = log_end(cluster, node)
        cluster.processes.kill(agent_name(node.name))
        # What a kill between the release and the word to the API server leaves: a checkpoint without the claim.
        checkpoint = CheckpointFile(KubeletPaths(kubelet_root(node)).checkpoint(DEFAULT_DRIVER))
        entries = checkpoint.peek().entries
        del entries[ref.uid]
        checkpoint.save(entries)
        assert DEFAULT_DRIVER in described(cluster, ref)
        await asyncio.to_thread(start_agent, cluster, node, Installation())
        await until(lambda: ready(cluster, node, mark), "the agent to be ready")
        await until(lambda: described(cluster, ref) == {OTHER}, "our entries to go")
