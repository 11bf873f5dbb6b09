"""The DRA allocator as a pure function: which devices of one node serve a set of claims.

Follows k8s.io/dynamic-resource-allocation/structured (incubating, v1.37): first fit in pool, slice and
device order with backtracking. It finds devices exactly where that one does (tests/oracle compares them), but chooses
among them: from the matchAttribute value, or else from the NVLink domain and NUMA node, with the fewest free devices
that suffice, so that whole groups stay whole; and interchangeable devices are tried once. The search is bounded by
a count of device trials, so that a plan repeats on any machine. Known differences:
* a selector that fails on any device fails the claim, there only if the search gets to that device;
* a request for all devices that breaks a constraint is tried with other choices first, there it ends the search;
* administrative access uses up no counters (there it does until it is written, then no more);
* a pool counts as incomplete or invalid for all its slices together, there for those that reach the node.
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from msgspec.structs import replace

from gpunode.allocate.ask import MAX_RESULTS, Ask, Failure, FailureKind, Want, build_ask
from gpunode.allocate.capacity import consumption, holds
from gpunode.allocate.cel import SelectorError, Selectors
from gpunode.allocate.pools import NodeDevices, PoolDevice
from gpunode.allocate.selectors import node_selector
from gpunode.allocate.usage import Usage
from gpunode.model.names import MANAGED_TAINT
from gpunode.model.resource import (
    AllocatedConfig,
    AllocatedDevices,
    Allocation,
    AllocationResult,
    DeviceClass,
    DeviceTaint,
    DeviceToleration,
    ResourceClaim,
)
from gpunode.model.times import stamp

MAX_TRIALS: Final = 20_000
# Namespace of the deterministic share IDs.
_SHARES: Final = uuid.UUID("6f1d6a0e-5d0c-5b0b-9a38-2c7c0a2c9d11")


@dataclass(frozen=True, eq=False, slots=True)
class Pick:
    """One device for one want; position is its index in the node's devices, consumed its share (or None: whole)."""

    want: Want
    position: int
    device: PoolDevice
    consumed: dict[str, str] | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Candidates:
    """Devices of one node that match each want, by want index: positions, whatever is in use.

    usable: not tainted and under the managed taint. matching: all that meet the selectors.
    consumed: share of a shareable device, by (want index, position).
    """

    usable: tuple[tuple[int, ...], ...]
    matching: tuple[tuple[int, ...], ...]
    consumed: dict[tuple[int, int], dict[str, str]]


def tolerated(taint: DeviceTaint, tolerations: Iterable[DeviceToleration]) -> bool:
    """resource/v1 DeviceToleration.ToleratesTaint for any of them."""
    return any(
        t.effect in ("", taint.effect)
        and t.key in ("", taint.key)
        and (t.operator == "Exists" or (bool(t.key) and t.operator in ("", "Equal") and t.value == taint.value))
        for t in tolerations
    )


def blocking_taint(device: PoolDevice, tolerations: Sequence[DeviceToleration]) -> DeviceTaint | None:
    """First taint that keeps a request off a device; the managed taint never does, we are its owner."""
    for taint in device.taints:
        blocks = taint.effect in ("NoSchedule", "NoExecute") and taint.key != MANAGED_TAINT
        if blocks and not tolerated(taint, tolerations):
            return taint
    return None


def candidates(ask: Ask, devices: NodeDevices, selectors: Selectors) -> Candidates:
    """Match every want against every device of a node. Raises SelectorError."""
    usable: list[tuple[int, ...]] = []
    matching: list[tuple[int, ...]] = []
    consumed: dict[tuple[int, int], dict[str, str]] = {}
    for want in ask.wants:
        match: list[int] = []
        for position, device in enumerate(devices.devices):
            if not all(selectors.matches(e, device.id.driver, device.device) for e in want.expressions):
                continue
            if device.device.allow_multiple_allocations:
                share = consumption(device.device, want.capacity)
                if share is None:
                    continue
                consumed[want.index, position] = share
            elif want.capacity and not holds(device.device, want.capacity):
                continue
            match.append(position)
        matching.append(tuple(match))
        usable.append(tuple(
            p for p in match
            if devices.devices[p].managed and blocking_taint(devices.devices[p], want.tolerations) is None
        ))  # fmt: skip
    return Candidates(tuple(usable), tuple(matching), consumed)


