"""Members of a native group that only we can bind, and everyone else, whom we leave to kube-scheduler."""

from msgspec.structs import replace
from scenario import CONFIG, NOW, Scenario, scenario

from gpunode.gang.decide import decide
from gpunode.model.gang import Bind

GROUP = "node n1\nnode n2\nnode n3\ngang g pods=8,8,8 min=3 bound=n1,n2,n3"


def change(world: Scenario, name: str, phase: str = "", node: str | None = None) -> None:
    """Another phase for a pod, or another node ("" as if it had only been released)."""
    pod = world.pods[f"default/{name}"]
    status = replace(pod.status, phase=phase) if phase else pod.status
    spec = replace(pod.spec, node_name=node) if node is not None else pod.spec
    world.pods[f"default/{name}"] = replace(pod, status=status, spec=spec)


def binds(world: Scenario) -> list[Bind]:
    return [a for a in decide(world.snapshot(), NOW, CONFIG) if isinstance(a, Bind)]


def test_a_member_re_created_after_a_sibling_succeeded_is_bound_by_us() -> None:
    world = scenario(GROUP)
    change(world, "g-0", phase="Succeeded")
    change(world, "g-1", phase="Pending", node="")
    assert binds(world) == [Bind("podgroup/default/g", "default/g-1", "n2")]


def test_with_a_quorum_alive_kube_scheduler_binds() -> None:
    world = scenario(GROUP)
    change(world, "g-1", phase="Pending", node="")
    assert binds(world) == []


def test_a_group_that_is_not_complete_waits() -> None:
    world = scenario(GROUP)
    change(world, "g-1", phase="Pending", node="")
    del world.pods["default/g-0"]
    assert binds(world) == []


def test_a_node_that_would_not_take_the_pod_any_more_is_left_alone() -> None:
    world = scenario(GROUP)
    change(world, "g-0", phase="Succeeded")
    change(world, "g-1", phase="Pending", node="")
    node = world.nodes["n2"]
    world.nodes["n2"] = replace(node, spec=replace(node.spec, unschedulable=True))
    assert binds(world) == []


def test_what_is_still_gated_is_placed_first() -> None:
    world = scenario(GROUP + "\npod g-3 gpus=0 group=g")
    change(world, "g-0", phase="Succeeded")
    change(world, "g-1", phase="Pending", node="")
    change(world, "g-2", phase="Succeeded")
    assert binds(world) == []
