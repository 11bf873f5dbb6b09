"""Node fit: what kube-scheduler's filters would say, apart from devices."""

import pytest

from gpunode.allocate.nodefit import NodeRoom, pod_needs, static_misfit
from gpunode.model.core import (
    Affinity,
    Container,
    ContainerPort,
    ContainerResources,
    Node,
    NodeAffinity,
    NodeSpec,
    NodeStatus,
    NodeTaint,
    Pod,
    PodSpec,
    Toleration,
)
from gpunode.model.meta import Condition, ObjectMeta
from gpunode.model.resource import NodeSelector, NodeSelectorRequirement, NodeSelectorTerm


def box(restart: str | None = None, port: int | None = None, **requests: str) -> Container:
    ports = (ContainerPort(host_port=port),) if port else ()
    return Container(resources=ContainerResources(requests=requests), restart_policy=restart, ports=ports)


def pod(*containers: Container, init: tuple[Container, ...] = (), **spec: object) -> Pod:
    return Pod(spec=PodSpec(containers=containers, init_containers=init, **spec))  # type: ignore[arg-type]


def node(
    unschedulable: bool = False, taints: tuple[NodeTaint, ...] = (), ready: str = "True", **allocatable: str
) -> Node:
    return Node(
        metadata=ObjectMeta(name="n1", labels={"zone": "z1", "gpus": "8"}),
        spec=NodeSpec(unschedulable=unschedulable, taints=taints),
        status=NodeStatus(
            allocatable={"cpu": "8", "memory": "32Gi", "pods": "3", **allocatable},
            conditions=(Condition(type="Ready", status=ready),),
        ),
    )


@pytest.mark.parametrize(
    ("subject", "cpu"),
    [
        (pod(box(cpu="1"), box(cpu="500m")), 1500),
        (pod(box(cpu="1"), init=(box(cpu="4"),)), 4000),
        (pod(box(cpu="1"), init=(box("Always", cpu="2"), box(cpu="4"))), 6000),  # sidecar runs beside the init step
        (pod(box(cpu="5"), init=(box("Always", cpu="2"), box(cpu="4"))), 7000),  # and beside the containers
        (pod(box(cpu="1"), init=(box(cpu="4"), box("Always", cpu="2"))), 4000),  # a later sidecar does not
        (pod(box(cpu="1"), overhead={"cpu": "250m"}), 1250),
    ],
)
def test_requests(subject: Pod, cpu: int) -> None:
    assert dict(pod_needs(subject).requests)["cpu"] == cpu


def test_a_limit_stands_in_for_a_request() -> None:
    limited = pod(Container(resources=ContainerResources(limits={"cpu": "2"})))
    assert dict(pod_needs(limited).requests) == {"cpu": 2000}


def test_a_request_that_is_no_quantity_raises() -> None:
    with pytest.raises(ValueError, match="quantity"):
        pod_needs(pod(box(cpu="lots")))


def affinity(*terms: NodeSelectorTerm) -> Affinity:
    return Affinity(node_affinity=NodeAffinity(required=NodeSelector(node_selector_terms=terms)))


def expression(key: str, operator: str, *values: str) -> NodeSelectorTerm:
    return NodeSelectorTerm(match_expressions=(NodeSelectorRequirement(key=key, operator=operator, values=values),))


def by_name(name: str) -> NodeSelectorTerm:
    return NodeSelectorTerm(match_fields=(NodeSelectorRequirement(key="metadata.name", operator="In", values=(name,)),))


@pytest.mark.parametrize(
    ("terms", "fits"),
    [
        ((expression("zone", "In", "z1", "z2"),), True),
        ((expression("zone", "NotIn", "z1"),), False),
        ((expression("rack", "NotIn", "r1"),), True),
        ((expression("rack", "Exists"),), False),
        ((expression("rack", "DoesNotExist"),), True),
        ((expression("gpus", "Gt", "4"),), True),
        ((expression("gpus", "Lt", "8"),), False),
        ((expression("zone", "Gt", "4"),), False),  # not a number
        ((expression("zone", "Like", "z"),), False),
        ((expression("rack", "Exists"), expression("zone", "Exists")), True),  # terms are alternatives
        ((by_name("n1"),), True),
        ((by_name("n2"),), False),
        ((NodeSelectorTerm(),), False),
        ((), False),
    ],
)
def test_node_affinity(terms: tuple[NodeSelectorTerm, ...], fits: bool) -> None:
    misfit = static_misfit(pod_needs(pod(affinity=affinity(*terms))), node())
    assert (misfit is None) == fits
    assert misfit is None or misfit.kind == "Affinity"


EVICTABLE = Toleration(key="dedicated", operator="Exists", effect="NoExecute")
DEDICATED = NodeTaint(key="dedicated", value="ml", effect="NoSchedule")
SOFT = NodeTaint(key="dedicated", value="ml", effect="PreferNoSchedule")


@pytest.mark.parametrize(
    ("where", "spec", "kind"),
    [
        (node(ready="False"), {}, "NotReady"),
        (node(unschedulable=True), {}, "Cordoned"),
        (node(unschedulable=True), {"tolerations": (Toleration(operator="Exists"),)}, None),
        (node(taints=(DEDICATED,)), {}, "Taint"),
        (node(taints=(DEDICATED,)), {"tolerations": (Toleration(key="dedicated", value="ml"),)}, None),
        (node(taints=(DEDICATED,)), {"tolerations": (Toleration(key="dedicated", value="db"),)}, "Taint"),
        (node(taints=(DEDICATED,)), {"tolerations": (EVICTABLE,)}, "Taint"),
        (node(taints=(SOFT,)), {}, None),
        (node(), {"node_selector": {"zone": "z2"}}, "Selector"),
        (node(), {"node_selector": {"zone": "z1"}}, None),
    ],
)  # fmt: skip
def test_static(where: Node, spec: dict[str, object], kind: str | None) -> None:
    misfit = static_misfit(pod_needs(pod(**spec)), where)
    assert (misfit.kind if misfit else None) == kind


def test_room_is_given_back_exactly() -> None:
    small, large = pod_needs(pod(box(cpu="3"))), pod_needs(pod(box(cpu="6")))
    room = NodeRoom(node())
    room.take(small)
    misfit = room.misfit(large)
    assert misfit is not None and misfit.text == "short of cpu (a pod needs 6)"
    room.give(small)
    assert room.misfit(large) is None


def test_pod_limit_and_unknown_resources() -> None:
    room = NodeRoom(node(), [pod_needs(pod())] * 3)
    misfit = room.misfit(pod_needs(pod()))
    assert misfit is not None and misfit.kind == "Pods"
    misfit = NodeRoom(node()).misfit(pod_needs(pod(box(**{"example.com/fpga": "1"}))))
    assert misfit is not None and "example.com/fpga" in misfit.text


def test_host_ports_clash() -> None:
    room = NodeRoom(node(), [pod_needs(pod(box(port=8080)))])
    misfit = room.misfit(pod_needs(pod(box(port=8080))))
    assert misfit is not None and misfit.kind == "Ports"
    assert room.misfit(pod_needs(pod(box(port=8081)))) is None