class _Search:
    """One bounded depth-first search; works on `usage` and leaves it as it was, unless it succeeds."""

    def __init__(
        self, ask: Ask, devices: NodeDevices, found: Candidates, usage: Usage, choice: Mapping[tuple[str, ...], int]
    ) -> None:
        self._ask, self._devices, self._found, self._usage = ask, devices, found, usage
        self._choice = choice
        self._values: list[list[object]] = [[] for _ in ask.constraints]
        self._looks: dict[int, object] = {}
        self._admin = any(w.admin for w in ask.wants)
        # Devices that are not shareable, by the claims of this ask that have them: (position, claim).
        self._taken: set[tuple[int, int]] = set()
        self._results = [0] * len(ask.claims)
        self.picks: list[Pick] = []
        self.trials = 0
        self.failure: tuple[int, Failure] | None = None

    def start(self) -> bool:
        """Search, unless some request has too few free devices even on its own."""
        for number, request in enumerate(self._ask.requests):
            for want in request:
                if want.count == 0 and not self._known(want, number):
                    return False
        for number in range(1, len(self._ask.requests)):
            if not any(self._enough(want, number) for want in self._alternatives(number)):
                return False
        return self.run(0)

    def _enough(self, want: Want, number: int) -> bool:
        free = [p for p in self._found.usable[want.index] if self._free(want, p)]
        if len(free) >= want.count:
            return True
        total = len(self._found.matching[want.index])
        text = f"needs {want.count} devices, {len(free)} of {total} matching are free"
        self._fail(number, want, FailureKind.NOT_ENOUGH, text)
        return False

    def _known(self, want: Want, number: int) -> bool:
        """Whether it is known what "all devices" are."""
        if self._devices.incomplete:
            pools = ", ".join(self._devices.incomplete)
            text = f"asks for all devices while {pools} is being updated"
            self._fail(number, want, FailureKind.POOL_INCOMPLETE, text)
        elif self._devices.invalid:
            text = f"asks for all devices while pool {self._devices.invalid[0]}"
            self._fail(number, want, FailureKind.POOL_INVALID, text)
        return not self._devices.incomplete and not self._devices.invalid

    def _alternatives(self, number: int) -> tuple[Want, ...]:
        """What may serve a request: all its alternatives, or the one that is settled."""
        request = self._ask.requests[number]
        chosen = self._choice.get(alternatives_key(request)) if len(request) > 1 else None
        return request if chosen is None else request[chosen : chosen + 1]

    def run(self, number: int) -> bool:
        """Serve requests from `number` on."""
        if number == len(self._ask.requests):
            return True
        for want in self._alternatives(number):
            if want.count == 0:
                done = self._all(want, number)
            else:
                order = self._order(want, number)
                done = order is not None and self._fill(want, order, want.count, 0, number)
            if done:
                return True
            if self.trials > MAX_TRIALS:
                return False
        return False

    def _fail(self, number: int, want: Want, kind: FailureKind, text: str) -> None:
        if self.failure is None or number > self.failure[0]:
            claim = self._ask.claims[want.claim].metadata.key
            self.failure = (number, Failure(kind, text, claim, want.name))

    def _free(self, want: Want, position: int) -> bool:
        device = self._devices.devices[position]
        share = self._found.consumed.get((want.index, position))
        if share is not None:
            return self._usage.free(device, share, beside=want.admin)
        if want.admin:
            return (position, want.claim) not in self._taken
        if self._admin and any(at == position for at, _ in self._taken):
            return False
        return self._usage.free(device, None)

    def _all(self, want: Want, number: int) -> bool:
        matching = self._found.matching[want.index]
        ready = [p for p in self._found.usable[want.index] if self._free(want, p)]
        if not matching or len(ready) < len(matching):
            text = f"asks for all {len(matching)} matching devices, {len(ready)} are free"
            self._fail(number, want, FailureKind.NOT_ENOUGH, text)
            return False
        if len(matching) > MAX_RESULTS:
            self._fail(number, want, FailureKind.INVALID, f"matches {len(matching)} devices, limit {MAX_RESULTS}")
            return False
        return self._fill(want, ready, len(ready), 0, number)

    def _order(self, want: Want, number: int) -> list[int] | None:
        """Free candidates in the order to try; None if they cannot be enough."""
        free = [p for p in self._found.usable[want.index] if self._free(want, p)]
        matches = [c for c in want.constraints if not self._ask.constraints[c].distinct]
        if matches:
            groups: dict[tuple[object, ...], list[int]] = {}
            for position in free:
                values = tuple(self._attribute(c, position) for c in matches)
                fixed = (self._values[c][0] if self._values[c] else v for c, v in zip(matches, values, strict=True))
                if None not in values and tuple(fixed) == values:
                    groups.setdefault(values, []).append(position)
            fitting = [g for g in groups.values() if len(g) >= want.count]
            fitting.sort(key=len)  # stable: first found wins among equals
            best = max((len(g) for g in groups.values()), default=0)
            text = f"needs {want.count} devices of one {_names(self._ask, matches)}, best has {best} free"
            ordered = [p for g in fitting for p in g]
        else:
            total = len(self._found.matching[want.index])
            text = f"needs {want.count} devices, {len(free)} of {total} matching are free"
            ordered = self._packed(free, want.count) if len(free) >= want.count else []
        if not ordered:
            self._fail(number, want, FailureKind.NOT_ENOUGH, text)
            return None
        return ordered

    def _packed(self, free: list[int], count: int) -> list[int]:
        """Devices of the smallest group that has `count` free first; else of the largest groups first."""
        groups: dict[object, list[int]] = {}
        for position in free:
            groups.setdefault(self._devices.devices[position].group, []).append(position)
        if len(groups) < 2:
            return free
        enough = sorted((g for g in groups.values() if len(g) >= count), key=len)
        short = sorted((g for g in groups.values() if len(g) < count), key=len, reverse=True)
        return [p for g in (*enough, *short) for p in g]

    def _attribute(self, constraint: int, position: int) -> object:
        return self._devices.devices[position].attribute(self._ask.constraints[constraint].attribute)

    def _fill(self, want: Want, order: list[int], missing: int, start: int, number: int) -> bool:
        """Choose `missing` devices from order[start:], then serve the later requests."""
        if missing == 0:
            return self.run(number + 1)
        if self._results[want.claim] + missing > MAX_RESULTS:
            self._fail(number, want, FailureKind.NOT_ENOUGH, f"would give the claim more than {MAX_RESULTS} devices")
            return False
        tried: set[object] = set()
        for i in range(start, len(order) - missing + 1):
            position = order[i]
            self.trials += 1
            if self.trials > MAX_TRIALS:
                return False
            if (tried and self._look(position) in tried) or not self._free(want, position):
                continue
            if not self._admit(want, position):
                continue
            self._take(want, position)
            if self._fill(want, order, missing - 1, i + 1, number):
                return True
            self._untake(want)
            tried.add(self._look(position))
        self._fail(number, want, FailureKind.NOT_ENOUGH, f"no {want.count} free devices meet the claim's constraints")
        return False

    def _admit(self, want: Want, position: int) -> bool:
        """Whether the constraints allow one more device with this device's attribute values."""
        for number in want.constraints:
            value, seen = self._attribute(number, position), self._values[number]
            if value is None:
                return False
            if self._ask.constraints[number].distinct:
                if value in seen:
                    return False
            elif seen and seen[0] != value:
                return False
        return True

    def _take(self, want: Want, position: int) -> None:
        device, consumed = self._devices.devices[position], self._found.consumed.get((want.index, position))
        for number in want.constraints:
            self._values[number].append(self._attribute(number, position))
        if consumed is None:
            self._taken.add((position, want.claim))
        if consumed is not None or not want.admin:
            self._usage.take(device, consumed)
        self._results[want.claim] += 1
        self.picks.append(Pick(want, position, device, consumed))

    def _untake(self, want: Want) -> None:
        pick = self.picks.pop()
        self._results[want.claim] -= 1
        for number in want.constraints:
            self._values[number].pop()
        if pick.consumed is None:
            self._taken.discard((pick.position, want.claim))
        if pick.consumed is not None or not want.admin:
            self._usage.give(pick.device, pick.consumed)

    def settle(self) -> None:
        """Stop counting shares of administrative access, which count only beside each other."""
        for pick in self.picks:
            if pick.want.admin and pick.consumed is not None:
                self._usage.give(pick.device, pick.consumed)

    def _look(self, position: int) -> object:
        """All that later choices can see of a device: devices that look the same are interchangeable."""
        look = self._looks.get(position)
        if look is None:
            device = self._devices.devices[position]
            if device.device.allow_multiple_allocations or self._admin:
                look = position
            else:
                roles = tuple(w for w, p in enumerate(self._found.usable) if position in p)
                rest = tuple(w for w, p in enumerate(self._found.matching) if position in p)
                values = tuple(device.attribute(c.attribute) for c in self._ask.constraints)
                look = (device.id.driver, device.id.pool, roles, rest, values, device.counters, device.group)
            self._looks[position] = look
        return look


