"""Reaction to device faults: which running gangs are hit, and what to do about each.

A gang is evicted whole, once, and only when the plan made here places it again on healthy devices; otherwise it
keeps running and the fault is reported. A missing or incomplete pool says nothing about health.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from msgspec.structs import replace

from gpunode.allocate.ask import Failure
from gpunode.allocate.pools import DeviceId, result_id
from gpunode.gang.admit import decision_id, topology_domains
from gpunode.gang.blast import Alarm
from gpunode.gang.board import MAX_GANG_TRIALS, Board
from gpunode.gang.gangs import GangState, Member, Stage, left_over
from gpunode.gang.harm import Fault, find_faults
from gpunode.gang.holders import departing
from gpunode.gang.place import Placed, bundle, place_units
from gpunode.model.core import Affinity, Job, NodeAffinity, Pod
from gpunode.model.gang import Evict, Reason, ReasonCode, Release, Report, Resume, Snapshot
from gpunode.model.grace import NEVER
from gpunode.model.names import (
    DECISION_ANNOTATION,
    EVICT_ON_FAULT_ANNOTATION,
    KUEUE_QUEUE_LABEL,
    RESTART_ANNOTATION,
)
from gpunode.model.resource import NodeSelector, NodeSelectorTerm, ResourceClaim, ResourceClaimStatus
from gpunode.model.times import stamp
from gpunode.model.wording import some

# Jobs that own members, members to be evicted one by one, and members that nobody would re-create.
Owned = tuple[tuple[str, ...], tuple[str, ...], tuple[Pod, ...]]


def resumes(snapshot: Snapshot) -> tuple[Resume, ...]:
    """Restarts to finish: Jobs that an eviction suspended and whose pods are all gone or terminating, and those that
    somebody else resumed meanwhile (JobSet does) and that only keep the record."""
    live = {
        (p.metadata.namespace, owner.uid)
        for p in snapshot.pods.values()
        if not p.finished and not p.terminating and (owner := p.metadata.controller) is not None
    }
    return tuple(
        Resume(key)
        for key in sorted(snapshot.jobs)
        if RESTART_ANNOTATION in (job := snapshot.jobs[key]).metadata.annotations
        and (not job.spec.suspend or (job.metadata.namespace, job.metadata.uid) not in live)
    )


def _restarting(job: Job) -> bool:
    return RESTART_ANNOTATION in job.metadata.annotations and job.spec.suspend


@dataclass(frozen=True)
class Reaction:
    """What to do about a gang's faults. note: what to say of a gang that nothing is done about, so that it goes on as
    any other."""

    action: Evict | Release | Report | None = None
    note: Reason | None = None


def react(board: Board, state: GangState, now: datetime, alarm: Alarm) -> Reaction:
    """What to do about a gang's faults: nothing if it has none, or if it is being stopped already.

    Devices that only gated members hold are simply given back. While the alarm holds, running gangs stay, and so
    does one whose faults are all within the grace that the health policy gives.

    After an Evict the board holds both the old devices and those of the plan, so that no other gang takes them in
    this decision.
    """
    faults = find_faults(state, board.view, board.snapshot, now)
    if not faults or state.terminating:
        return Reaction()
    spare = {id_ for c in left_over(state) for id_ in _held(c)}
    due = tuple(f for f in faults if f.until is None)
    hit = {f.device for f in due}
    if hit and hit <= spare:
        claims = tuple(c.metadata.key for c in left_over(state) if hit & _held(c))
        return Reaction(Release(state.gang.key, claims))
    jobs, _, _ = owners = _owners(state, board.snapshot)
    if any(_restarting(board.snapshot.jobs[key]) for key in jobs):
        return Reaction()
    return Reaction(_restart(board, state, due, alarm, owners)) if due else Reaction(note=_in_grace(faults, state))


def _in_grace(faults: tuple[Fault, ...], state: GangState) -> Reason:
    """The same words for as long as the faults are the same, so that they are told once."""
    first = min(faults, key=lambda f: f.until or NEVER)
    end = first.until or NEVER
    until = "as long as it likes" if end == NEVER else f"until {stamp(end)}"
    text = f"{_describe((first, *(f for f in faults if f is not first)))}; the health policy lets the gang stay {until}"
    facts: dict[str, str | int] = {"devices": len(faults), "pods": len(state.members)}
    return Reason(ReasonCode.FAULT_GRACE, text, facts)


def _restart(board: Board, state: GangState, faults: tuple[Fault, ...], alarm: Alarm, owners: Owned) -> Evict | Report:
    """Evict a gang whole, or say why not."""
    jobs, pods, orphans = owners
    text = _describe(faults)
    facts: dict[str, str | int] = {"devices": len(faults), "pods": len(state.members)}
    blocked = _blocked(state, board.snapshot, jobs, orphans)
    if blocked:
        return Report(state.gang.key, Reason(ReasonCode.DEVICE_FAULT, f"{text}; {blocked}", facts))
    if alarm.holds(f.device for f in faults):
        return Report(state.gang.key, Reason(ReasonCode.FAULT_HELD, f"{text}; {alarm.text}", facts))
    nodes = _plan(board, state)
    if nodes is None:
        text += f"; the gang's {len(state.members)} pods do not fit anywhere without it, so it is left running"
        return Report(state.gang.key, Reason(ReasonCode.FAULT_NO_ROOM, text, facts))
    text += f"; restarting all {len(state.members)} pods, with room on {some(sorted(set(nodes)))}"
    uids = {m.key: m.pod.metadata.uid for m in state.members}
    devices = tuple(str(f.device) for f in faults)
    return Evict(
        gang=state.gang.key,
        decision=decision_id(state.gang.key, "evict", *devices, *(f"{k} {uids[k]}" for k in sorted(uids))),
        pods=pods,
        jobs=jobs,
        reason=Reason(ReasonCode.DEVICE_FAULT, text, facts),
        devices=devices,
    )


def _held(claim: ResourceClaim) -> set[DeviceId]:
    allocation = claim.status.allocation
    return {result_id(r) for r in allocation.devices.results} if allocation is not None else set()


def _describe(faults: tuple[Fault, ...]) -> str:
    more = len(faults) - 1
    rest = "1 more device is faulty" if more == 1 else f"{more} more devices are faulty"
    return f"{faults[0]} and {rest}" if more else str(faults[0])


def _owners(state: GangState, snapshot: Snapshot) -> Owned:
    """Jobs that own members, members to be evicted one by one, and members that nobody would re-create."""
    jobs: set[str] = set()
    pods: list[str] = []
    orphans: list[Pod] = []
    for member in state.members:
        owner = member.pod.metadata.controller
        key = f"{member.pod.metadata.namespace}/{owner.name}" if owner is not None else ""
        job = snapshot.jobs.get(key) if owner is not None and owner.kind == "Job" else None
        if job is not None and owner is not None and job.metadata.uid in ("", owner.uid):
            jobs.add(key)
            continue
        pods.append(member.key)
        if owner is None:
            orphans.append(member.pod)
    return tuple(sorted(jobs)), tuple(sorted(pods)), tuple(orphans)


def _blocked(state: GangState, snapshot: Snapshot, jobs: Iterable[str], orphans: tuple[Pod, ...]) -> str:
    """Why we may not stop this gang ourselves, or ""."""
    for key in jobs:
        if KUEUE_QUEUE_LABEL in snapshot.jobs[key].metadata.labels:
            return f"Job {key} is Kueue's to suspend, so it is left running"
    group = snapshot.pod_groups.get(f"{state.gang.namespace}/{state.gang.name}")
    asked = group is not None and group.metadata.annotations.get(EVICT_ON_FAULT_ANNOTATION) == "true"
    kept = [p for p in orphans if not asked and p.metadata.annotations.get(EVICT_ON_FAULT_ANNOTATION) != "true"]
    if kept:
        name = kept[0].metadata.key
        return f"nobody would re-create pod {name}, so it is left running; {EVICT_ON_FAULT_ANNOTATION}=true evicts it"
    return ""


def _plan(board: Board, state: GangState) -> list[str] | None:
    """Nodes for the gang when its own devices are free except the faulty ones; None if there is no place.

    What terminating pods hold counts as free too: it will be by the time the gang's own pods have ended.

    Placing keeps the planned devices on the board; what was taken away is put back beside them.
    """
    leaving_pods, leaving_claims = departing(board.snapshot)
    pods = [*(m.pod for m in state.members), *leaving_pods]
    own = {c.metadata.key: c for m in state.members for c in m.claims}
    claims = list({**own, **{c.metadata.key: c for c in leaving_claims}}.values())
    board.release(pods, claims)
    board.budget = MAX_GANG_TRIALS
    fresh = tuple(_restarted(m) for m in state.members)
    units = bundle(board, fresh)
    placed = None
    if not isinstance(units, Failure):
        domains = topology_domains(board, GangState(state.gang, fresh), units)
        placed = place_units(board, units, domains, {}) if domains else None
    board.occupy(pods, claims)
    return [p.node for p in placed.puts] if isinstance(placed, Placed) else None


def _restarted(member: Member) -> Member:
    """The member as its owner will re-create it: without devices and without the pin we gave it."""
    return Member(
        key=member.key,
        pod=unpinned(member.pod),
        stage=Stage.WAITING,
        gated=True,
        foreign_gates=(),
        claims=tuple(_unallocated(c) for c in member.claims),
        absent=(),
        ours=member.ours,
    )


def _unallocated(claim: ResourceClaim) -> ResourceClaim:
    return replace(claim, status=ResourceClaimStatus())


def unpinned(pod: Pod) -> Pod:
    """The pod without the node pin of our own decision; other pods as they are."""
    affinity = pod.spec.affinity.node_affinity if pod.spec.affinity else None
    if DECISION_ANNOTATION not in pod.metadata.annotations or affinity is None or affinity.required is None:
        return pod
    terms = tuple(t for t in map(_without_pin, affinity.required.node_selector_terms) if t is not None)
    required = NodeSelector(node_selector_terms=terms) if terms else None
    return replace(pod, spec=replace(pod.spec, affinity=Affinity(node_affinity=NodeAffinity(required=required))))


def _without_pin(term: NodeSelectorTerm) -> NodeSelectorTerm | None:
    """A term without its last `metadata.name In [one]`, which is where the controller adds it; None if empty."""
    fields = list(term.match_fields)
    for position in range(len(fields) - 1, -1, -1):
        if fields[position].key == "metadata.name" and len(fields[position].values) == 1:
            del fields[position]
            break
    return replace(term, match_fields=tuple(fields)) if fields or term.match_expressions else None
