"""Agent and controller as the pods that daemonset/ describes, on a local cluster.

Everything of the manifests stays as it is. Only agents are told to find fake GPUs, and where the image is an empty one,
the nodes' Python, its environment and the checkout are mounted into it.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from gpunode.cluster import image, packages
from gpunode.cluster.cluster import Cluster, Node
from gpunode.cluster.install import kubectl
from gpunode.model.names import SYSTEM_NAMESPACE

ROOT: Final = Path(__file__).resolve().parents[2]
# What the kubelet makes of the manifests' "gpunode:0.1.0".
REPOSITORY: Final = "docker.io/library/gpunode"
FIRST: Final = "0.1.0"
AGENT, CONTROLLER = "gpunode-agent", "gpunode-controller"
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_POD: Final = "/spec/template/spec"
Patch = list[dict[str, Any]]

FAKE_GPUS: Final[Patch] = [
    {"op": "add", "path": f"{_POD}/containers/0/args/-", "value": "--backend"},
    {"op": "add", "path": f"{_POD}/containers/0/args/-", "value": "fake"},
]


def empty_image(cluster: Cluster, file: Path) -> None:
    """An image of the manifests' name with nothing in it but directories, on every node."""
    name = f"{REPOSITORY}:{FIRST}"
    architecture = _ARCHITECTURES[platform.machine()]
    file.write_bytes(image.archive(name, packages.find().busybox.read_bytes(), ["/bin/false"], architecture))
    for node in cluster.nodes:
        load(cluster, node, file)


def load(cluster: Cluster, node: Node, file: Path) -> None:
    """Put an image archive into a node's containerd."""
    runner = cluster.runner(node.name)
    ctr = (runner.binaries["ctr"], "--address", str(runner.files.socket), "--namespace", "k8s.io")
    done = subprocess.run([*ctr, "images", "import", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def host_python(mounts: bool) -> Patch:
    """Makes a workload run this checkout by the Python of this machine. mounts: whether its container has any yet."""
    wanted = [Path(p) for p in ("/usr", "/bin", "/lib", "/lib64", "/etc/ssl")]
    wanted += [Path(p) for p in (sys.base_prefix, sys.prefix)] + [ROOT]
    kept: list[Path] = []
    for path in sorted({p for p in wanted if p.exists()}):
        if not any(path.is_relative_to(other) for other in kept):
            kept.append(path)
    volumes = [{"name": f"host-{n}", "hostPath": {"path": str(path)}} for n, path in enumerate(kept)]
    places = [{"name": f"host-{n}", "mountPath": str(path), "readOnly": True} for n, path in enumerate(kept)]
    path = f"{sys.prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    env = {"PYTHONPATH": f"{ROOT}/src", "PYTHONDONTWRITEBYTECODE": "1", "PATH": path}
    container = f"{_POD}/containers/0"
    return [
        {"op": "add", "path": f"{container}/command", "value": [sys.executable, "-m", "gpunode"]},
        *({"op": "add", "path": f"{container}/env/-", "value": {"name": k, "value": v}} for k, v in env.items()),
        *_append(f"{_POD}/volumes", volumes, mounts),
        *_append(f"{container}/volumeMounts", places, mounts),
    ]


def _append(path: str, values: list[dict[str, Any]], there: bool) -> Patch:
    if there:
        return [{"op": "add", "path": f"{path}/-", "value": value} for value in values]
    return [{"op": "add", "path": path, "value": values}]


def apply(
    cluster: Cluster,
    folder: Path,
    agent: Patch,
    controller: Patch | None = None,
    tag: str = FIRST,
    policy: str | None = None,
) -> None:
    """The manifests through a kustomization in `folder`. policy: a health policy, brought as operations.md says."""
    patches = {("DaemonSet", AGENT): agent, ("Deployment", CONTROLLER): controller or []}
    kustomization = {
        "resources": [os.path.relpath(ROOT / "daemonset" / "fake", folder)],
        "images": [{"name": "gpunode", "newTag": tag}],
        "patches": [
            {"target": {"kind": kind, "name": name}, "patch": json.dumps(patch)}
            for (kind, name), patch in patches.items()
            if patch
        ],
    }
    if policy is not None:
        (folder / "policy.yaml").write_text(policy)
        generated = {"name": "gpunode-health-policy", "namespace": SYSTEM_NAMESPACE, "files": ["policy.yaml"]}
        kustomization["components"] = [os.path.relpath(ROOT / "daemonset" / "health-policy", folder)]
        kustomization["configMapGenerator"] = [generated]
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization))
    kubectl(cluster, "apply", "-k", str(folder))


def rolled_out(cluster: Cluster, *workloads: str) -> None:
    """Wait for it. Raises ClusterError when it takes longer than 50 s."""
    for workload in workloads:
        kubectl(cluster, "rollout", "status", "-n", SYSTEM_NAMESPACE, workload, "--timeout=50s")


def pods_of(cluster: Cluster, app: str) -> list[dict[str, Any]]:
    """The pods of a workload that are not being deleted."""
    path = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods?labelSelector=app.kubernetes.io/name%3D{app}"
    found: list[dict[str, Any]] = cluster.api.call("GET", path)["items"]
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def is_ready(pod: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))


def explain(cluster: Cluster) -> str:
    """States and last log lines of all pods of ours, for failures."""
    told = []
    for app in (AGENT, CONTROLLER):
        for pod in pods_of(cluster, app):
            name, status = pod["metadata"]["name"], pod["status"].get("containerStatuses")
            try:
                log = kubectl(cluster, "logs", "-n", SYSTEM_NAMESPACE, name, "--tail=15")
            except Exception as error:
                log = str(error)
            told.append(f"{name}: {pod['status'].get('phase')} {json.dumps(status)[:600]}\n{log}")
    return "\n".join(told)
