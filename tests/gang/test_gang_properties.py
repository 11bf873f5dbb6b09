"""Invariants over random clusters: I1, I2, I3, I5 and I6 of the design."""

import random
from dataclasses import replace as with_fields

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scenario import CONFIG, NOW, scenario

from gpunode.gang.decide import Decider, decide
from gpunode.gang.gangs import Owners, Ownership, find_gangs
from gpunode.model.gang import Action, Evict, Place, Release, Report, Snapshot
from gpunode.model.resource import ConsumerReference, ResourceClaimStatus


@st.composite
def _cluster(draw: st.DrawFn) -> str:
    lines: list[str] = []
    for i in range(draw(st.integers(1, 5))):
        flags = draw(st.sampled_from(["", "", "", " cordoned", " notready", " incomplete"]))
        gpus, model = draw(st.sampled_from([2, 4, 8])), draw(st.sampled_from(["h100", "a100"]))
        lines.append(f"node n{i} gpus={gpus} model={model} link={draw(st.sampled_from([2, 4, 8]))}"
                     f" rack=r{i % 2} cpu={draw(st.integers(4, 16))}{flags}")  # fmt: skip
    for i in range(draw(st.integers(1, 4))):
        sizes = draw(st.lists(st.sampled_from([1, 1, 2, 4, 8]), min_size=1, max_size=5))
        words = [f"gang g{i} pods={','.join(map(str, sizes))} min={draw(st.integers(1, len(sizes)))}"]
        words.append(f"prio={draw(st.integers(0, 2))} cpu={draw(st.integers(1, 3))}")
        words.append(draw(st.sampled_from(["", "", "topology=rack"])))
        words.append(draw(st.sampled_from(["", "", "alt=h100,a100", "model=a100"])))
        words.append(draw(st.sampled_from(["", "", "same=nvlinkDomain", "ungated"])))
        lines.append(" ".join(words))
        if draw(st.booleans()):
            flag = draw(st.sampled_from(["foreign", "noclaim", "ungated", "terminating", ""]))
            lines.append(f"pod g{i}-9 gpus=1 group=g{i} {flag}")
    for _ in range(draw(st.integers(0, 2))):
        lines.append(f"taint n0/gpu-{draw(st.integers(0, 3))} xid=79")
    return "\n".join(lines)


def apply(snapshot: Snapshot, actions: tuple[Action, ...]) -> Snapshot:
    """What the cluster looks like once the placements are written and bound."""
    claims, pods = dict(snapshot.claims), dict(snapshot.pods)
    for action in actions:
        if not isinstance(action, Place):
            continue
        for assignment in action.assignments:
            pod = pods[assignment.pod]
            pods[assignment.pod] = replace(pod, spec=replace(pod.spec, node_name=assignment.node, scheduling_gates=()))
            for one in assignment.claims:
                user = ConsumerReference(resource="pods", name=pod.metadata.name, uid=pod.metadata.uid)
                status = ResourceClaimStatus(allocation=one.allocation, reserved_for=(user,))
                claims[one.claim] = replace(claims[one.claim], status=status)
        for key in action.stragglers:
            pods[key] = replace(pods[key], spec=replace(pods[key].spec, scheduling_gates=()))
    return with_fields(snapshot, claims=claims, pods=pods)


def shuffled(snapshot: Snapshot, seed: int) -> Snapshot:
    def mix(table):  # type: ignore[no-untyped-def]
        items = list(table.items())
        random.Random(seed).shuffle(items)
        return dict(items)

    return with_fields(
        snapshot,
        **{
            name: mix(getattr(snapshot, name))
            for name in ("nodes", "slices", "claims", "classes", "taint_rules", "pods", "pod_groups", "jobs")
        },
    )