def alternatives_key(request: tuple[Want, ...]) -> tuple[str, ...]:
    """Names a firstAvailable request by its alternatives: equal keys must choose alike across a gang."""
    return tuple(want.name for want in request)


def _names(ask: Ask, constraints: list[int]) -> str:
    return " and ".join(ask.constraints[c].attribute for c in constraints)


def take_devices(
    ask: Ask,
    devices: NodeDevices,
    found: Candidates,
    usage: Usage,
    choice: Mapping[tuple[str, ...], int] | None = None,
) -> tuple[Pick, ...] | Failure:
    """Choose devices and take them in `usage`; on failure `usage` is as before.

    choice: index of the alternative to use, by `alternatives_key`; requests not named try theirs in order.
    """
    return count_and_take(ask, devices, found, usage, choice or {})[0]


def count_and_take(
    ask: Ask, devices: NodeDevices, found: Candidates, usage: Usage, choice: Mapping[tuple[str, ...], int]
) -> tuple[tuple[Pick, ...] | Failure, int]:
    """As `take_devices`, with the number of device trials it took."""
    search = _Search(ask, devices, found, usage, choice)
    if search.start():
        search.settle()
        return tuple(search.picks), search.trials
    failure = search.failure[1] if search.failure else Failure(FailureKind.NOT_ENOUGH, "no devices")
    if search.trials > MAX_TRIALS:
        failure = Failure(FailureKind.SEARCH_LIMIT, f"no devices found within {MAX_TRIALS} trials")
    elif devices.invalid and failure.kind is FailureKind.NOT_ENOUGH:
        failure = Failure(FailureKind.POOL_INVALID, f"pool {devices.invalid[0]}", failure.claim)
    return failure, search.trials


