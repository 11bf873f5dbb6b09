"""One gang's turn: place it, or say why it waits."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from gpunode.allocate.allocator import allocations
from gpunode.allocate.ask import Failure
from gpunode.gang import reasons
from gpunode.gang.board import MAX_GANG_TRIALS, Board, Choice, Put, Unit, location
from gpunode.gang.gangs import GangState, Member, left_over
from gpunode.gang.place import NoPlace, Placed, bundle, place_units, settled
from gpunode.gang.settled import SURPLUS
from gpunode.model.gang import Assignment, ClaimAllocation, Place, Reason, ReasonCode, Release
from gpunode.model.names import GANG_NAMESPACE_LABEL, GANG_NAMESPACE_VALUE
from gpunode.model.resource import Allocation


@dataclass(frozen=True)
class Outcome:
    """What became of a gang in this decision; all None for a gang that needs nothing."""

    place: Place | None = None
    release: Release | None = None
    reason: Reason | None = None


def admit(board: Board, state: GangState, now: datetime) -> Outcome:
    """Place the waiting members of a gang on the board, or leave the board as it was and give the reason.

    At least minCount members (placed and succeeded ones counted) get a place together or none does. Members
    beyond minCount that have no place lose only their gate. What an unfinished placement left allocated is
    completed, or taken back where that is impossible.
    """
    needed = max(state.gang.min_count - state.gang.finished - len(state.placed), 0)
    obstacle = _obstacle(state, needed) if state.waiting else None
    if obstacle is not None:
        return Outcome(reason=obstacle)
    waiting = tuple(m for m in state.waiting if not m.foreign_gates and not m.absent)
    if not waiting:
        return Outcome()
    board.budget = MAX_GANG_TRIALS
    units = bundle(board, waiting)
    if isinstance(units, Failure):
        return Outcome(reason=reasons.refused(units))
    # What a crash left allocated is kept and comes first.
    units = tuple(sorted(units, key=lambda u: not u.shape.within))
    fixed = settled(state.members, units)
    domains = topology_domains(board, state, units)
    if not domains:
        key = state.gang.topology
        text = f"no node carries the topology label {key} that the gang's members must share"
        return Outcome(reason=Reason(ReasonCode.NODE_FIT, text, {"topology": key}))
    placed = _core(board, units, needed, domains, fixed)
    if isinstance(placed, NoPlace):
        reason = _shortage(board, state, units, domains, placed)
        if not needed:
            return _outcome(board, state, (), units, _surplus(state, reason), now)
        claims = tuple(c.metadata.key for c in left_over(state))
        return Outcome(release=Release(state.gang.key, claims) if claims else None, reason=_lost(state, reason))
    left = _remaining(units, placed.puts)
    if not left:
        return _outcome(board, state, placed.puts, (), None, now)
    short = _shortage(board, state, left, domains, NoPlace(True))
    fresh = sum(len(put.unit.members) for put in placed.puts)
    return _outcome(board, state, placed.puts, left, _surplus(state, short, fresh), now)


def _obstacle(state: GangState, needed: int) -> Reason | None:
    """What keeps a gang from being considered at all; a gang that runs is not kept by surplus members."""
    gang = state.gang
    if state.problem is not None:
        return state.problem
    foreign = [m for m in state.waiting if m.foreign_gates]
    missing_gate = gang.min_count - gang.finished - (len(state.members) - len(foreign))
    if foreign and missing_gate > 0:
        gates = sorted({g for m in foreign for g in m.foreign_gates})
        text = (
            f"{len(foreign)} of {len(state.members)} pods still carry the scheduling gate {', '.join(gates)} of others"
        )
        return Reason(ReasonCode.FOREIGN_GATE, text, {"pods": len(foreign)})
    have = len(state.members) + gang.finished
    if have < gang.min_count:
        text = f"has {have} of the {gang.min_count} pods it must start with"
        if state.terminating:
            text += f" ({len(state.terminating)} old pods are terminating)"
        return Reason(ReasonCode.WAITING_FOR_MEMBERS, text, {"have": have, "need": gang.min_count})
    absent = [m for m in state.waiting if m.absent]
    if absent and needed:
        text = (
            f"{len(absent)} of {len(state.members)} pods have no ResourceClaim yet, "
            f"first {absent[0].pod.metadata.name} for {absent[0].absent[0]}"
        )
        return Reason(ReasonCode.WAITING_FOR_CLAIMS, text, {"pods": len(absent)})
    return None


def topology_domains(board: Board, state: GangState, units: Sequence[Unit]) -> tuple[tuple[str, ...], ...]:
    """Node sets of which the gang must use exactly one, tightest first; one set of all nodes without a constraint."""
    key = state.gang.topology
    nodes = board.snapshot.nodes
    if not key:
        return (board.nodes,)
    groups: dict[str, list[str]] = {}
    for name in board.nodes:
        value = nodes[name].metadata.labels.get(key)
        if value is not None:
            groups.setdefault(value, []).append(name)
    settled_nodes = {n for m in state.placed if (n := location(m.pod, board.snapshot)) in nodes}
    values = {nodes[n].metadata.labels.get(key) for n in settled_nodes}
    chosen = [v for v in groups if not values or v in values]
    lead = max(units, key=lambda u: u.shape.size)
    free = {v: sum(board.free(lead, n) for n in groups[v]) for v in chosen}
    return tuple(tuple(groups[v]) for v in sorted(chosen, key=lambda v: (free[v], v)))


def _core(
    board: Board, units: Sequence[Unit], needed: int, domains: Sequence[tuple[str, ...]], fixed: Choice
) -> Placed | NoPlace:
    """All units; failing that, the first that make up `needed` members and then whatever else fits."""
    whole = place_units(board, units, domains, fixed)
    if isinstance(whole, Placed) or (whole.failure is not None and needed):
        return whole
    core: list[Unit] = []
    count = 0
    for unit in units:
        if count >= needed:
            break
        core.append(unit)
        count += len(unit.members)
    if len(core) == len(units):
        return whole
    first = place_units(board, core, domains, fixed) if core else Placed((), fixed, ())
    if isinstance(first, NoPlace):
        return first
    puts = list(first.puts)
    choice, allowed = dict(first.choice), [first.nodes] if first.nodes else domains
    for unit in units[len(core) :]:
        more = place_units(board, (unit,), allowed, choice)
        if isinstance(more, Placed):
            puts.extend(more.puts)
            choice.update(more.choice)
            allowed = [more.nodes]
    return Placed(tuple(puts), choice, first.nodes) if puts else NoPlace(whole.proved)


def _shortage(
    board: Board, state: GangState, units: Sequence[Unit], domains: Sequence[tuple[str, ...]], answer: NoPlace
) -> Reason:
    """The reason; found once for all gangs that ask for the same and find the same cluster."""
    if answer.failure is not None:
        return reasons.refused(answer.failure)
    key = (tuple(id(u.shape) for u in units), domains, answer.proved)
    known = board.reasons.get(key)
    if known is not None and known[0] == board.state:
        return known[1]
    reason = reasons.shortage(board, state.gang.topology, units, domains, answer.proved)
    board.reasons[key] = (board.state, reason)
    return reason


def _remaining(units: Sequence[Unit], puts: Sequence[Put]) -> tuple[Unit, ...]:
    done = {id(p.unit) for p in puts}
    return tuple(u for u in units if id(u) not in done)


def _lost(state: GangState, reason: Reason) -> Reason:
    """A gang that has started and is below minCount says so first."""
    if not state.placed:
        return reason
    text = f"only {len(state.placed)} of the {state.gang.min_count} pods it needs have their place; {reason.text}"
    return Reason(reason.code, text, {**reason.facts, "running": len(state.placed)})


def _surplus(state: GangState, reason: Reason, fresh: int = 0) -> Reason:
    """The gang runs; only members beyond minCount wait."""
    running = len(state.placed) + fresh
    text = f"{SURPLUS}{running} pods (minCount {state.gang.min_count}); the others wait: {reason.text}"
    return Reason(ReasonCode.PLACED, text, {**reason.facts, "running": running})


def _outcome(
    board: Board, state: GangState, puts: Sequence[Put], left: Sequence[Unit], reason: Reason | None, now: datetime
) -> Outcome:
    namespaces = board.snapshot.gang_namespaces
    stragglers = tuple(m.key for u in left for m in u.members if m.gated)
    order = {m.key: n for n, m in enumerate(state.members)}
    assignments = tuple(sorted((a for p in puts for a in _assignments(p, now)), key=lambda a: order[a.pod]))
    if not assignments and not stragglers:
        return Outcome(reason=reason)
    uids = {m.key: m.pod.metadata.uid for m in state.members}
    decision = decision_id(
        state.gang.key,
        *(f"{a.pod} {uids[a.pod]} {a.node} {_devices(a)}" for a in assignments),
        *(f"{pod} {uids[pod]}" for pod in stragglers),
    )
    loose = [m for m in state.waiting if not m.gated and any(a.pod == m.key for a in assignments)]
    if reason is None and loose and state.gang.namespace not in namespaces:
        reason = _unpinned(state, loose)
    return Outcome(place=Place(state.gang.key, decision, assignments, stragglers), reason=reason)


def _unpinned(state: GangState, loose: Sequence[Member]) -> Reason:
    """Pods that came without a gate cannot be pinned: kube-scheduler may drop their allocation and wait again."""
    text = (
        f"{len(loose)} of {len(state.members)} pods got devices but no pin to their node: namespace "
        f"{state.gang.namespace} lacks the label {GANG_NAMESPACE_LABEL}={GANG_NAMESPACE_VALUE}"
    )
    return Reason(ReasonCode.PLACED, text, {"pods": len(loose)})


def _assignments(put: Put, now: datetime) -> list[Assignment]:
    ask = put.unit.ask
    written: dict[str, Allocation] = {}
    if ask is not None:
        made = allocations(ask, put.picks, put.node, now)
        written = {c.metadata.key: a for c, a in zip(ask.claims, made, strict=True)}
    return [Assignment(m.key, put.node, _claims(m, written), m.pod.metadata.uid) for m in put.unit.members]


def _claims(member: Member, written: dict[str, Allocation]) -> tuple[ClaimAllocation, ...]:
    keys = (c.metadata.key for c in member.claims)
    return tuple(ClaimAllocation(key, written[key]) for key in keys if key in written)


def _devices(assignment: Assignment) -> str:
    return " ".join(
        f"{c.claim}={','.join(f'{r.driver}/{r.pool}/{r.device}' for r in c.allocation.devices.results)}"
        for c in assignment.claims
    )


def decision_id(*parts: str) -> str:
    """12 hex digits that depend only on what was decided."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
