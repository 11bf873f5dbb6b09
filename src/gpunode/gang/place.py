"""Placing whole gangs: necessary counts first, then a portfolio of greedy orders, then a bounded exact search.

Units are taken in decreasing size, because for sizes in a divisibility chain (1, 2, 4, 8 devices) every greedy in
that order is exact; the bounded search is for the rest. All bounds are counts of work, so that plans repeat.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Final

from gpunode.allocate.allocator import alternatives_key
from gpunode.allocate.ask import Failure
from gpunode.allocate.nodefit import Misfit
from gpunode.gang.board import Board, Choice, Put, Refusal, Unit
from gpunode.gang.gangs import Member

# Greedy runs for one gang, over all its domains, alternatives and orders.
MAX_RUNS: Final = 512
# Bounds of the exact search: placements tried for one gang, nodes and units it is used for.
MAX_TRIES: Final = 3_000
MAX_EXACT_NODES: Final = 64
MAX_EXACT_UNITS: Final = 64
# Combinations of firstAvailable alternatives tried for one gang.
MAX_CHOICES: Final = 64


@dataclass(frozen=True, eq=False)
class NoPlace:
    """Why units found no place. proved: no arrangement exists, as opposed to none found within the bounds.

    failure: set where a claim can never be served as it is written.
    """

    proved: bool
    failure: Failure | None = None


@dataclass(frozen=True, eq=False)
class Placed:
    """Where all units went, with which alternatives, and inside which set of nodes."""

    puts: tuple[Put, ...]
    choice: Choice
    nodes: tuple[str, ...]


@dataclass
class Effort:
    """What is left of the bounds on one attempt: greedy runs, and placements tried by the exact search."""

    runs: int = MAX_RUNS
    tries: int = MAX_TRIES


def bundle(board: Board, members: Sequence[Member]) -> tuple[Unit, ...] | Failure:
    """Members as units, in the order of their first member: pods that share a claim stay together."""
    owner: dict[str, int] = {}
    parent = list(range(len(members)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i, member in enumerate(members):
        for claim in member.claims:
            first = owner.setdefault(claim.metadata.key, i)
            low, high = sorted((find(first), find(i)))
            parent[high] = low
    groups: dict[int, list[Member]] = {}
    for i, member in enumerate(members):
        groups.setdefault(find(i), []).append(member)
    units: list[Unit] = []
    for group in groups.values():
        unit = board.unit(tuple(group))
        if isinstance(unit, Failure):
            return unit
        units.append(unit)
    return tuple(units)


def place_units(
    board: Board, units: Sequence[Unit], domains: Sequence[tuple[str, ...]], fixed: Choice
) -> Placed | NoPlace:
    """Place all units inside one domain, all with the same alternatives, or change nothing.

    domains: sets of nodes, any one of which will do, preferred first. fixed: alternatives that are settled.
    """
    effort = Effort()
    proved = True
    for choice in choices(units, fixed):
        for nodes in domains:
            answer = _solve(board, units, nodes, choice, effort)
            if not isinstance(answer, NoPlace):
                return Placed(answer, choice, nodes)
            if answer.failure is not None:
                return answer
            proved = proved and answer.proved
    return NoPlace(proved and not board.exhausted)


def choices(units: Sequence[Unit], fixed: Choice) -> Iterator[Choice]:
    """Every way to settle the firstAvailable requests of a gang, preferred first."""
    keys: dict[tuple[str, ...], int] = {}
    for unit in units:
        for request in unit.ask.requests if unit.ask is not None else ():
            if len(request) > 1:
                keys.setdefault(alternatives_key(request), len(request))
    spans = [(fixed[key],) if key in fixed else range(count) for key, count in keys.items()]
    for number, combination in enumerate(product(*spans)):
        if number >= MAX_CHOICES:
            return
        yield dict(zip(keys, combination, strict=True))


def settled(members: Sequence[Member], units: Sequence[Unit]) -> Choice:
    """Alternatives that members with allocated claims already use: the rest of the gang must follow."""
    names = {
        result.request
        for member in members
        for claim in member.claims
        if claim.status.allocation is not None
        for result in claim.status.allocation.devices.results
        if "/" in result.request
    }
    fixed: dict[tuple[str, ...], int] = {}
    for unit in units:
        for request in unit.ask.requests if unit.ask is not None and names else ():
            key = alternatives_key(request)
            used = [i for i, name in enumerate(key) if name in names]
            if used:
                fixed[key] = used[0]
    return fixed


def _solve(
    board: Board, units: Sequence[Unit], nodes: tuple[str, ...], choice: Choice, effort: Effort
) -> tuple[Put, ...] | NoPlace:
    """Place all units on these nodes, or leave the board as it was."""
    groups = _groups(units)
    options: list[tuple[str, ...]] = []
    for group in groups:
        fitting = board.fitting(group[0], nodes, choice)
        if isinstance(fitting, Failure):
            return NoPlace(True, fitting)
        if not fitting:
            return NoPlace(True)
        options.append(fitting)
    for order in (_compact, _best_fit, _worst_fit):
        effort.runs -= 1
        if effort.runs < 0:
            return NoPlace(False)
        mark = board.mark()
        puts = _greedy(board, groups, options, choice, order)
        if puts is not None:
            return puts
        board.undo(mark)
        if len(groups) == 1:
            # Equal units fill every node as far as it goes: a failure is a proof.
            return NoPlace(True)
    if len(nodes) > MAX_EXACT_NODES or len(units) > MAX_EXACT_UNITS:
        return NoPlace(False)
    search = _Exact(board, [unit for group in groups for unit in group], nodes, choice, effort)
    return tuple(search.puts) if search.run(0, 0) else NoPlace(effort.tries > 0)


def _groups(units: Sequence[Unit]) -> list[list[Unit]]:
    """Equal units together, largest first; inside a group the order of rank is kept."""
    first: dict[int, int] = {}
    for position, unit in enumerate(units):
        first.setdefault(id(unit.shape), position)
    ordered = sorted(units, key=lambda u: (-u.shape.size, -_weight(u), first[id(u.shape)]))
    return [list(group) for _, group in groupby(ordered, key=lambda u: id(u.shape))]


def _weight(unit: Unit) -> int:
    return sum(value for needs in unit.shape.needs for name, value in needs.requests if name == "cpu")


Order = Callable[[Board, list[Unit], Sequence[str], set[str]], Iterator[str]]


def _greedy(
    board: Board, groups: list[list[Unit]], options: Sequence[tuple[str, ...]], choice: Choice, order: Order
) -> tuple[Put, ...] | None:
    puts: list[Put] = []
    used: set[str] = set()
    for number, group in enumerate(groups):
        todo = list(reversed(group))
        for node in order(board, todo, options[number], used):
            answer = board.put(todo[-1], node, choice)
            if isinstance(answer, Misfit | Failure):
                continue
            puts.append(answer)
            used.add(node)
            todo.pop()
            if not todo:
                break
        if todo:
            return None
    return tuple(puts)


def _compact(board: Board, todo: list[Unit], nodes: Sequence[str], used: set[str]) -> Iterator[str]:
    """Fewest nodes: those the gang is on first, then the smallest that holds the rest, else the largest."""
    unit = todo[-1]
    free = {node: board.free(unit, node) for node in nodes}
    mine = sorted((n for n in nodes if n in used), key=lambda n: (free[n], n))
    rest = sorted((n for n in nodes if n not in used), key=lambda n: (free[n], n))
    for node in mine:
        yield from _while_it_fits(todo, node)
    while rest and todo:
        wanted = len(todo) * unit.shape.size
        # First of those that hold all the rest; the last one is the largest.
        index = next((i for i, n in enumerate(rest) if free[n] >= wanted), None) if free[rest[-1]] >= wanted else None
        if index is None:
            largest = free[rest[-1]]
            index = next(i for i, n in enumerate(rest) if free[n] == largest)
        yield from _while_it_fits(todo, rest.pop(index))


def _while_it_fits(todo: list[Unit], node: str) -> Iterator[str]:
    """Offer a node again as long as the consumer takes it."""
    before = -1
    while todo and len(todo) != before:
        before = len(todo)
        yield node


def _best_fit(board: Board, todo: list[Unit], nodes: Sequence[str], used: set[str]) -> Iterator[str]:
    """The fullest node that takes it."""
    free = {node: board.free(todo[-1], node) for node in nodes}
    for node in sorted(nodes, key=lambda n: (free[n], n not in used, n)):
        yield from _while_it_fits(todo, node)


def _worst_fit(board: Board, todo: list[Unit], nodes: Sequence[str], used: set[str]) -> Iterator[str]:
    """The emptiest node, one unit at a time."""
    heap = [(-board.free(todo[-1], node), node) for node in nodes]
    heapq.heapify(heap)
    while heap and todo:
        _, node = heapq.heappop(heap)
        before = len(todo)
        yield node
        if todo and len(todo) < before:
            heapq.heappush(heap, (-board.free(todo[-1], node), node))


class _Exact:
    """Depth-first search over nodes; equal units only go to nodes in one direction, to try each set once."""

    def __init__(self, board: Board, units: list[Unit], nodes: Sequence[str], choice: Choice, effort: Effort) -> None:
        self._board, self._units, self._nodes, self._choice = board, units, nodes, choice
        self._effort = effort
        self.puts: list[Put] = []

    def run(self, number: int, start: int) -> bool:
        if number == len(self._units):
            return True
        unit = self._units[number]
        follows = number + 1 < len(self._units) and self._units[number + 1].shape is unit.shape
        for index in range(start, len(self._nodes)):
            if self._effort.tries <= 0:
                return False
            self._effort.tries -= 1
            mark = self._board.mark()
            answer: Put | Refusal = self._board.put(unit, self._nodes[index], self._choice)
            if isinstance(answer, Misfit | Failure):
                continue
            self.puts.append(answer)
            if self.run(number + 1, index if follows else 0):
                return True
            self.puts.pop()
            self._board.undo(mark)
        return False