@given(_cluster(), st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_invariants(text: str, seed: int) -> None:
    snapshot = scenario(text).snapshot()
    actions = decide(snapshot, NOW, CONFIG)
    after = apply(snapshot, actions)
    _no_device_twice(after)
    _whole_gangs(after)
    _nodes_not_overfull(after)
    _homogeneous_and_in_one_domain(after)
    _one_reason_each(snapshot, actions)
    assert decide(shuffled(snapshot, seed), NOW, CONFIG) == actions  # I5
    # Once written, nothing more is to be placed in the same cluster.
    assert not [a for a in decide(after, NOW, CONFIG) if isinstance(a, Place) and a.assignments]


@given(_cluster(), _cluster())
@settings(max_examples=60, deadline=None)
def test_memory_of_earlier_snapshots_changes_no_answer(first: str, second: str) -> None:
    decider = Decider()
    for text in (first, second, first):
        snapshot = scenario(text).snapshot()
        for _ in range(2):
            assert decider.decide(snapshot, NOW, CONFIG) == decide(snapshot, NOW, CONFIG)
            snapshot = apply(snapshot, decide(snapshot, NOW, CONFIG))


def _no_device_twice(snapshot: Snapshot) -> None:
    """I1"""
    used = [
        (r.pool, r.device)
        for c in snapshot.claims.values()
        if c.status.allocation
        for r in c.status.allocation.devices.results
    ]
    assert len(used) == len(set(used))


def _states(snapshot: Snapshot):  # type: ignore[no-untyped-def]
    return find_gangs(snapshot, Owners(lambda claim: Ownership.OURS))


def _whole_gangs(snapshot: Snapshot) -> None:
    """I2"""
    for state in _states(snapshot):
        assert not state.placed or len(state.placed) >= state.gang.min_count


def _nodes_not_overfull(snapshot: Snapshot) -> None:
    used: dict[str, int] = {}
    for pod in snapshot.pods.values():
        if pod.spec.node_name:
            cpu = int(pod.spec.containers[0].resources.requests["cpu"])
            used[pod.spec.node_name] = used.get(pod.spec.node_name, 0) + cpu
    for name, cpu in used.items():
        node = snapshot.nodes[name]
        assert cpu <= int(node.status.allocatable["cpu"])
        assert node.ready and not node.spec.unschedulable


def _homogeneous_and_in_one_domain(snapshot: Snapshot) -> None:
    for state in _states(snapshot):
        requests = {
            r.request
            for m in state.members
            for c in m.claims
            if c.status.allocation
            for r in c.status.allocation.devices.results
            if "/" in r.request
        }
        assert len(requests) <= 1
        if state.gang.topology:
            nodes = [snapshot.nodes[m.pod.spec.node_name] for m in state.placed]
            assert len({n.metadata.labels[state.gang.topology] for n in nodes}) <= 1


def _one_reason_each(snapshot: Snapshot, actions: tuple[Action, ...]) -> None:
    """I6, and I3: these clusters have nothing running, so nothing may be evicted."""
    reported = [a.gang for a in actions if isinstance(a, Report)]
    placed = {a.gang for a in actions if isinstance(a, Place) and a.assignments}
    waiting = {s.gang.key for s in _states(snapshot) if s.waiting}
    assert len(reported) == len(set(reported))
    assert waiting - placed <= set(reported)
    assert not [a for a in actions if isinstance(a, Evict)]


def write(snapshot: Snapshot, actions: tuple[Action, ...], stop: int) -> Snapshot:
    """The controller's writes in its order (claims of a gang, then its gates), cut off after `stop` writes."""
    claims, pods = dict(snapshot.claims), dict(snapshot.pods)
    for action in actions:
        if isinstance(action, Release):
            for key in action.claims:
                claims[key] = replace(claims[key], status=ResourceClaimStatus())
        if not isinstance(action, Place):
            continue
        for assignment in action.assignments:
            for one in assignment.claims:
                if (stop := stop - 1) < 0:
                    return with_fields(snapshot, claims=claims, pods=pods)
                name = pods[assignment.pod].metadata.name
                user = ConsumerReference(resource="pods", name=name, uid=f"uid-{name}")
                status = ResourceClaimStatus(allocation=one.allocation, reserved_for=(user,))
                claims[one.claim] = replace(claims[one.claim], status=status)
        for key in [a.pod for a in action.assignments] + list(action.stragglers):
            if (stop := stop - 1) < 0:
                return with_fields(snapshot, claims=claims, pods=pods)
            pods[key] = replace(pods[key], spec=replace(pods[key].spec, scheduling_gates=()))
    return with_fields(snapshot, claims=claims, pods=pods)


@given(_cluster(), st.integers(0, 12), st.sampled_from(["", "n0", "n1"]))
@settings(max_examples=150, deadline=None)
def test_a_restart_after_any_write_converges(text: str, stop: int, lost: str) -> None:
    """I7: whatever was written, and even if a node is cordoned meanwhile, no gang stays partial with its gates shut
    and none holds devices while it waits."""
    snapshot = scenario(text).snapshot()
    snapshot = write(snapshot, decide(snapshot, NOW, CONFIG), stop)
    if lost in snapshot.nodes:
        node = snapshot.nodes[lost]
        cordoned = replace(node, spec=replace(node.spec, unschedulable=True))
        snapshot = with_fields(snapshot, nodes={**snapshot.nodes, lost: cordoned})
    for _ in range(20):
        actions = decide(snapshot, NOW, CONFIG)
        after = write(snapshot, actions, 10_000)
        if after == snapshot:
            break
        snapshot = after
    else:
        raise AssertionError("does not settle")
    _no_device_twice(snapshot)
    for state in _states(snapshot):
        gated = [m for m in state.members if m.gated]
        assert not [c for m in gated for c in m.claims if c.status.allocation is not None]
        if not lost:
            ready = [m for m in gated if not m.foreign_gates and not m.absent]
            assert not ready or not state.placed or state.problem is not None
