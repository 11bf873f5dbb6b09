"""The agent between a real API server, a real kubelet and a real container runtime: claims survive what happens."""

import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpunode.agent.orders import give_order, new_order
from gpunode.cluster.api import ApiStatusError
from gpunode.cluster.cluster import Cluster, Node
from gpunode.cluster.install import Installation, agent_name, kubectl, start_agent
from gpunode.kube.client import Api
from gpunode.kube.errors import ApiError
from gpunode.kube.kinds import CLAIMS
from gpunode.kubelet.config import ConfigError, decode
from gpunode.kubelet.proto import dra_v1_pb2
from gpunode.kubelet.resolve import ClaimRef
from gpunode.model.names import DEFAULT_DRIVER, HELD_TAINT, SYSTEM_NAMESPACE
from tests.e2e.nodes import dra_socket, kubelet_root, slices_of, sockets
from tests.e2e.rolling import kill_agent, log_end, ready, reboot, replace_agent, restart_kubelet, slice_gaps, until
from tests.kubelet.kubelet_fakes import dial, dra

pytestmark = pytest.mark.e2e

NAMESPACE = "kubelet-e2e"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
CLAIMS_HERE = CLAIMS.path(NAMESPACE)
# Far above what it takes, for machines that do much else; the benchmark measures it.
GAP_S = 10.0


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with our namespace and template; everything in it is gone afterwards."""
    kubectl(cluster, "apply", "-f", str(Path(__file__).parent / "kubelet.yaml"))
    try:
        yield cluster
    finally:
        kubectl(cluster, "delete", "namespace", NAMESPACE, "--wait=true", "--timeout=50s")


def start_gang(cluster: Cluster, *names: str) -> None:
    """Pods that are placed all or none."""
    version = "v1alpha2" if cluster.spec.kubernetes.startswith("1.36.") else "v1beta1"
    path = f"/apis/scheduling.k8s.io/{version}/namespaces/{NAMESPACE}/podgroups"
    policy = {"gang": {"minCount": len(names)}}
    cluster.api.call("POST", path, {"metadata": {"name": "gang"}, "spec": {"schedulingPolicy": policy}})
    start_pods(cluster, *names, group="gang")


def start_pods(cluster: Cluster, *names: str, restart: str = "Never", group: str = "") -> None:
    """Pods with two GPUs each that run until they are deleted. restart: their restartPolicy. group: their PodGroup."""
    for name in names:
        container = {
            "name": "rank", "image": "localhost/busybox:1", "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done"],
            "resources": {"claims": [{"name": "gpus"}]},
        }  # fmt: skip
        spec: dict[str, Any] = {
            "restartPolicy": restart,
            "terminationGracePeriodSeconds": 2,
            "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "two"}],
            "containers": [container],
        }
        if group:
            spec["schedulingGroup"] = {"podGroupName": group}
        cluster.api.call("POST", PODS, {"metadata": {"name": name}, "spec": spec})


def delete_pods(cluster: Cluster, *names: str) -> None:
    """Without waiting; the namespace's end waits for all."""
    for name in names:
        cluster.api.call("DELETE", f"{PODS}/{name}")


def pods(cluster: Cluster) -> dict[str, Any]:
    return {pod["metadata"]["name"]: pod for pod in cluster.api.call("GET", PODS)["items"]}


def all_run(cluster: Cluster, *names: str) -> bool:
    found = pods(cluster)
    return all(name in found and found[name]["status"].get("phase") == "Running" for name in names)


def claim_of(cluster: Cluster, pod: dict[str, Any]) -> dict[str, Any]:
    name = pod["status"]["resourceClaimStatuses"][0]["resourceClaimName"]
    found: dict[str, Any] = cluster.api.call("GET", f"{CLAIMS_HERE}/{name}")
    return found


def held_by(node: Node) -> list[dict[str, Any]]:
    """What `gpunode claims` says, from outside the node."""
    command = [sys.executable, "-m", "gpunode", "claims", "-o", "json", "--kubelet-dir", str(kubelet_root(node))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)["claims"]
    return found


