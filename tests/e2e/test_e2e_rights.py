"""What the ServiceAccounts and policies of daemonset/base allow, and above all what they do not."""

import subprocess
from pathlib import Path

import pytest

from gpunode.cluster.cluster import Cluster
from gpunode.cluster.errors import ClusterError
from gpunode.cluster.install import kubectl
from gpunode.cluster.story import NAMESPACE, stage

pytestmark = pytest.mark.e2e

SLICE = """
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {{name: {name}}}
spec:
  driver: test.gpunode.dev
  nodeName: {node}
  pool: {{name: {node}-test, generation: 1, resourceSliceCount: 1}}
  devices: []
"""
CLAIM = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: {name}, namespace: team-a}}
spec:
  devices:
    requests:
    - name: gpus
      exactly:
        deviceClassName: gpu.gpunode.dev
        {extra}
"""


def as_user(cluster: Cluster, config: Path, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [str(cluster.kubectl), f"--kubeconfig={config}", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=30, check=False)


def test_an_agent_writes_slices_of_its_own_node_only(cluster: Cluster) -> None:
    mine, other = cluster.nodes[0].name, cluster.nodes[1].name
    config = cluster.token("gpunode-system", "gpunode-agent", mine)
    made = as_user(cluster, config, "create", "-f", "-", text=SLICE.format(name="test-mine", node=mine))
    assert made.returncode == 0, made.stderr
    refused = as_user(cluster, config, "create", "-f", "-", text=SLICE.format(name="test-other", node=other))
    assert refused.returncode != 0
    assert f"the agent on node {mine} may only write ResourceSlices of that node" in refused.stderr
    stolen = as_user(cluster, config, "delete", "resourceslice", f"{other}-gpu.gpunode.dev-0")
    assert stolen.returncode != 0
    assert "may only write" in stolen.stderr
    assert as_user(cluster, config, "delete", "resourceslice", "test-mine").returncode == 0


def test_an_agent_token_that_is_not_bound_to_a_node_writes_nothing(cluster: Cluster) -> None:
    config = cluster.token("gpunode-system", "gpunode-agent")
    text = SLICE.format(name="test-unbound", node=cluster.nodes[0].name)
    refused = as_user(cluster, config, "create", "-f", "-", text=text)
    assert refused.returncode != 0
    assert "not bound to a node" in refused.stderr


@pytest.mark.parametrize(
    ("account", "verb", "resource", "allowed"),
    [
        ("gpunode-agent", "patch", "resourceclaims/binding", False),
        ("gpunode-agent", "update", "resourceclaims", False),
        ("gpunode-agent", "delete", "pods", False),
        ("gpunode-agent", "get", "secrets", False),
        ("gpunode-agent", "list", "pods", False),
        ("gpunode-agent", "get", "nodes", True),
        ("gpunode-controller", "delete", "pods", False),
        ("gpunode-controller", "update", "pods", False),
        ("gpunode-controller", "get", "secrets", False),
        ("gpunode-controller", "get", "configmaps", False),
        ("gpunode-controller", "update", "resourceslices", False),
        ("gpunode-controller", "patch", "resourceclaims/status", True),
        ("gpunode-controller", "create", "pods/eviction", True),
    ],
)
def test_rights_are_no_wider_than_the_work(
    cluster: Cluster, account: str, verb: str, resource: str, allowed: bool
) -> None:
    user = f"system:serviceaccount:gpunode-system:{account}"
    group = {"resourceclaims": ".resource.k8s.io", "resourceslices": ".resource.k8s.io"}
    name, _, subresource = resource.partition("/")
    question = [verb, name + group.get(name, ""), *([f"--subresource={subresource}"] if subresource else [])]
    answer = as_user(cluster, cluster.kubeconfig, "auth", "can-i", *question, f"--as={user}", "-A")
    assert (answer.stdout.strip().splitlines()[-1] == "yes") is allowed


@pytest.mark.parametrize(
    ("extra", "refused"),
    [
        ("tolerations: [{operator: Exists}]", True),
        ("tolerations: [{operator: Exists, effect: NoSchedule}]", True),
        ("tolerations: [{key: gpunode.dev/managed, operator: Exists}]", True),
        ("tolerations: [{key: gpunode.dev/managed, value: 'true', effect: NoSchedule}]", True),
        ("tolerations: [{operator: Exists, effect: NoExecute}]", False),
        ("tolerations: [{key: gpunode.dev/xid, operator: Exists}]", False),
        ("count: 2", False),
    ],
)
async def test_no_claim_may_tolerate_the_managed_taint(cluster: Cluster, extra: str, refused: bool) -> None:
    async with stage(cluster) as it:
        it.apply("team-a")
    text = CLAIM.format(name="test-tolerations", extra=extra)
    made = as_user(cluster, cluster.kubeconfig, "create", "--dry-run=server", "-f", "-", text=text)
    assert (made.returncode != 0) is refused, made.stderr
    if refused:
        assert "gpunode.dev/managed" in made.stderr


async def test_pods_are_gated_in_labelled_namespaces_only(cluster: Cluster) -> None:
    async with stage(cluster) as it:
        it.apply("team-a")
    run = ("run", "test-gate", "--image=localhost/busybox:1", "--restart=Never", "--dry-run=server", "-o", "json")
    with_claim = '{"spec": {"resourceClaims": [{"name": "g", "resourceClaimTemplateName": "whole-node"}]}}'
    for namespace, overrides, gated in ((NAMESPACE, with_claim, True), ("default", with_claim, False),
                                        (NAMESPACE, "{}", False)):  # fmt: skip
        try:
            made = kubectl(cluster, *run, "-n", namespace, f"--overrides={overrides}")
        except ClusterError as error:
            raise AssertionError(f"{namespace} {overrides}: {error}") from error
        assert ("gpunode.dev/placement" in made) is gated, (namespace, overrides)
