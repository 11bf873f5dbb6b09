"""Why a gang has no place, in one sentence with the numbers that a person needs to check it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from gpunode.allocate.allocator import blocking_taint
from gpunode.allocate.ask import Failure, FailureKind
from gpunode.allocate.cel import SelectorError
from gpunode.allocate.nodefit import Misfit
from gpunode.allocate.pools import DeviceId, PoolDevice
from gpunode.gang.board import Board, Unit
from gpunode.model.gang import Reason, ReasonCode

K = TypeVar("K")

_CODES: Mapping[FailureKind, ReasonCode] = {
    FailureKind.NO_SUCH_CLASS: ReasonCode.NO_SUCH_CLASS,
    FailureKind.SELECTOR: ReasonCode.SELECTOR_ERROR,
    FailureKind.INVALID: ReasonCode.INVALID,
}


def refused(failure: Failure) -> Reason:
    """A claim that nothing can serve until it, or its class, changes."""
    where = f"claim {failure.claim}" if failure.claim else ""
    where += f", request {failure.request}" if failure.request else ""
    text = f"{where}: {failure.text}" if where else failure.text
    return Reason(_CODES.get(failure.kind, ReasonCode.WAITING_FOR_DEVICES), text, {})


@dataclass
class _Survey:
    """Counts over the nodes that were candidates for one unit."""

    nodes: int = 0
    matching: int = 0  # devices that meet the selectors
    unmanaged: int = 0  # of those, not under the managed taint
    most: int = 0  # largest number of matching devices on one node
    capable: int = 0  # nodes with enough matching devices, in use or not
    enough: int = 0  # nodes with enough free ones
    fit: int = 0  # nodes that take the unit now
    released: int = 0  # further nodes with enough once terminating pods are gone
    held: Counter[str] = field(default_factory=Counter)
    leaving: Counter[str] = field(default_factory=Counter)
    tainted: Counter[tuple[str, str]] = field(default_factory=Counter)
    misfits: Counter[str] = field(default_factory=Counter)
    incomplete: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    refusal: str = ""


def shortage(
    board: Board, topology: str, units: Sequence[Unit], domains: Sequence[tuple[str, ...]], proved: bool
) -> Reason:
    """Why these units cannot all be placed on the board as it is."""
    lead = max(units, key=lambda u: u.shape.size)
    survey = _survey(board, lead, [n for nodes in domains for n in nodes])
    pods = sum(len(u.members) for u in units)
    facts: dict[str, str | int] = {
        "pods": pods, "devices": lead.shape.size, "nodes": survey.nodes, "fit": survey.fit, "enough": survey.enough,
    }  # fmt: skip
    code, text = _sentence(board, topology, units, lead, survey, domains, proved)
    return Reason(code, text, facts)


def _survey(board: Board, unit: Unit, nodes: Sequence[str]) -> _Survey:
    survey = _Survey(nodes=len(nodes))
    owners = board.holders()
    for node in nodes:
        refusal = board.refusal(unit, node, {})
        if refusal is None:
            survey.fit += 1
        static = board.static(unit, node)
        if static is not None:
            survey.misfits[static.text] += 1
            continue
        if isinstance(refusal, Misfit):
            survey.misfits[refusal.text] += 1
        elif refusal is not None and not survey.refusal:
            survey.refusal = refusal.text
        survey.incomplete.extend(board.view.nodes[node].incomplete)
        survey.invalid.extend(board.view.nodes[node].invalid)
        if unit.ask is not None:
            _survey_devices(board, unit, node, survey, owners)
    return survey


def _survey_devices(
    board: Board, unit: Unit, node: str, survey: _Survey, owners: Mapping[DeviceId, tuple[str, bool]]
) -> None:
    try:
        found = board.match(unit, node).found
    except SelectorError:
        return
    devices = board.view.nodes[node].devices
    matching = sorted({p for positions in found.matching for p in positions})
    usable = {p for positions in found.usable for p in positions}
    free = leaving = 0
    for position in matching:
        device = devices[position]
        if not device.managed:
            survey.unmanaged += 1
        elif position not in usable:
            survey.tainted[_taint(device, unit), node] += 1
        elif device.id in board.usage.held:
            label, gone = owners.get(device.id, ("this decision", False))
            (survey.leaving if gone else survey.held)[label] += 1
            leaving += gone
        else:
            free += 1
    size = unit.shape.size
    survey.matching += len(matching)
    survey.most = max(survey.most, len(matching))
    survey.capable += len(matching) >= size
    survey.enough += free >= size
    survey.released += free < size <= free + leaving


def _taint(device: PoolDevice, unit: Unit) -> str:
    tolerations = tuple(t for want in (unit.ask.wants if unit.ask else ()) for t in want.tolerations)
    taint = blocking_taint(device, tolerations) or device.taints[0]
    return f"{taint.key}={taint.value}" if taint.value else taint.key


def _sentence(
    board: Board,
    topology: str,
    units: Sequence[Unit],
    lead: Unit,
    survey: _Survey,
    domains: Sequence[tuple[str, ...]],
    proved: bool,
) -> tuple[ReasonCode, str]:
    word = _word(board)
    size = lead.shape.size
    one = word[:-1] if size == 1 else word
    need = _need(units, lead, word, topology)
    details = _details(survey)
    shown = f" ({', '.join(details)})" if details else ""
    if lead.ask is None:
        text = f"{need}; {survey.fit} of {survey.nodes} nodes take one{shown}"
        return ReasonCode.NODE_FIT, text + _verdict(board, topology, lead, units, survey, domains, proved)
    if survey.matching == 0 and not survey.misfits and not survey.incomplete and not survey.invalid:
        return ReasonCode.NO_MATCHING_DEVICES, f"{need}; no published device on {survey.nodes} nodes matches{shown}"
    if survey.unmanaged and survey.unmanaged == survey.matching:
        text = f"{need}; {survey.matching} devices match but none carries the managed taint yet{shown}"
        return ReasonCode.WAITING_FOR_TAINT, text
    if survey.capable == 0 and not survey.misfits and not survey.incomplete and not survey.invalid:
        text = f"{need}; no node has {size} matching {one}, the most is {survey.most}{shown}"
        return ReasonCode.NO_MATCHING_DEVICES, text
    text = f"{need}; {survey.enough} of {survey.nodes} nodes have {size} free matching {one}{shown}"
    text += _verdict(board, topology, lead, units, survey, domains, proved)
    if survey.enough and survey.fit == 0 and survey.misfits:
        return ReasonCode.NODE_FIT, text
    if survey.released and survey.fit + survey.released >= len(units):
        return ReasonCode.WAITING_FOR_RELEASE, text
    return ReasonCode.WAITING_FOR_DEVICES, text


def _word(board: Board) -> str:
    drivers = {driver for driver, _ in board.view.pools}
    return "GPUs" if drivers and all(d.startswith("gpu.") for d in drivers) else "devices"


def _need(units: Sequence[Unit], lead: Unit, word: str, topology: str) -> str:
    sizes = Counter((u.shape.size, len(u.members)) for u in units)
    parts = [
        f"{_pods(count * members)} × {_count(size, word)}"
        if members == 1
        else f"{_pods(count * members)} sharing {_count(size, word)}"
        for (size, members), count in sorted(sizes.items(), reverse=True)
        if size
    ] or [_pods(sum(len(u.members) for u in units))]
    constraints = lead.ask.constraints if lead.ask is not None else ()
    together = [c.attribute.rpartition("/")[2] for c in constraints if not c.distinct]
    text = "needs " + " + ".join(parts)
    if together:
        text += f" on one {together[0]} each"
    return f"{text} in one {topology}" if topology else text


def _pods(count: int) -> str:
    return _count(count, "pods")


def _details(survey: _Survey) -> list[str]:
    parts = [f"{count} held by {label}" for label, count in _top(survey.held)]
    parts += [f"{count} held by terminating {label}" for label, count in _top(survey.leaving)]
    parts += [f"{count} tainted {taint} on {node}" for (taint, node), count in _top(survey.tainted)]
    if survey.unmanaged and survey.unmanaged < survey.matching:
        parts.append(f"{survey.unmanaged} without the managed taint")
    parts += [f"{_count(count, 'nodes')} {text}" for text, count in _top(survey.misfits)]
    if survey.incomplete:
        pools = sorted(set(survey.incomplete))
        parts.append(f"{_count(len(pools), 'pools')} being updated, first {pools[0]}")
    if survey.invalid:
        parts.append(f"invalid pool {sorted(set(survey.invalid))[0]}")
    return parts


def _top(counts: Counter[K], limit: int = 3) -> list[tuple[K, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))[:limit]


def _verdict(
    board: Board,
    topology: str,
    lead: Unit,
    units: Sequence[Unit],
    survey: _Survey,
    domains: Sequence[tuple[str, ...]],
    proved: bool,
) -> str:
    """What the plain count does not show."""
    size = max(lead.shape.size, 1)
    leads = sum(1 for u in units if u.shape is lead.shape)
    if topology and lead.ask is not None:
        best = max(domains, key=lambda nodes: sum(board.free(lead, n) // size for n in nodes))
        value = board.snapshot.nodes[best[0]].metadata.labels.get(topology, "")
        room = sum(board.free(lead, n) // size for n in best)
        if room < leads:
            return f"; the best {topology}, {value}, has room for {room} of {leads} such pods"
    if survey.refusal and survey.fit == 0 and survey.enough:
        return f"; {survey.refusal}"
    room = sum(board.free(lead, n) // size for nodes in domains for n in nodes) if lead.ask is not None else 0
    if room >= leads and survey.fit:
        return "; no arrangement of all pods exists" if proved else "; no arrangement was found within the search bound"
    return ""


def _count(number: int, plural: str) -> str:
    """`1 node`, `2 nodes`: for words that take an s."""
    return f"{number} {plural[:-1] if number == 1 else plural}"
