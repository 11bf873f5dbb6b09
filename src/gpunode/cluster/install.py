"""gpunode on a local cluster: the manifests, an agent with fake GPUs on every node, and the controller.

Agents and controller run as processes with the tokens of their ServiceAccounts, so their rights are those of
daemonset/base and never an administrator's.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpunode.cluster.cluster import Cluster, Node
from gpunode.cluster.errors import ClusterError
from gpunode.cluster.nodes import process_name
from gpunode.datafiles import data_dir
from gpunode.model.names import DEFAULT_DRIVER, SYSTEM_NAMESPACE

# The workloads of daemonset/base run as local processes here; everything else is applied as it is.
_LOCAL: Final = ("daemonset.yaml", "deployment.yaml", "kustomization.yaml")
_APPLY_TIMEOUT_S: Final = 60
_READY_SECONDS: Final = 60.0
CONTROLLER: Final = "gpunode-controller"


@dataclass(frozen=True)
class Installation:
    """What to install: `profile` is a board of fake_gpus/boards (or a file) that every node gets.

    metrics_port: of the agents; they share the host's ports, so only one agent can have it. 0: no metrics.
    health_policy: a file for all agents, read when they start; see docs/health.md.
    driver: the name that agents publish under, and whose devices the controller places.
    mps: start an MPS keeper on every node too.
    """

    profile: str = "dgx-a100-80"
    verbose: bool = False
    metrics_port: int = 0
    health_policy: Path | None = None
    driver: str = DEFAULT_DRIVER
    mps: bool = False


def agent_name(node: str, instance: str = "") -> str:
    """Process name of a node's agent."""
    return process_name(node, f"gpunode-agent-{instance}" if instance else "gpunode-agent")


def keeper_name(node: str) -> str:
    """Process name of a node's MPS keeper."""
    return process_name(node, "gpunode-mps-keeper")


def install(cluster: Cluster, wish: Installation, report: Callable[[str, float], None]) -> None:
    """Apply the manifests and start agents and controller; those that run already are left alone.

    Returns when every agent has published its slices. Raises ClusterError.
    """
    report("Applying the manifests", 0.0)
    apply_manifests(cluster)
    start_controller(cluster, wish)
    report("Starting the agents", 0.2)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda node: start_agent(cluster, node, wish), cluster.nodes))
        if wish.mps:
            list(pool.map(lambda node: start_keeper(cluster, node, wish), cluster.nodes))
    _wait_for_slices(cluster, wish.driver, report)


def apply_manifests(cluster: Cluster) -> None:
    """daemonset/base and daemonset/fake, less the workloads. Raises ClusterError with kubectl's words."""
    root = data_dir("daemonset")
    files = [f for folder in ("base", "fake") for f in sorted((root / folder).glob("*.yaml")) if f.name not in _LOCAL]
    # The namespace first: the others live in it.
    files.sort(key=lambda file: file.name != "namespace.yaml")
    kubectl(
        cluster,
        "apply",
        "--server-side",
        "--force-conflicts",
        "--field-manager=gpunode-install",
        *(part for file in files for part in ("-f", str(file))),
    )


def kubectl(cluster: Cluster, *arguments: str) -> str:
    """Run kubectl as the administrator; its output. Raises ClusterError."""
    command = [str(cluster.kubectl), f"--kubeconfig={cluster.kubeconfig}", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_APPLY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"kubectl {arguments[0]} did not end within {_APPLY_TIMEOUT_S} s") from None
    if done.returncode != 0:
        raise ClusterError(f"kubectl {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


def start_controller(cluster: Cluster, wish: Installation) -> None:
    """Start the controller unless it runs."""
    config = cluster.token(SYSTEM_NAMESPACE, "gpunode-controller")
    command = [
        *(*_gpunode(wish), "controller", "--kubeconfig", str(config), "--identity", "local"),
        *("--metrics-port", "0", "--driver", wish.driver),
    ]
    cluster.processes.start(CONTROLLER, command)


def start_agent(cluster: Cluster, node: Node, wish: Installation, instance: str = "") -> None:
    """Start one node's agent, in the node's mount namespace, unless it runs.

    instance: tells the processes of a node's agents apart where several are there at the same time, as in a rolling
    update. The agents themselves need no names.
    """
    config = cluster.token(SYSTEM_NAMESPACE, "gpunode-agent", node.name)
    command = [
        *node.enter,
        *_gpunode(wish),
        *("agent", "--node-name", node.name, "--kubeconfig", str(config)),
        *("--backend", "fake", "--profile", wish.profile),
        *("--fake-root", str(node.state / "fake"), "--state-dir", str(node.state / "gpunode")),
        *("--metrics-port", str(wish.metrics_port), "--driver", wish.driver),
        *(("--health-policy", str(wish.health_policy)) if wish.health_policy is not None else ()),
    ]
    cluster.processes.start(agent_name(node.name, instance), command)


def start_keeper(cluster: Cluster, node: Node, wish: Installation) -> None:
    """Start one node's MPS keeper, in the node's mount namespace, unless it runs.

    Its daemons are the control program of the node's fake machine.
    """
    tool = node.state / "fake" / "bin" / "nvidia-cuda-mps-control"
    cluster.processes.start(keeper_name(node.name), [*node.enter, *_gpunode(wish), "mps-keeper", "--tool", str(tool)])


def _gpunode(wish: Installation) -> list[str]:
    return [sys.executable, "-m", "gpunode", *(["-v"] if wish.verbose else [])]


def _wait_for_slices(cluster: Cluster, driver: str, report: Callable[[str, float], None]) -> None:
    wanted = {node.name for node in cluster.nodes}
    deadline = time.monotonic() + _READY_SECONDS
    told = -1
    while True:
        listed = cluster.api.call("GET", "/apis/resource.k8s.io/v1/resourceslices")["items"]
        found = {item["spec"].get("nodeName") for item in listed if item["spec"]["driver"] == driver}
        missing = sorted(wanted - found)
        done = len(wanted) - len(missing)
        if done != told:
            report(f"{done} of {len(wanted)} nodes have published their GPUs", 0.2 + 0.8 * done / len(wanted))
            told = done
        if not missing:
            return
        dead = [name for name in (*map(agent_name, missing), CONTROLLER) if not cluster.processes.alive(name)]
        if dead:
            raise ClusterError(f"{dead[0]} ended: {cluster.processes.tail(dead[0])}")
        if time.monotonic() > deadline:
            log: Path = cluster.processes.log(agent_name(missing[0]))
            raise ClusterError(f"no GPUs from {', '.join(missing)} within {_READY_SECONDS:.0f} s; see {log}")
        time.sleep(0.25)
