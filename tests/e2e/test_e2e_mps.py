"""Two pods share a GPU through MPS: real kubelet, containers and keeper, and the fake machine's control program."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpunode.cluster.cluster import Cluster, Node
from gpunode.cluster.install import Installation, keeper_name, kubectl, start_keeper
from gpunode.kube.kinds import CLAIMS
from gpunode.kubelet.mps.files import DaemonState, MpsFiles, Phase, read
from gpunode.model.names import DEFAULT_DRIVER
from tests.e2e.rolling import kill_agent, until

pytestmark = pytest.mark.e2e

NAMESPACE = "mps-e2e"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with the namespace and its claim, no keeper; everything is gone afterwards."""
    kubectl(cluster, "apply", "-f", str(Path(__file__).parent / "mps.yaml"))
    try:
        yield cluster
    finally:
        kubectl(cluster, "delete", "namespace", NAMESPACE, "--wait=true", "--timeout=50s")
        cluster.processes.stop_all([keeper_name(node.name) for node in cluster.nodes])


def start_pod(cluster: Cluster, name: str, *, own_memory: bool = False) -> None:
    """own_memory: the pod mounts a volume at /dev/shm, as many do that need more than the runtime gives them."""
    container: dict[str, Any] = {
        "name": "work", "image": "localhost/busybox:1", "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done"],
        "resources": {"claims": [{"name": "gpu"}]},
    }  # fmt: skip
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": 2,
        "resourceClaims": [{"name": "gpu", "resourceClaimName": "shared"}],
        "containers": [container],
    }
    if own_memory:
        spec["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
        container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
    cluster.api.call("POST", PODS, {"metadata": {"name": name}, "spec": spec})


def pod(cluster: Cluster, name: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.api.call("GET", f"{PODS}/{name}")
    return found


def all_run(cluster: Cluster, *names: str) -> bool:
    """A kubelet that could not prepare a claim tries again after a minute or more, or as soon as the pod is changed."""
    if all(pod(cluster, name)["status"].get("phase") == "Running" for name in names):
        return True
    kubectl(cluster, "annotate", "-n", NAMESPACE, "--overwrite", "pod", *names, f"again={time.time()}")
    return False


def told(cluster: Cluster, reason: str) -> str:
    """Messages of the namespace's Events of that reason."""
    found = cluster.api.call("GET", f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events")["items"]
    return "\n".join(event.get("note", "") for event in found if event["reason"] == reason)


def run_in(cluster: Cluster, name: str, *command: str) -> str:
    return kubectl(cluster, "exec", "-n", NAMESPACE, name, "--", *command)


def mps_files(node: Node) -> MpsFiles:
    """As the host sees them; what the keeper has mounted is seen on the node only."""
    return MpsFiles(node.state / "var-lib-kubelet" / "plugins" / DEFAULT_DRIVER / "mps")


def daemon(node: Node) -> DaemonState | None:
    files = mps_files(node)
    (name,) = files.names_kept() or ("none",)
    return read(files.state(name), DaemonState)


def ready_again(node: Node, old: int) -> bool:
    state = daemon(node)
    return state is not None and state.phase is Phase.READY and state.pid != old


def compute_modes(node: Node) -> list[int]:
    saved = json.loads((node.state / "fake" / "machine.json").read_text())
    return [gpu.get("compute_mode", 0) for gpu in saved["gpus"]]


async def test_two_pods_share_a_gpu_through_mps(namespace: Cluster) -> None:
    cluster = namespace
    names = ("a", "b")
    for name in names:
        start_pod(cluster, name)
    await until(lambda: all("nodeName" in pod(cluster, n)["spec"] for n in names), "pods a and b to be placed")
    node = cluster.node(pod(cluster, "a")["spec"]["nodeName"])
    why = "no MPS keeper runs on this node"
    await until(lambda: why in told(cluster, "FailedPrepareDynamicResources"), "an Event that says what is missing")
    assert "daemonset/mps" in told(cluster, "FailedPrepareDynamicResources")
    assert compute_modes(node) == [pynvml.NVML_COMPUTEMODE_DEFAULT] * 8

    await asyncio.to_thread(start_keeper, cluster, node, Installation())
    await until(lambda: all_run(cluster, *names), "pods a and b to run", every_s=2.0)
    first = daemon(node)
    assert first is not None and first.phase is Phase.READY and first.wanted is not None
    assert (first.wanted.thread_percentage, first.wanted.memory_bytes) == (50, 10 * 2**30)
    assert sorted(compute_modes(node)) == [0] * 7 + [pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS]
    for name in names:
        assert "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps" in run_in(cluster, name, "env").splitlines()
        assert run_in(cluster, name, "ls", "-l", "/tmp/nvidia-mps/control").startswith("s")
        assert run_in(cluster, name, "cat", "/tmp/nvidia-mps/nvidia-cuda-mps-control.pid").strip() == str(first.pid)
    # Shared memory is one between the pods and the daemon, and is memory.
    run_in(cluster, "a", "sh", "-c", "echo hello > /dev/shm/from-a")
    assert run_in(cluster, "b", "cat", "/dev/shm/from-a") == "hello\n"
    assert Path(f"/proc/{first.pid}/root/dev/shm/from-a").read_text() == "hello\n"
    assert "tmpfs /dev/shm tmpfs rw" in run_in(cluster, "b", "cat", "/proc/mounts")
    path = CLAIMS.path(NAMESPACE, "shared")
    await until(lambda: bool(cluster.api.call("GET", path)["status"].get("devices")), "status.devices")
    (status,) = cluster.api.call("GET", path)["status"]["devices"]
    assert status["data"]["sharing"].startswith("MPS, each process at most 50 % of threads")

    # The daemon and what it serves outlive the agent.
    await kill_agent(cluster, node)
    start_pod(cluster, "c", own_memory=True)
    await until(lambda: all_run(cluster, "c"), "a third pod to run", every_s=2.0)
    again = daemon(node)
    assert again is not None and (again.pid, again.since) == (first.pid, first.since)
    assert run_in(cluster, "c", "cat", "/dev/shm/from-a") == "hello\n"
    assert all(pod(cluster, n)["status"]["containerStatuses"][0]["restartCount"] == 0 for n in (*names, "c"))

    # Another keeper starts it again, where the containers that run look for it.
    await asyncio.to_thread(cluster.processes.kill, keeper_name(node.name))
    await until(lambda: not Path(f"/proc/{first.pid}").exists(), "the daemon to end with its keeper")
    await asyncio.to_thread(start_keeper, cluster, node, Installation())
    await until(lambda: ready_again(node, first.pid), "another daemon")
    last = daemon(node)
    assert last is not None
    assert run_in(cluster, "a", "cat", "/tmp/nvidia-mps/nvidia-cuda-mps-control.pid").strip() == str(last.pid)
    assert run_in(cluster, "a", "cat", "/dev/shm/from-a") == "hello\n"

    for name in (*names, "c"):
        cluster.api.call("DELETE", f"{PODS}/{name}")
    files = mps_files(node)
    await until(lambda: files.names_wanted() == files.names_kept() == [], "the daemon's files to be gone")
    assert not Path(f"/proc/{last.pid}").exists()
    await until(lambda: compute_modes(node) == [0] * 8, "the GPU to be open to all processes")
