"""From a snapshot to gangs: which pods belong together, what they wait for, and what is wrong with them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gpunode.model.core import Pod, PodGroup
from gpunode.model.gang import Gang, Reason, ReasonCode, Snapshot
from gpunode.model.names import PLACEMENT_GATE
from gpunode.model.resource import ResourceClaim

# Set by the Job controller on pods of Indexed Jobs, as label and annotation (k8s.io/api/batch/v1).
COMPLETION_INDEX: Final = "batch.kubernetes.io/job-completion-index"


class Ownership(StrEnum):
    """Who allocates a claim: we do, others do, it mixes both (refused), or its classes do not exist."""

    OURS = "ours"
    OTHERS = "others"
    MIXED = "mixed"
    UNKNOWN = "unknown"


class Stage(StrEnum):
    """How far a member is. Only waiting members need a decision."""

    WAITING = "waiting"  # gated by us, or not gated and without devices
    RELEASED = "released"  # has its devices and no gate of ours: kube-scheduler is about to bind it
    BOUND = "bound"


@dataclass(frozen=True, eq=False)
class Member:
    """A live pod of a gang.

    claims: those we allocate, and allocated ones of others (they bind the pod to nodes).
    absent: names of claims that do not exist yet. mixed: keys of claims that nobody can allocate.
    extended: an extended resource it asks for that stands for managed devices, or "".
    """

    key: str
    pod: Pod
    stage: Stage
    gated: bool
    foreign_gates: tuple[str, ...]
    claims: tuple[ResourceClaim, ...]
    absent: tuple[str, ...]
    ours: bool
    mixed: tuple[str, ...] = ()
    extended: str = ""


@dataclass(frozen=True, eq=False)
class GangState:
    """A gang with its members in rank order. problem: why it cannot be placed as it is written."""

    gang: Gang
    members: tuple[Member, ...]
    terminating: tuple[Pod, ...] = ()
    problem: Reason | None = None

    @property
    def waiting(self) -> tuple[Member, ...]:
        return tuple(m for m in self.members if m.stage is Stage.WAITING)

    @property
    def placed(self) -> tuple[Member, ...]:
        return tuple(m for m in self.members if m.stage is not Stage.WAITING)


@dataclass(frozen=True)
class Owners:
    """of: who allocates a claim. extended: names of extended resources that stand for managed device classes."""

    of: Callable[[ResourceClaim], Ownership]
    extended: frozenset[str] = frozenset()


def find_gangs(snapshot: Snapshot, owners: Owners) -> tuple[GangState, ...]:
    """All gangs that are ours: a member carries our gate, has a claim that we allocate, or asks for managed devices
    as an extended resource (which nobody can serve, and is told so).

    Ordered by priority (highest first), creation time and key.
    """
    groups: dict[str, list[Pod]] = {}
    single: list[Pod] = []
    for pod in snapshot.pods.values():
        group = pod.spec.scheduling_group
        if group is not None and group.pod_group_name:
            groups.setdefault(f"{pod.metadata.namespace}/{group.pod_group_name}", []).append(pod)
        else:
            single.append(pod)
    states: list[GangState] = []
    for key, pods in groups.items():
        podgroup = snapshot.pod_groups.get(key)
        if podgroup is not None and podgroup.spec.scheduling_policy.gang is None:
            single.extend(pods)
        else:
            states.append(_group(key, podgroup, pods, snapshot, owners))
    states += [_single(pod, snapshot, owners) for pod in single if not pod.finished]
    ours = [s for s in states if any(m.gated or m.ours or m.extended for m in s.members)]
    return tuple(sorted(ours, key=lambda s: (-s.gang.priority, s.gang.created, s.gang.key)))


def left_over(state: GangState) -> tuple[ResourceClaim, ...]:
    """Allocated claims that only gated members use: what a placement that was not finished left behind."""
    gated = {m.pod.metadata.name for m in state.waiting if m.gated}
    settled = {c.metadata.key for m in state.members if not m.gated for c in m.claims}
    claims = {
        c.metadata.key: c
        for m in state.waiting
        if m.gated
        for c in m.claims
        if c.status.allocation is not None
        and c.metadata.key not in settled
        and all(r.resource == "pods" and r.name in gated for r in c.status.reserved_for)
    }
    return tuple(claims[key] for key in sorted(claims))


def rank(pod: Pod) -> tuple[int, int, str]:
    """Sort key of a member: its completion index if it has one, then its name."""
    text = pod.metadata.labels.get(COMPLETION_INDEX) or pod.metadata.annotations.get(COMPLETION_INDEX) or ""
    if text.isascii() and text.isdigit() and len(text) < 12:
        return 0, int(text), pod.metadata.name
    return 1, 0, pod.metadata.name


def _group(key: str, podgroup: PodGroup | None, pods: list[Pod], snapshot: Snapshot, owners: Owners) -> GangState:
    live = sorted((p for p in pods if not p.finished and not p.terminating), key=rank)
    namespace, _, name = key.rpartition("/")
    members = tuple(member(p, snapshot, owners) for p in live)
    terminating = tuple(sorted((p for p in pods if p.terminating), key=rank))
    policy = podgroup.spec.scheduling_policy.gang if podgroup else None
    constraints = podgroup.spec.scheduling_constraints if podgroup else None
    topology = constraints.topology[0].key if constraints and constraints.topology else ""
    priority = podgroup.spec.priority if podgroup else None
    gang = Gang(
        key=f"podgroup/{key}",
        namespace=namespace,
        name=name,
        min_count=policy.min_count if policy else len(live),
        priority=priority if priority is not None else max((p.spec.priority for p in live), default=0),
        created=_created(podgroup.metadata.creation_timestamp if podgroup else None, live),
        members=tuple(m.key for m in members),
        # One that is being deleted will be re-created by its owner, whatever its phase.
        finished=sum(1 for p in pods if p.status.phase == "Succeeded" and not p.terminating),
        topology=topology,
    )
    problem = _group_problem(gang, podgroup, live) or _claim_problem(members)
    return GangState(gang, members, terminating, problem)


def _created(stamp: str | None, pods: Iterable[Pod]) -> str:
    return stamp or min((p.metadata.creation_timestamp or "" for p in pods), default="")


def _group_problem(gang: Gang, podgroup: PodGroup | None, pods: list[Pod]) -> Reason | None:
    if podgroup is None:
        text = f"PodGroup {gang.namespace}/{gang.name} does not exist; {len(pods)} pods name it"
        return Reason(ReasonCode.WAITING_FOR_MEMBERS, text, {"pods": len(pods)})
    for what, values in (
        ("priority", {str(p.spec.priority) for p in pods}),
        ("schedulerName", {p.spec.scheduler_name for p in pods}),
        ("preemptionPolicy", {p.spec.preemption_policy for p in pods}),
    ):
        if len(values) > 1:
            shown = ", ".join(sorted(values)[:4])
            text = f"all pods of a PodGroup must have the same {what}, or kube-scheduler refuses it; found {shown}"
            return Reason(ReasonCode.INVALID, text, {"field": what})
    constraints = podgroup.spec.scheduling_constraints
    if constraints is not None and len(constraints.topology) > 1:
        return Reason(ReasonCode.INVALID, "schedulingConstraints may name one topology key", {"field": "topology"})
    return None


def _claim_problem(members: tuple[Member, ...]) -> Reason | None:
    extended = [m for m in members if m.extended and m.stage is not Stage.BOUND]
    if extended:
        text = (
            f"pod {extended[0].key} asks for the extended resource {extended[0].extended}, whose claim kube-scheduler "
            "makes at the last moment and nobody can allocate ahead: use a ResourceClaim, or a node that is not managed"
        )
        return Reason(ReasonCode.INVALID, text, {"resource": extended[0].extended})
    mixed = [key for m in members for key in m.mixed]
    if not mixed:
        return None
    text = f"claim {mixed[0]} asks for devices of managed and of other drivers; no allocator may give both: split it"
    return Reason(ReasonCode.INVALID, text, {"claim": mixed[0]})


def _single(pod: Pod, snapshot: Snapshot, owners: Owners) -> GangState:
    key = pod.metadata.key
    gang = Gang(
        key=f"pod/{key}",
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        min_count=1,
        priority=pod.spec.priority,
        created=_created(pod.metadata.creation_timestamp, ()),
        members=() if pod.terminating else (key,),
    )
    if pod.terminating:
        return GangState(gang, (), (pod,))
    own = (member(pod, snapshot, owners),)
    return GangState(gang, own, (), _claim_problem(own))


def member(pod: Pod, snapshot: Snapshot, owners: Owners) -> Member:
    """A pod with its claims and its stage."""
    namespace = pod.metadata.namespace
    generated = {s.name: s.resource_claim_name for s in pod.status.resource_claim_statuses}
    claims: list[ResourceClaim] = []
    absent: list[str] = []
    mixed: list[str] = []
    ours = False
    for reference in pod.spec.resource_claims:
        name = reference.resource_claim_name or generated.get(reference.name)
        if name is None and reference.name in generated:
            continue  # the template made no claim for this pod
        claim = snapshot.claims.get(f"{namespace}/{name}") if name else None
        if claim is None:
            absent.append(reference.name)
            continue
        ownership = owners.of(claim)
        ours = ours or ownership in (Ownership.OURS, Ownership.MIXED)
        if ownership is Ownership.MIXED:
            mixed.append(claim.metadata.key)
        if ownership is not Ownership.OTHERS or claim.status.allocation is not None:
            claims.append(claim)
    gates = tuple(g.name for g in pod.spec.scheduling_gates)
    gated = PLACEMENT_GATE in gates
    ready = not absent and all(c.status.allocation is not None for c in claims)
    unbound = Stage.RELEASED if ready and not gated else Stage.WAITING
    return Member(
        key=pod.metadata.key,
        pod=pod,
        stage=Stage.BOUND if pod.spec.node_name else unbound,
        gated=gated,
        foreign_gates=tuple(g for g in gates if g != PLACEMENT_GATE),
        claims=tuple(claims),
        absent=tuple(absent),
        ours=ours,
        mixed=tuple(mixed),
        extended=_extended(pod, owners.extended) if owners.extended else "",
    )


def _extended(pod: Pod, names: frozenset[str]) -> str:
    """The first managed extended resource that a container of the pod asks for, or ""."""
    for container in (*pod.spec.containers, *pod.spec.init_containers):
        for name in (*container.resources.requests, *container.resources.limits):
            if name in names:
                return name
    return ""
