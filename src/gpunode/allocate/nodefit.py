"""Whether a pod fits a node apart from devices: the filters kube-scheduler would apply.

Covered: readiness, cordon, taints, nodeSelector, required node affinity, resources (with init containers,
sidecars and overhead), the pod limit and host ports. Not covered: volumes, topology spread and inter-pod
affinity; a pod that uses those may be pinned to a node that kube-scheduler then refuses.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gpunode.allocate.selectors import matches_node
from gpunode.model.core import Container, Node, NodeTaint, Pod, Toleration
from gpunode.model.quantity import parse_milli
from gpunode.model.resource import NodeSelector

HostPort = tuple[str, str, int]
_ANY_IP: Final = ("", "0.0.0.0", "::")


@dataclass(frozen=True)
class Misfit:
    """Why a pod cannot go to a node. kind is a short stable word; text follows "1 node" in a sentence."""

    kind: str
    text: str


@dataclass(frozen=True)
class PodNeeds:
    """What a pod takes from and asks of a node; equal needs fit equal nodes.

    requests: sorted (resource, thousandths). selector: sorted label pairs.
    """

    requests: tuple[tuple[str, int], ...] = ()
    ports: tuple[HostPort, ...] = ()
    selector: tuple[tuple[str, str], ...] = ()
    affinity: NodeSelector | None = None
    tolerations: tuple[Toleration, ...] = ()


def pod_needs(pod: Pod) -> PodNeeds:
    """Needs of a pod. Raises ValueError for a request that is not a quantity."""
    spec = pod.spec
    affinity = spec.affinity.node_affinity.required if spec.affinity and spec.affinity.node_affinity else None
    return PodNeeds(
        requests=tuple(sorted(_requests(pod).items())),
        ports=tuple(sorted({p for c in (*spec.containers, *_sidecars(pod)) for p in _ports(c)})),
        selector=tuple(sorted(spec.node_selector.items())),
        affinity=affinity,
        tolerations=spec.tolerations,
    )


def _sidecars(pod: Pod) -> tuple[Container, ...]:
    return tuple(c for c in pod.spec.init_containers if c.restart_policy == "Always")


def _ports(container: Container) -> list[HostPort]:
    return [(p.protocol or "TCP", p.host_ip, p.host_port) for p in container.ports if p.host_port]


def _effective(container: Container) -> dict[str, int]:
    """Requests of one container in thousandths; a limit stands in for a missing request (API defaulting)."""
    resources = container.resources
    return {name: parse_milli(text) for name, text in {**resources.limits, **resources.requests}.items()}


def _requests(pod: Pod) -> dict[str, int]:
    """The larger of the steady state and each init step, plus overhead (k8s.io/component-helpers/resource)."""
    total: dict[str, int] = {}
    for container in pod.spec.containers:
        _add(total, _effective(container))
    sidecars: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in pod.spec.init_containers:
        own = _effective(container)
        if container.restart_policy == "Always":
            _add(total, own)
            _add(sidecars, own)
            _raise(peak, sidecars)
        else:
            _raise(peak, {n: v + sidecars.get(n, 0) for n, v in own.items()})
    _raise(total, peak)
    _add(total, {name: parse_milli(text) for name, text in pod.spec.overhead.items()})
    return {name: value for name, value in total.items() if value > 0}


def _add(into: dict[str, int], other: dict[str, int]) -> None:
    for name, value in other.items():
        into[name] = into.get(name, 0) + value


def _raise(into: dict[str, int], other: dict[str, int]) -> None:
    for name, value in other.items():
        into[name] = max(into.get(name, 0), value)


def tolerates(toleration: Toleration, taint: NodeTaint) -> bool:
    """k8s.io/api/core/v1 Toleration.ToleratesTaint."""
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    if toleration.operator == "Exists":
        return True
    return bool(toleration.key) and toleration.operator in ("", "Equal") and toleration.value == taint.value


def static_misfit(needs: PodNeeds, node: Node) -> Misfit | None:
    """What does not depend on other pods: readiness, cordon, taints, selectors."""
    if not node.ready:
        return Misfit("NotReady", "not Ready")
    cordon = NodeTaint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")
    if node.spec.unschedulable and not any(tolerates(t, cordon) for t in needs.tolerations):
        return Misfit("Cordoned", "cordoned")
    for taint in node.spec.taints:
        if taint.effect in ("NoSchedule", "NoExecute") and not any(tolerates(t, taint) for t in needs.tolerations):
            value = f"={taint.value}" if taint.value else ""
            return Misfit("Taint", f"with untolerated taint {taint.key}{value}:{taint.effect}")
    labels = node.metadata.labels
    for key, value in needs.selector:
        if labels.get(key) != value:
            return Misfit("Selector", f"without label {key}={value}")
    if needs.affinity is not None and not matches_node(needs.affinity, node):
        return Misfit("Affinity", "excluded by node affinity")
    return None


class NodeRoom:
    """Mutable count of what is free on a node, in thousandths, and its host ports."""

    __slots__ = ("_allocatable", "_free", "_ports")

    def __init__(self, node: Node, pods: Iterable[PodNeeds] = ()) -> None:
        self._allocatable = {name: _quantity(text) for name, text in node.status.allocatable.items()}
        self._free = dict(self._allocatable)
        self._free.setdefault("pods", 110_000)
        self._ports: list[HostPort] = []
        for needs in pods:
            self.take(needs)

    def take(self, needs: PodNeeds) -> None:
        for name, value in needs.requests:
            self._free[name] = self._free.get(name, 0) - value
        self._free["pods"] -= 1000
        self._ports.extend(needs.ports)

    def give(self, needs: PodNeeds) -> None:
        for name, value in needs.requests:
            self._free[name] = self._free.get(name, 0) + value
        self._free["pods"] += 1000
        for port in needs.ports:
            self._ports.remove(port)

    def misfit(self, needs: PodNeeds) -> Misfit | None:
        free = self._free
        if free["pods"] < 1000:
            return Misfit("Pods", "with the maximum number of pods")
        for name, value in needs.requests:
            if value > free.get(name, 0):
                return Misfit("Resources", f"short of {name} (a pod needs {_show(name, value)})")
        for port in needs.ports:
            if any(_clash(port, other) for other in self._ports):
                return Misfit("Ports", f"with host port {port[2]}/{port[0]} taken")
        return None


def _quantity(text: str) -> int:
    """Allocatable in thousandths; a value that is not a quantity counts as none."""
    try:
        return parse_milli(text)
    except ValueError:
        return 0


def _clash(left: HostPort, right: HostPort) -> bool:
    same_ip = left[1] == right[1] or left[1] in _ANY_IP or right[1] in _ANY_IP
    return left[0] == right[0] and left[2] == right[2] and same_ip


def _show(name: str, milli: int) -> str:
    if name == "memory" or name.startswith(("hugepages", "ephemeral")):
        return f"{max(milli, 0) / 1000 / 2**30:.4g}Gi"
    return f"{max(milli, 0) / 1000:g}"
