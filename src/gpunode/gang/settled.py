"""What is said about a gang whose members all have their place."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from gpunode.gang.board import location
from gpunode.gang.gangs import GangState, Member, Stage
from gpunode.model.core import Pod
from gpunode.model.gang import Config, Reason, ReasonCode, Snapshot
from gpunode.model.meta import Condition
from gpunode.model.names import DECISION_ANNOTATION, PLACED_CONDITION
from gpunode.model.times import parse_time
from gpunode.model.wording import some

# How the reason of a gang starts whose surplus members wait; it is outdated once they do not.
SURPLUS = "runs with "


def afterwards(state: GangState, snapshot: Snapshot, now: datetime, config: Config) -> Reason | None:
    """The reason of a gang in which nobody waits for us: only where the one it shows is not true (any more)."""
    if state.problem is not None and any(m.stage is Stage.RELEASED for m in state.members):
        return state.problem
    overdue = [m for m in state.members if m.stage is Stage.RELEASED and _overdue(m, now, config)]
    if overdue:
        return _unbound(overdue, len(state.members), config)
    shown = _condition(state, snapshot)
    if shown is None:
        # A controller that died before it could tell.
        untrue = any(DECISION_ANNOTATION in m.pod.metadata.annotations for m in state.members)
    else:
        untrue = shown.status != "True" or shown.message.startswith(SURPLUS)
    return placed_reason([m.pod for m in state.members], snapshot) if untrue else None


def _overdue(member: Member, now: datetime, config: Config) -> bool:
    stamps = [
        stamp
        for claim in member.claims
        if claim.status.allocation is not None
        and (stamp := parse_time(claim.status.allocation.allocation_timestamp)) is not None
    ]
    return bool(stamps) and now - max(stamps) > timedelta(seconds=config.release_timeout_s)


def _unbound(overdue: Sequence[Member], members: int, config: Config) -> Reason:
    first = overdue[0].pod
    says = next((c.message for c in first.status.conditions if c.type == "PodScheduled" and c.status != "True"), "")
    text = f"{len(overdue)} of {members} pods have their devices but are not bound after {config.release_timeout_s:g} s"
    text += f"; kube-scheduler about {first.metadata.name}: {says[:300]}" if says else ""
    return Reason(ReasonCode.WAITING_FOR_BINDING, text, {"pods": len(overdue)})


def _condition(state: GangState, snapshot: Snapshot) -> Condition | None:
    kind, _, key = state.gang.key.partition("/")
    owner = snapshot.pod_groups.get(key) if kind == "podgroup" else snapshot.pods.get(key)
    return next((c for c in owner.status.conditions if c.type == PLACED_CONDITION), None) if owner else None


def placed_reason(pods: Sequence[Pod], snapshot: Snapshot) -> Reason:
    """Where a gang is whose live pods all have their place (or need none from us)."""
    if not pods:
        return Reason(ReasonCode.WAITING_FOR_MEMBERS, "has no live pods", {"pods": 0})
    nodes = sorted({n for p in pods if (n := location(p, snapshot))})
    if not nodes:
        text = f"its {len(pods)} pods use no managed devices and carry no placement gate: kube-scheduler places them"
        return Reason(ReasonCode.PLACED, text, {"pods": len(pods)})
    subject = "its 1 pod has its place" if len(pods) == 1 else f"all {len(pods)} pods have their place"
    text = f"{subject} on {some(nodes, more='more nodes')}"
    return Reason(ReasonCode.PLACED, text, {"pods": len(pods), "nodes": len(nodes)})