async def test_a_gang_notices_nothing_of_restarts_and_updates(namespace: Cluster) -> None:
    cluster = namespace
    names = ("a", "b")
    start_gang(cluster, *names)
    await until(lambda: all_run(cluster, *names), "pods a and b to run")
    before = pods(cluster)
    node = cluster.node(before["a"]["spec"]["nodeName"])
    await check_statuses(cluster, node, before["a"])
    await check_a_fault_is_told(cluster, node, before["a"])

    async with slice_gaps(cluster, node) as gaps:
        await restart_kubelet(cluster, node, gaps)
        await kill_agent(cluster, node)
        port = free_port()
        await replace_agent(cluster, node, old="", new="next", metrics_port=port)
        await asyncio.to_thread(check_metrics, port)
        await replace_agent(cluster, node, old="next", new="")
        assert gaps.longest_s < GAP_S, gaps.gaps_s
        assert gaps.gaps_s, "the kubelet deletes slices at its start: the watch saw nothing"

    # The agent that has come is the one the kubelet calls: a pod starts through it.
    start_pods(cluster, "late")
    await until(lambda: all_run(cluster, *names, "late"), "pods a, b and late to run")
    for name, pod in pods(cluster).items():
        (status,) = pod["status"]["containerStatuses"]
        assert status["restartCount"] == 0, name
        assert pod["metadata"]["uid"] == before.get(name, pod)["metadata"]["uid"]
    delete_pods(cluster, *names, "late")


async def check_statuses(cluster: Cluster, node: Node, pod: dict[str, Any]) -> None:
    """status.devices is filled; the agent of another node may not write it; `gpunode claims` says the same."""
    await until(lambda: bool(claim_of(cluster, pod)["status"].get("devices")), "status.devices of the claim")
    claim = claim_of(cluster, pod)
    allocated = {result["device"] for result in claim["status"]["allocation"]["devices"]["results"]}
    assert {status["device"] for status in claim["status"]["devices"]} == allocated
    for status in claim["status"]["devices"]:
        conditions = {c["type"]: c["status"] for c in status["conditions"]}
        assert conditions == {"Prepared": "True", "Healthy": "True"}
        assert status["data"]["uuid"].startswith("GPU-")
        assert status["data"]["deviceNodes"]
    here = {d["device"] for c in held_by(node) if c["uid"] == claim["metadata"]["uid"] for d in c["devices"]}
    assert here == allocated

    other = next(n for n in cluster.nodes if n.name != node.name)
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": claim["metadata"]["name"], "namespace": NAMESPACE},
        "status": {"devices": [{"driver": DEFAULT_DRIVER, "pool": node.name, "device": min(allocated), "data": {}}]},
    }
    path = CLAIMS.path(NAMESPACE, claim["metadata"]["name"], "status")
    parameters = {"fieldManager": "gpunode-agent", "force": "true", "dryRun": "All"}
    for name, allowed in ((other.name, False), (node.name, True)):
        async with await Api.connect(cluster.token(SYSTEM_NAMESPACE, "gpunode-agent", name)) as api:
            if allowed:
                await api.patch(path, body, "apply", parameters)
            else:
                with pytest.raises(ApiError, match=r"(?i)forbidden"):
                    await api.patch(path, body, "apply", parameters)


async def check_a_fault_is_told(cluster: Cluster, node: Node, pod: dict[str, Any]) -> None:
    """A fault of a device in use reaches the claim, and so does its end. A pod that nobody would make again stays."""
    device = claim_of(cluster, pod)["status"]["devices"][0]["device"]

    def healthy() -> tuple[str, str]:
        (status,) = [s for s in claim_of(cluster, pod)["status"]["devices"] if s["device"] == device]
        (condition,) = [c for c in status["conditions"] if c["type"] == "Healthy"]
        return condition["status"], condition["message"]

    async with await Api.connect(cluster.kubeconfig) as api:
        await give_order(api, node.name, new_order(device, xid=79))
        await until(lambda: healthy()[0] == "False", "the claim to tell of the fault")
        assert "XID 79" in healthy()[1]
        await give_order(api, node.name, new_order(device, recover=True))
        await until(lambda: healthy() == ("True", ""), "the claim to tell that it is over")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port: int = taken.getsockname()[1]
        return port


