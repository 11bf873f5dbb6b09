"""A running cluster: where its parts are, identities for other programs, and ways to break it for tests."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpunode.cluster import build, packages
from gpunode.cluster.api import Api, ApiStatusError, ApiUnreachableError
from gpunode.cluster.errors import ClusterError
from gpunode.cluster.layout import Layout, layout
from gpunode.cluster.nodes import COMPONENTS, NodeRunner, enter, process_name
from gpunode.cluster.pki import KeyPair, Pki, kubeconfig, write_secret
from gpunode.cluster.processes import Processes
from gpunode.cluster.spec import ClusterSpec, Plan, check_name

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
ADMIN = "admin"
TOKEN_SECONDS = 365 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a cluster.

    name     of the Node object
    address  IPv4: its InternalIP, the gateway of its pods; free for the node's own servers to bind to
    state    its directory on the host
    """

    name: str
    address: str
    state: Path
    processes: Processes

    @property
    def kmsg(self) -> Path:
        """The node's kernel log: a regular file; append records "PRIORITY,SEQUENCE,MICROSECONDS,-;TEXT"."""
        return self.state / "kmsg"

    @property
    def cdi(self) -> Path:
        """The node's /var/run/cdi as seen from the host."""
        return self.state / "run" / "cdi"

    @property
    def enter(self) -> tuple[str, ...]:
        """Put before a command line, runs it in the node's mount namespace.

        Raises ClusterError if the node is not running.
        """
        return enter(self.processes, self.name)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster with a state directory; its processes may be running or not."""

    plan: Plan
    layout: Layout

    @property
    def spec(self) -> ClusterSpec:
        return self.plan.spec

    @property
    def processes(self) -> Processes:
        """For starting more processes that belong to the cluster; `down` stops them as well."""
        return Processes(self.layout.state)

    @property
    def kubeconfig(self) -> Path:
        """Of the administrator (group system:masters)."""
        return self.layout.kubeconfig(ADMIN)

    @property
    def kubectl(self) -> str:
        """Path of a kubectl of the cluster's version."""
        return build.find(self.spec.kubernetes)["kubectl"]

    @property
    def logs(self) -> Path:
        return self.layout.state / "logs"

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(
            Node(node.name, str(node.address), self.layout.node(node).root, self.processes) for node in self.plan.nodes
        )

    @property
    def api(self) -> Api:
        return admin_api(self.plan, self.layout)

    def node(self, name: str) -> Node:
        """Raises ClusterError if there is none of that name."""
        wanted = self.plan.node(name).name
        return next(node for node in self.nodes if node.name == wanted)

    def component_names(self) -> tuple[str, ...]:
        """Names of all processes that `up` keeps running."""
        per_node = (process_name(n.name, part) for n in self.plan.nodes for part in COMPONENTS)
        return (*CONTROL_PLANE, *per_node)

    def extra_names(self) -> tuple[str, ...]:
        """Names of processes that others have started in the cluster with `processes.start`."""
        return tuple(name for name in self.processes.names() if name not in self.component_names())

    def restart_kubelet(self, node: str) -> None:
        """Stops the kubelet of that node and starts it again; pods keep running.

        Raises ClusterError for an unknown node or a kubelet that does not start.
        """
        runner = self.runner(node)
        self.processes.stop(process_name(runner.node.name, "kubelet"))
        runner.start_kubelet()

    def kill(self, node: str | None, component: str) -> None:
        """kill -9 of "kubelet" or "containerd" of a node, or of a part of the control plane with node None.

        Raises ClusterError if it was not running.
        """
        name = component if node is None else process_name(self.plan.node(node).name, component)
        if not self.processes.kill(name):
            raise ClusterError(f"{name} of cluster {self.spec.name} is not running")

    def token(self, namespace: str, service_account: str, node: str | None = None) -> Path:
        """Writes a kubeconfig with a token of that ServiceAccount and returns its path.

        node  binds the token to that Node object, as a token projected into a pod of the node would be
              (user info then carries authentication.kubernetes.io/node-name)

        Raises ClusterError if the ServiceAccount or the Node does not exist.
        """
        spec: dict[str, Any] = {"expirationSeconds": TOKEN_SECONDS}
        if node is not None:
            uid = self.api.call("GET", f"/api/v1/nodes/{node}")["metadata"]["uid"]
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{service_account}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        token = self.api.call("POST", path, request)["status"]["token"]
        target = self.layout.kubeconfig(".".join(filter(None, (namespace, service_account, node))))
        ca = Pki(self.layout.pki).ca.cert.read_bytes()
        write_secret(target, kubeconfig(self.plan.server, ca, {"token": token}, f"gpunode-{self.spec.name}"))
        return target

    def node_status(self) -> dict[str, bool]:
        """Name -> whether the Node's Ready condition is True, as the API server has it; empty if it is down."""
        try:
            listed = self.api.call("GET", "/api/v1/nodes")["items"]
        except (ApiUnreachableError, ApiStatusError):
            return {}
        return {item["metadata"]["name"]: _is_ready(item) for item in listed}

    def runner(self, node: str) -> NodeRunner:
        return NodeRunner(
            self.plan,
            self.plan.node(node),
            self.layout,
            self.processes,
            build.find(self.spec.kubernetes),
            packages.find(),
        )


def load(name: str = "default") -> Cluster | None:
    """The cluster of that name if it has been brought up and not down; its processes may have died since."""
    check_name(name)
    where = layout(name)
    plan = where.read_plan()
    return None if plan is None else Cluster(plan, where)


def admin_api(plan: Plan, where: Layout) -> Api:
    pki = where.pki
    return Api(plan.spec.port, pki / "ca.crt", KeyPair(pki / f"{ADMIN}.crt", pki / f"{ADMIN}.key"))


def _is_ready(node: dict[str, Any]) -> bool:
    conditions = node.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
