"""The cluster as one decision changes it: every change has an exact inverse, so that a trial can be undone.

The picture starts from a snapshot: devices and counters held by every allocated claim (also of terminating pods),
room taken by every pod that has a node or is about to get one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from gpunode.allocate.allocator import Pick, count_and_take, give_devices
from gpunode.allocate.ask import Ask, Failure, FailureKind
from gpunode.allocate.cel import SelectorError
from gpunode.allocate.nodefit import Misfit, NodeRoom, PodNeeds, static_misfit
from gpunode.allocate.pools import DeviceId, NodeDevices
from gpunode.allocate.selectors import matches_node, pinned_node
from gpunode.allocate.usage import Usage
from gpunode.gang.derived import Derived, Match, View
from gpunode.gang.gangs import Member
from gpunode.gang.holders import holder_of, holders
from gpunode.model.core import Pod
from gpunode.model.gang import Reason, Snapshot
from gpunode.model.resource import AllocationResult, NodeSelector, ResourceClaim

# Device trials of one gang's turn, about a second of work; a plain gang takes one a device.
MAX_GANG_TRIALS: Final = 500_000

Choice = Mapping[tuple[str, ...], int]
Refusal = Misfit | Failure


@dataclass(frozen=True, eq=False)
class Shape:
    """What interchangeable units have in common.

    needs: one entry a pod. static: for each, what is known of its static misfits, by node.
    within: node selectors of claims that are allocated already. size: devices needed.
    """

    needs: tuple[PodNeeds, ...]
    ask_key: tuple[bytes, ...]
    within: tuple[NodeSelector, ...]
    size: int
    static: tuple[dict[str, Misfit | None], ...]


@dataclass(frozen=True, eq=False)
class Unit:
    """Pods that must share a node, because they share a claim: usually one pod.

    ask: their unallocated claims, each once; None if there are none.
    """

    members: tuple[Member, ...]
    shape: Shape
    ask: Ask | None


@dataclass(frozen=True, eq=False)
class Put:
    """A unit on a node with the devices picked for it."""

    unit: Unit
    node: str
    picks: tuple[Pick, ...]


class Board:
    """Mutable; use `mark` and `undo` around trials."""

    def __init__(self, snapshot: Snapshot, derived: Derived, view: View) -> None:
        self.snapshot, self.derived, self.view = snapshot, derived, view
        self.nodes: tuple[str, ...] = tuple(sorted(snapshot.nodes))
        allocated = [c for c in snapshot.claims.values() if c.status.allocation is not None]
        self.usage = Usage(view.pools, (r for c in allocated for r in _results(c)))
        self._rooms = {name: NodeRoom(snapshot.nodes[name]) for name in self.nodes}
        for pod in snapshot.pods.values():
            self._change_pod(pod, 1)
        self._log: list[tuple[Put, int, int]] = []
        self._versions: dict[str, int] = {}
        self._version = 0
        # Device trials left to the gang whose turn it is; whoever gives gangs their turn sets it.
        self.budget = MAX_GANG_TRIALS
        # Equal values mean that nothing was placed or freed in between.
        self.state = 0
        self._shapes: dict[object, Shape] = {}
        self._fits: dict[tuple[Shape, object], dict[str, tuple[int, Refusal | None]]] = {}
        self._fitting: dict[tuple[Shape, object, tuple[str, ...]], tuple[int, tuple[str, ...] | Failure]] = {}
        self._static: dict[object, dict[str, Misfit | None]] = {}
        self._held: dict[str, tuple[int, int]] = {}
        self._holders: dict[DeviceId, tuple[str, bool]] | None = None
        # Reasons by what was asked, with the state they were found in.
        self.reasons: dict[object, tuple[int, Reason]] = {}

    # -- what the snapshot holds -------------------------------------------------------------------------------

    def _change_pod(self, pod: Pod, sign: int) -> None:
        node = location(pod, self.snapshot)
        if pod.finished or not node or node not in self._rooms:
            return
        needs = self.derived.needs(pod)
        if isinstance(needs, PodNeeds):
            room = self._rooms[node]
            (room.take if sign > 0 else room.give)(needs)

    def release(self, pods: Iterable[Pod], claims: Iterable[ResourceClaim]) -> None:
        """Free what these pods and claims hold, as if they were gone; `occupy` is the inverse."""
        self._shift(pods, claims, -1)

    def occupy(self, pods: Iterable[Pod], claims: Iterable[ResourceClaim]) -> None:
        self._shift(pods, claims, 1)

    def _shift(self, pods: Iterable[Pod], claims: Iterable[ResourceClaim], sign: int) -> None:
        touched: set[str] = set()
        for pod in pods:
            self._change_pod(pod, sign)
            touched.add(location(pod, self.snapshot))
        for claim in claims:
            for result in _results(claim):
                (self.usage.take_result if sign > 0 else self.usage.give_result)(result)
                pool = self.view.pools.get((result.driver, result.pool))
                touched.add(pool.local if pool is not None else "")
        self._version += 1
        self.state = self._version
        for node in touched:
            self._versions[node] = self._version

    # -- units -------------------------------------------------------------------------------------------------

    def unit(self, members: tuple[Member, ...]) -> Unit | Failure:
        """Members that share claims, with what is still to be allocated for them."""
        claims = {c.metadata.key: c for m in members for c in m.claims}
        todo = tuple(c for _, c in sorted(claims.items()) if c.status.allocation is None)
        # Spec order inside a pod matters for nothing; claims of one pod keep the order of the pod's list.
        if len(members) == 1:
            todo = tuple(c for c in members[0].claims if c.status.allocation is None)
        ask = self.derived.ask(todo) if todo else None
        if isinstance(ask, Failure):
            return ask
        needs: list[PodNeeds] = []
        for member in members:
            own = self.derived.needs(member.pod)
            if isinstance(own, str):
                return Failure(FailureKind.INVALID, f"pod {member.key}: {own}")
            needs.append(own)
        within = tuple(
            a.node_selector for c in claims.values() if (a := c.status.allocation) is not None and a.node_selector
        )
        key = (tuple(needs), tuple(self.derived.spec_key(c) for c in todo), within)
        shape = self._shapes.get(key)
        if shape is None:
            static = tuple(self._static.setdefault((n.selector, n.affinity, n.tolerations), {}) for n in needs)
            shape = Shape(key[0], key[1], within, ask.least_devices if ask else 0, static)
            self._shapes[key] = shape
        return Unit(members, shape, ask)

    # -- fit ---------------------------------------------------------------------------------------------------

    def refusal(self, unit: Unit, node: str, choice: Choice) -> Refusal | None:
        """Why the unit cannot go to the node now; None if it can. Remembered until the node changes."""
        table = self._fits.setdefault((unit.shape, _choice_key(choice)), {})
        stamp = self.stamp(node)
        known = table.get(node)
        if known is not None and known[0] == stamp:
            return known[1]
        answer = self._refusal(unit, node, choice)
        if not self.exhausted:
            table[node] = (stamp, answer)
        return answer

    @property
    def exhausted(self) -> bool:
        """Whether the present gang has used up its search: refusals then prove nothing."""
        return self.budget <= 0

    def fitting(self, unit: Unit, nodes: tuple[str, ...], choice: Choice) -> tuple[str, ...] | Failure:
        """Those of the nodes that take the unit now, or a failure that no node can cure."""
        key = (unit.shape, _choice_key(choice), nodes)
        known = self._fitting.get(key)
        if known is not None and known[0] == self.state:
            return known[1]
        answer = self._all_fitting(unit, nodes, choice)
        if not self.exhausted:
            self._fitting[key] = (self.state, answer)
        return answer

    def _all_fitting(self, unit: Unit, nodes: tuple[str, ...], choice: Choice) -> tuple[str, ...] | Failure:
        fitting: list[str] = []
        for node in nodes:
            refusal = self.refusal(unit, node, choice)
            if refusal is None:
                fitting.append(node)
            elif isinstance(refusal, Failure) and refusal.permanent:
                return refusal
        return tuple(fitting)

    def stamp(self, node: str) -> int:
        """Changes whenever what is free on the node changes, and returns with it."""
        return self._version if self.view.shared else self._versions.get(node, 0)

    def _refusal(self, unit: Unit, node: str, choice: Choice) -> Refusal | None:
        misfit = self.static(unit, node) or self._room(unit, node)
        if misfit is not None or unit.ask is None:
            return misfit
        answer = self._search(unit, unit.ask, node, choice)
        return answer if isinstance(answer, Failure) else None

    def static(self, unit: Unit, node: str) -> Misfit | None:
        """What keeps the unit off the node whatever else runs there."""
        for needs, table in zip(unit.shape.needs, unit.shape.static, strict=True):
            if node not in table:
                table[node] = static_misfit(needs, self.snapshot.nodes[node])
            misfit = table[node]
            if misfit is not None:
                return misfit
        for selector in unit.shape.within:
            if not matches_node(selector, self.snapshot.nodes[node]):
                return Misfit(
                    "Claim", f"excluded by a claim that is allocated on {pinned_node(selector) or 'other nodes'}"
                )
        return None

    def _room(self, unit: Unit, node: str) -> Misfit | None:
        room = self._rooms[node]
        taken: list[PodNeeds] = []
        misfit: Misfit | None = None
        for needs in unit.shape.needs:
            misfit = room.misfit(needs)
            if misfit is not None:
                break
            room.take(needs)
            taken.append(needs)
        for needs in taken:
            room.give(needs)
        return misfit

    def stays(self, pod: Pod, node: str) -> bool:
        """Whether a node takes a pod that is counted on it already (it is released and pinned there)."""
        needs = self.derived.needs(pod)
        known = self.snapshot.nodes.get(node)
        if known is None or not isinstance(needs, PodNeeds) or static_misfit(needs, known) is not None:
            return False
        room = self._rooms[node]
        room.give(needs)
        misfit = room.misfit(needs)
        room.take(needs)
        return misfit is None

    def match(self, unit: Unit, node: str) -> Match:
        """Raises SelectorError. The unit must have an ask."""
        assert unit.ask is not None  # noqa: S101
        return self.derived.match(unit.shape.ask_key, unit.ask, self.view.nodes[node])

    def held(self, node: str) -> int:
        """Bit mask of the positions of the node's devices that are given out whole."""
        stamp = self.stamp(node)
        known = self._held.get(node)
        if known is not None and known[0] == stamp:
            return known[1]
        mask, held = 0, self.usage.held
        for position, device in enumerate(self.view.nodes[node].devices):
            if device.id in held:
                mask |= 1 << position
        self._held[node] = (stamp, mask)
        return mask

    def free(self, unit: Unit, node: str) -> int:
        """How many devices that the unit could use are not held. An estimate where counters or shares matter."""
        if unit.ask is None:
            return 0
        try:
            match = self.match(unit, node)
        except SelectorError:
            return 0
        return (match.usable & ~self.held(node)).bit_count()

    def _search(self, unit: Unit, ask: Ask, node: str, choice: Choice) -> tuple[tuple[int, int], ...] | Failure:
        """Which (want, position) pairs serve the ask on the node now."""
        try:
            match = self.match(unit, node)
        except SelectorError as error:
            return Failure(FailureKind.SELECTOR, str(error))
        if self.budget <= 0:
            return Failure(FailureKind.SEARCH_LIMIT, "the bound on the search for this gang is reached")
        devices = self.view.nodes[node]
        shares = tuple(self.usage.shares(devices.devices[p]) for p in devices.shareable)
        key = (match.look, _choice_key(choice), self.held(node), shares)
        known = self.derived.trials.get(key) if match.look is not None else None
        if known is None:
            known = self._trial(ask, devices, match, choice)
            if match.look is not None:
                self.derived.trials[key] = known
        # Remembered work is charged too, so that the answer does not depend on what is remembered.
        self.budget -= known[1]
        return known[0]

    def _trial(
        self, ask: Ask, devices: NodeDevices, match: Match, choice: Choice
    ) -> tuple[tuple[tuple[int, int], ...] | Failure, int]:
        picks, trials = count_and_take(ask, devices, match.found, self.usage, choice)
        if isinstance(picks, Failure):
            return picks, trials
        give_devices(picks, self.usage)
        return tuple((p.want.index, p.position) for p in picks), trials

    def holders(self) -> dict[DeviceId, tuple[str, bool]]:
        """Who holds each device, for sentences: a name, and whether the holder is terminating."""
        if self._holders is None:
            self._holders = holders(self.snapshot)
        table = self._holders
        if not self._log:
            return table
        placed = {
            p.device.id: (holder_of(put.unit.members[0].pod), False) for put, _, _ in self._log for p in put.picks
        }
        return {**table, **placed}

    # -- changes -----------------------------------------------------------------------------------------------

    def put(self, unit: Unit, node: str, choice: Choice) -> Refusal | Put:
        """Place a unit, or say why not and change nothing."""
        refusal = self.refusal(unit, node, choice)
        if refusal is not None:
            return refusal
        picks: tuple[Pick, ...] = ()
        if unit.ask is not None:
            pairs = self._search(unit, unit.ask, node, choice)
            if isinstance(pairs, Failure):
                return pairs
            found, devices, wants = self.match(unit, node).found, self.view.nodes[node].devices, unit.ask.wants
            picks = tuple(Pick(wants[w], p, devices[p], found.consumed.get((w, p))) for w, p in pairs)
            for pick in picks:
                if not pick.want.admin:
                    self.usage.take(pick.device, pick.consumed)
        for needs in unit.shape.needs:
            self._rooms[node].take(needs)
        put = Put(unit, node, picks)
        self._log.append((put, self._versions.get(node, 0), self.state))
        self._version += 1
        self._versions[node] = self.state = self._version
        return put

    def mark(self) -> int:
        return len(self._log)

    def undo(self, mark: int) -> None:
        """Take back everything since `mark`, latest first."""
        while len(self._log) > mark:
            put, version, self.state = self._log.pop()
            give_devices(put.picks, self.usage)
            for needs in put.unit.shape.needs:
                self._rooms[put.node].give(needs)
            self._versions[put.node] = version
            if self.view.shared:
                self._version += 1


def _results(claim: ResourceClaim) -> tuple[AllocationResult, ...]:
    return claim.status.allocation.devices.results if claim.status.allocation is not None else ()


def _choice_key(choice: Choice) -> object:
    return tuple(sorted(choice.items())) if choice else ()


def location(pod: Pod, snapshot: Snapshot) -> str:
    """The node a pod is on, or will be on: bound, or released with all its claims and pinned; otherwise ""."""
    if pod.spec.node_name:
        return pod.spec.node_name
    if pod.spec.scheduling_gates or pod.finished:
        return ""
    generated = {s.name: s.resource_claim_name for s in pod.status.resource_claim_statuses}
    node = ""
    for reference in pod.spec.resource_claims:
        name = reference.resource_claim_name or generated.get(reference.name)
        claim = snapshot.claims.get(f"{pod.metadata.namespace}/{name}") if name else None
        if claim is None or claim.status.allocation is None:
            return ""
        node = node or pinned_node(claim.status.allocation.node_selector)
    affinity = pod.spec.affinity.node_affinity if pod.spec.affinity else None
    return node or pinned_node(affinity.required if affinity else None)