def check_metrics(port: int) -> None:
    def read(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    assert read("/readyz") == "ready\n"
    text = read("/metrics")
    assert "gpunode_kubelet_prepared_claims " in text
    assert "gpunode_kubelet_call_seconds_bucket" in text or "gpunode_kubelet_held_devices 0.0" in text


async def test_agents_without_names_know_each_other(namespace: Cluster) -> None:
    """The newer publishes; killed, it leaves sockets that the kubelet would dial for ever, and the older goes on."""
    cluster, node = namespace, namespace.nodes[-1]
    first = sockets(node)
    assert len(first) == 1
    mark, older = log_end(cluster, node, "newer"), log_end(cluster, node)
    await asyncio.to_thread(start_agent, cluster, node, Installation(), "newer")
    await until(lambda: ready(cluster, node, mark, "newer"), "the newer agent to be ready")
    assert len(sockets(node)) == 2
    await until(lambda: told(cluster, node, older, "it publishes from now on"), "the older one to step back")
    async with slice_gaps(cluster, node) as gaps:
        cluster.processes.kill(agent_name(node.name, "newer"))
        await until(lambda: sockets(node) == first, "the dead sockets to go")
        await until(lambda: told(cluster, node, older, "another agent serves this node: it left"), "it to take over")
        dra_socket(node)
        (slice_,) = slices_of(cluster, node)
        before = set(gaps.uids)
        cluster.api.call("DELETE", f"/apis/resource.k8s.io/v1/resourceslices/{slice_['metadata']['name']}")
        await until(lambda: bool(gaps.uids - before), "the older agent to publish again")


def told(cluster: Cluster, node: Node, after: int, text: str) -> bool:
    """Whether the node's agent has logged that, behind that place of its log."""
    return text.encode() in cluster.processes.log(agent_name(node.name)).read_bytes()[after:]


async def test_an_agent_killed_while_pods_start_and_stop_costs_none_of_them(namespace: Cluster) -> None:
    cluster = namespace
    start_pods(cluster, "old")
    await until(lambda: all_run(cluster, "old"), "pod old to run")
    node = cluster.node(pods(cluster)["old"]["spec"]["nodeName"])
    old = claim_of(cluster, pods(cluster)["old"])["metadata"]["uid"]
    cluster.api.call("DELETE", f"{PODS}/old")
    start_pods(cluster, "new", "newer")
    await kill_agent(cluster, node, pause_s=0.5)

    def hurried() -> bool:
        # A kubelet whose agent was away tries a pod again after a minute or more, or as soon as the pod is changed.
        kubectl(cluster, "annotate", "-n", NAMESPACE, "--overwrite", "pod", "new", "newer", f"again={time.time()}")
        return all_run(cluster, "new", "newer")

    await until(hurried, "pods new and newer to run", every_s=2.0)
    await until(lambda: "old" not in pods(cluster), "pod old to be gone")
    for name in ("new", "newer"):
        pod = pods(cluster)[name]
        where, claim = cluster.node(pod["spec"]["nodeName"]), claim_of(cluster, pod)["metadata"]["uid"]
        assert claim in {held["uid"] for held in held_by(where)}
        assert any(claim in file.name for file in where.cdi.glob("*.json"))
    await until(lambda: old not in {held["uid"] for held in held_by(node)}, "the old claim to be released")
    assert not any(old in file.name for file in node.cdi.glob("*.json"))
    delete_pods(cluster, "new", "newer")


async def test_after_a_reboot_claims_are_prepared_anew(namespace: Cluster) -> None:
    cluster = namespace
    start_pods(cluster, "again", restart="Always")
    await until(lambda: all_run(cluster, "again"), "pod again to run")
    node = cluster.node(pods(cluster)["again"]["spec"]["nodeName"])
    before = held_by(node)
    claim = claim_of(cluster, pods(cluster)["again"])["metadata"]["uid"]
    file = next(f for f in node.cdi.glob("*.json") if claim in f.name)
    content = file.read_bytes()
    await reboot(cluster, node)

    def restarted() -> bool:
        (status,) = pods(cluster)["again"]["status"]["containerStatuses"]
        return status["restartCount"] >= 1 and "running" in status["state"]

    await until(restarted, "pod again to run again", 90)
    boots = {held["uid"]: held["bootID"] for held in before}
    (now,) = [held for held in held_by(node) if held["uid"] == claim]
    assert now["bootID"] != boots[claim]
    assert file.read_bytes() == content
    delete_pods(cluster, "again")


async def test_a_device_that_is_not_let_go_of_is_tainted_until_it_is(namespace: Cluster) -> None:
    """A claim that vanishes under a prepared pod, as after a deletion by force."""
    cluster, node = namespace, namespace.nodes[-1]
    (slice_,) = slices_of(cluster, node)
    device = slice_["spec"]["devices"][-1]["name"]
    claim = allocate_by_hand(cluster, node, device)
    ref = ClaimRef(NAMESPACE, "forced", claim["metadata"]["uid"])
    async with dial(dra_socket(node)) as kubelet:
        answer = await dra(kubelet, dra_v1_pb2, "Prepare", [ref])
        assert not answer.claims[ref.uid].error
        cluster.api.call("DELETE", f"{CLAIMS_HERE}/forced")
        # The kubelet's next call of any kind brings on a look.
        await dra(kubelet, dra_v1_pb2, "Prepare", [ref])
        await until(lambda: taints(cluster, node, device) == [HELD_TAINT], f"{device} to be tainted", 30)
        # Neither does another agent forget it.
        await kill_agent(cluster, node)
        assert taints(cluster, node, device) == [HELD_TAINT]
    async with dial(dra_socket(node)) as kubelet:
        await dra(kubelet, dra_v1_pb2, "Unprepare", [ref])
        await until(lambda: taints(cluster, node, device) == [], f"{device} to be free again", 30)


def taints(cluster: Cluster, node: Node, device: str) -> list[str]:
    devices = [d for s in slices_of(cluster, node) for d in s["spec"].get("devices", ()) if d["name"] == device]
    return [taint["key"] for taint in devices[0].get("taints", ())] if devices else ["no such device"]


def allocate_by_hand(cluster: Cluster, node: Node, device: str) -> dict[str, Any]:
    """A claim allocated to one device of a node, without a pod."""
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpu.gpunode.dev"}}
    body = {"metadata": {"name": "forced"}, "spec": {"devices": {"requests": [request]}}}
    claim: dict[str, Any] = cluster.api.call("POST", CLAIMS_HERE, body)
    claim["metadata"]["finalizers"] = []
    claim = cluster.api.call("PUT", f"{CLAIMS_HERE}/forced", claim)
    result = {"request": "gpu", "driver": DEFAULT_DRIVER, "pool": node.name, "device": device}
    field = {"key": "metadata.name", "operator": "In", "values": [node.name]}
    claim["status"] = {
        "allocation": {
            "devices": {"results": [result]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
        }
    }
    allocated: dict[str, Any] = cluster.api.call("PUT", f"{CLAIMS_HERE}/forced/status", claim)
    return allocated


def parameters(kind: str = "GpuConfig", version: str = "gpunode.dev/v1alpha1", **fields: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, **fields}


def sharing(strategy: object, kind: str = "GpuConfig", **fields: Any) -> dict[str, Any]:
    return parameters(kind, sharing={"strategy": strategy, **fields})


CONFIGS = (
    parameters(),
    parameters("MigConfig"),
    parameters(sharing=None),
    sharing("None"),
    sharing("TimeSlicing"),
    sharing("TimeSlicing", timeSlicing=None),
    sharing("TimeSlicing", timeSlicing={}),
    sharing("TimeSlicing", timeSlicing={"interval": "Long"}),
    sharing("MPS", "MigConfig", mps={"activeThreadPercentage": 100, "pinnedDeviceMemoryLimit": "10Gi"}),
    sharing("MPS", mps={"activeThreadPercentage": 1, "pinnedDeviceMemoryLimit": "1500M"}),
    sharing("MPS", mps={"activeThreadPercentage": None, "pinnedDeviceMemoryLimit": None}),
    {},
    parameters("GpuSettings"),
    parameters(version="gpunode.dev/v1"),
    parameters(extra=1),
    parameters(sharing="MPS"),
    parameters(sharing={}),
    parameters(sharing=[]),
    sharing("Timeslicing"),
    sharing(None),
    sharing(1),
    sharing("None", timeSlicing={}),
    sharing("MPS", timeSlicing={"interval": "Long"}),
    sharing("TimeSlicing", mps={}),
    sharing("TimeSlicing", "MigConfig"),
    sharing("TimeSlicing", timeSlicing=1),
    sharing("TimeSlicing", timeSlicing={"interval": "long"}),
    sharing("TimeSlicing", timeSlicing={"interval": None}),
    sharing("TimeSlicing", timeSlicing={"intervall": "Long"}),
    sharing("TimeSlicing", other={}),
    sharing("MPS", mps=[]),
    sharing("MPS", mps={"activeThreadPercentage": 0}),
    sharing("MPS", mps={"activeThreadPercentage": 101}),
    sharing("MPS", mps={"activeThreadPercentage": "25"}),
    sharing("MPS", mps={"activeThreadPercentage": 2.5}),
    sharing("MPS", mps={"activeThreadPercentage": True}),
    sharing("MPS", mps={"pinnedDeviceMemoryLimit": 10}),
    sharing("MPS", mps={"pinnedDeviceMemoryLimit": "ten"}),
    sharing("MPS", mps={"pinnedDeviceMemoryLimit": "0"}),
    sharing("MPS", mps={"pinnedDeviceMemoryLimit": "-1Gi"}),
    sharing("MPS", mps={"limit": 1}),
)


def test_admission_accepts_what_the_agent_accepts(cluster: Cluster) -> None:
    for config in CONFIGS:
        told = dry_run(cluster, claim_with(config))
        assert (told == "") == decodes(config), (config, told)
        assert not told or "spec.devices.config[1].opaque.parameters" in told, (config, told)
    assert {decodes(config) for config in CONFIGS} == {True, False}


def decodes(config: dict[str, Any]) -> bool:
    try:
        decode(config)
    except ConfigError:
        return False
    return True


def claim_with(config: dict[str, Any], driver: str = DEFAULT_DRIVER) -> dict[str, Any]:
    other = {"opaque": {"driver": "other.example.com", "parameters": {"kind": "Whatever"}}}
    devices = {
        "requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.gpunode.dev"}}],
        "config": [other, {"opaque": {"driver": driver, "parameters": config}}],
    }
    return {"kind": "ResourceClaim", "metadata": {"name": "asked"}, "spec": {"devices": devices}}