def give_devices(picks: Iterable[Pick], usage: Usage) -> None:
    """Inverse of a successful `take_devices`."""
    for pick in picks:
        if not pick.want.admin:
            usage.give(pick.device, pick.consumed)


def allocations(ask: Ask, picks: Sequence[Pick], node: str, now: datetime) -> tuple[Allocation, ...]:
    """One allocation for each claim of the ask, as kube-scheduler would write it."""
    return tuple(
        Allocation(
            devices=AllocatedDevices(
                results=tuple(_result(claim, p, n) for n, p in enumerate(own)), config=_config(claim, own)
            ),
            node_selector=node_selector(node),
            allocation_timestamp=stamp(now),
        )
        for number, claim in enumerate(ask.claims)
        for own in [[p for p in picks if p.want.claim == number]]
    )


def _result(claim: ResourceClaim, pick: Pick, number: int) -> AllocationResult:
    id_, device = pick.device.id, pick.device.device
    share = None
    if pick.consumed is not None:
        share = str(uuid.uuid5(_SHARES, f"{claim.metadata.uid or claim.metadata.key} {pick.want.name} {id_} {number}"))
    return AllocationResult(
        request=pick.want.name,
        driver=id_.driver,
        pool=id_.pool,
        device=id_.device,
        admin_access=True if pick.want.admin else None,
        tolerations=pick.want.tolerations,
        binding_conditions=device.binding_conditions,
        binding_failure_conditions=device.binding_failure_conditions,
        share_id=share,
        consumed_capacity=pick.consumed or {},
    )


def _config(claim: ResourceClaim, picks: Sequence[Pick]) -> tuple[AllocatedConfig, ...]:
    """Each class's configuration once, for the requests of that class, then the claim's own where it applies.

    No request names mean all requests.
    """
    wants = list(dict.fromkeys(p.want for p in picks))
    by_class: dict[str, list[Want]] = {}
    for want in wants:
        by_class.setdefault(want.class_name, []).append(want)
    config = [
        AllocatedConfig(source="FromClass", requests=tuple(w.name for w in own), opaque=c.opaque)
        for own in by_class.values()
        for c in own[0].class_config
    ]
    used = {name for want in wants for name in (want.name, want.request)}
    config += [
        AllocatedConfig(source="FromClaim", requests=c.requests, opaque=c.opaque)
        for c in claim.spec.devices.config
        if not c.requests or used & set(c.requests)
    ]
    return tuple(
        replace(c, requests=()) if all(w.request in c.requests or w.name in c.requests for w in wants) else c
        for c in config
    )


def allocate(
    claims: Sequence[ResourceClaim],
    devices: NodeDevices,
    usage: Usage,
    classes: Mapping[str, DeviceClass],
    selectors: Selectors,
    now: datetime,
) -> tuple[Allocation, ...] | Failure:
    """Allocate unallocated claims together on one node and take the devices in `usage`.

    Returns one allocation a claim, in order, or why there is none.
    """
    ask = build_ask(claims, classes)
    if isinstance(ask, Failure):
        return ask
    try:
        found = candidates(ask, devices, selectors)
    except SelectorError as error:
        return Failure(FailureKind.SELECTOR, str(error))
    picks = take_devices(ask, devices, found, usage)
    return picks if isinstance(picks, Failure) else allocations(ask, picks, devices.node, now)
