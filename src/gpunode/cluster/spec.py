"""What a cluster is: the wish (ClusterSpec) and the addresses and ports derived from it (Plan). Pure values."""

import hashlib
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Final

from gpunode.cluster.errors import ClusterError

DEFAULT_KUBERNETES: Final = "1.37.2"
DEFAULT_PORT: Final = 16443
MAX_NODES: Final = 64
# Clusters on one machine; each has its own second octet in 10.0.0.0/8 for pods (244 + slot) and services (96 + slot).
MAX_SLOTS: Final = 11
KUBELET_PORT: Final = 10250
KUBELET_HEALTH_PORT: Final = 10248

# Host names become Node names, label values and directory names.
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?")
_VERSION: Final = re.compile(r"1\.\d+\.\d+")

_GATES: Final = {
    "1.36": (
        "GenericWorkload",
        "GangScheduling",
        "TopologyAwareWorkloadScheduling",
        "DRAWorkloadResourceClaims",
        "DRADeviceTaintRules",
        "WorkloadAwarePreemption",
    ),
    "1.37": (
        "GenericWorkload",
        "TopologyAwareWorkloadScheduling",
        "DRAWorkloadResourceClaims",
        "CompositePodGroup",
        "WorkloadWithJob",
    ),
}
_APIS: Final = {
    "1.36": ("scheduling.k8s.io/v1alpha2", "resource.k8s.io/v1beta2", "resource.k8s.io/v1alpha3"),
    "1.37": (
        "scheduling.k8s.io/v1beta1",
        "scheduling.k8s.io/v1alpha3",
        "resource.k8s.io/v1beta2",
        "resource.k8s.io/v1alpha3",
    ),
}
_KUBELET_GATES: Final = ("GenericWorkload", "DRAWorkloadResourceClaims")


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A local cluster as wished for.

    name         at most 30 lower-case letters, digits and dashes; also the name of its state directory
    nodes        how many kubelets, 1 to 64
    kubernetes   version without the v: 1.36.x or 1.37.x
    port         of the API server on 127.0.0.1; the four ports after it are used as well
    node_prefix  nodes are called PREFIX-0, PREFIX-1, ...

    Raises ClusterError if a field is out of range.
    """

    name: str = "default"
    nodes: int = 3
    kubernetes: str = DEFAULT_KUBERNETES
    port: int = DEFAULT_PORT
    node_prefix: str = "gpu-node"

    def __post_init__(self) -> None:
        check_name(self.name)
        if not _NAME.fullmatch(self.node_prefix):
            raise ClusterError(f"node prefix {self.node_prefix!r}: use at most 30 of a-z, 0-9 and -")
        if not 1 <= self.nodes <= MAX_NODES:
            raise ClusterError(f"{self.nodes} nodes: use 1 to {MAX_NODES}")
        if not 1024 <= self.port <= 65531:
            raise ClusterError(f"port {self.port}: use 1024 to 65531")
        minor(self.kubernetes)


def check_name(name: str) -> None:
    """Raises ClusterError unless `name` can name a cluster."""
    if not _NAME.fullmatch(name):
        raise ClusterError(f"cluster name {name!r}: use at most 30 of a-z, 0-9 and -")


def minor(kubernetes: str) -> str:
    """ "1.37.2" -> "1.37". Raises ClusterError for a version this package has no settings for."""
    short = kubernetes.rpartition(".")[0]
    if not _VERSION.fullmatch(kubernetes) or short not in _GATES:
        raise ClusterError(f"Kubernetes {kubernetes!r} is not supported: use {DEFAULT_KUBERNETES} or 1.36.3")
    return short


def feature_gates(kubernetes: str) -> str:
    """--feature-gates of the control plane: gangs and everything they need. An unknown gate stops a component."""
    return ",".join(f"{gate}=true" for gate in _GATES[minor(kubernetes)])


def kubelet_gates(kubernetes: str) -> dict[str, bool]:
    minor(kubernetes)
    return dict.fromkeys(_KUBELET_GATES, True)


def runtime_config(kubernetes: str) -> str:
    """--runtime-config of the API server: the API versions that are off by default and gangs need."""
    return ",".join(f"{api}=true" for api in _APIS[minor(kubernetes)])


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Names and addresses of one node. `address` is its InternalIP and the gateway of its pods."""

    index: int
    name: str
    bridge: str
    subnet: IPv4Network
    address: IPv4Address


@dataclass(frozen=True, slots=True)
class Plan:
    """A spec and its slot on this machine: fixes every name, port and address that the cluster uses."""

    spec: ClusterSpec
    slot: int

    @property
    def tag(self) -> str:
        return tag(self.spec.name)

    @property
    def bridge_prefix(self) -> str:
        return bridge_prefix(self.spec.name)

    @property
    def pod_cidr(self) -> IPv4Network:
        return pod_cidr(self.slot)

    @property
    def service_cidr(self) -> IPv4Network:
        return service_cidr(self.slot)

    @property
    def service_address(self) -> IPv4Address:
        """Where pods find the API server (port 443)."""
        return self.service_cidr[1]

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.spec.port}"

    @property
    def etcd_port(self) -> int:
        return self.spec.port + 1

    @property
    def etcd_peer_port(self) -> int:
        return self.spec.port + 2

    @property
    def controller_manager_port(self) -> int:
        return self.spec.port + 3

    @property
    def scheduler_port(self) -> int:
        return self.spec.port + 4

    @property
    def nodes(self) -> tuple[NodePlan, ...]:
        subnets = self.pod_cidr.subnets(new_prefix=24)
        return tuple(
            NodePlan(i, f"{self.spec.node_prefix}-{i}", f"{self.bridge_prefix}{i}", subnet, subnet[1])
            for i, subnet in zip(range(self.spec.nodes), subnets, strict=False)
        )

    def node(self, name: str) -> NodePlan:
        """Raises ClusterError if the cluster has no node of that name."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise ClusterError(
            f"cluster {self.spec.name} has no node {name!r}: "
            f"its nodes are {self.nodes[0].name} to {self.nodes[-1].name}"
        )


def tag(name: str) -> str:
    """Five hex digits that stand for a cluster in names the kernel keeps short (interfaces: 15 bytes)."""
    return hashlib.sha256(name.encode()).hexdigest()[:5]


def bridge_prefix(name: str) -> str:
    """What the names of all bridges of a cluster start with; known from its name alone."""
    return f"gpn{tag(name)}-"


def pod_cidr(slot: int) -> IPv4Network:
    return IPv4Network(f"10.{244 + slot}.0.0/16")


def service_cidr(slot: int) -> IPv4Network:
    return IPv4Network(f"10.{96 + slot}.0.0/16")


def free_slot(taken: set[int], routes: list[IPv4Network]) -> int:
    """The lowest slot that no other cluster has and whose networks contain no route of this machine.

    A wider route (a VPN's 10.0.0.0/8, say) is no obstacle: the bridges' routes are more specific and win.

    Raises ClusterError if there is none.
    """
    for slot in range(MAX_SLOTS):
        networks = (pod_cidr(slot), service_cidr(slot))
        if slot not in taken and not any(route.subnet_of(network) for route in routes for network in networks):
            return slot
    raise ClusterError(
        "no free network for the pods in 10.244.0.0 to 10.254.0.0: stop another cluster with `gpunode cluster down`"
    )
