"""What a node of the test cluster has, as the host and the API server see it."""

from pathlib import Path
from typing import Any

from gpunode.cluster.cluster import Cluster, Node
from gpunode.kubelet.plugin import KubeletPaths
from gpunode.model.names import DEFAULT_DRIVER


def kubelet_root(node: Node) -> Path:
    """The node's /var/lib/kubelet as the host sees it."""
    return node.state / "var-lib-kubelet"


def sockets(node: Node) -> list[Path]:
    """Registration sockets of our driver's agents, dead or alive."""
    return KubeletPaths(kubelet_root(node)).registration_sockets(DEFAULT_DRIVER)


def dra_socket(node: Node, driver: str = DEFAULT_DRIVER) -> Path:
    """Where the kubelet calls the node's one agent."""
    (path,) = KubeletPaths(kubelet_root(node)).plugin_dir(driver).glob("dra*.sock")
    return path


def slices_of(cluster: Cluster, node: Node, driver: str = DEFAULT_DRIVER) -> list[dict[str, Any]]:
    """A driver's slices of the node."""
    found = cluster.api.call("GET", "/apis/resource.k8s.io/v1/resourceslices")["items"]
    return [s for s in found if s["spec"].get("nodeName") == node.name and s["spec"]["driver"] == driver]