def dry_run(cluster: Cluster, body: dict[str, Any]) -> str:
    """The API server's refusal, "" when it would create the object."""
    resource = {
        "ResourceClaim": "namespaces/default/resourceclaims",
        "ResourceClaimTemplate": "namespaces/default/resourceclaimtemplates",
        "DeviceClass": "deviceclasses",
    }[body["kind"]]
    try:
        cluster.api.call("POST", f"/apis/resource.k8s.io/v1/{resource}?dryRun=All", body)
    except ApiStatusError as error:
        return str(error)
    return ""


def test_admission_checks_templates_and_classes_too(cluster: Cluster) -> None:
    bad = claim_with(sharing("Timeslicing"))
    template = {"kind": "ResourceClaimTemplate", "metadata": {"name": "asked"}, "spec": {"spec": bad["spec"]}}
    told = dry_run(cluster, template)
    assert "spec.spec.devices.config[1].opaque.parameters.sharing.strategy: must be None, TimeSlicing or MPS" in told
    device_class = {"kind": "DeviceClass", "metadata": {"name": "asked"}, "spec": bad["spec"]["devices"]}
    del device_class["spec"]["requests"]
    assert "spec.config[1].opaque.parameters.sharing.strategy" in dry_run(cluster, device_class)
    assert dry_run(cluster, claim_with(sharing("Timeslicing"), driver="other.example.com")) == ""
