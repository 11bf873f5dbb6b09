"""What is computed from API objects and stays true as long as the object is the same one.

Snapshots share unchanged objects from one decision to the next, so identity is a sound and cheap key. Nothing
here changes an answer: a fresh Derived gives the same decisions, later.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import msgspec

from gpunode.allocate.allocator import Candidates, candidates
from gpunode.allocate.ask import Ask, Failure, build_ask
from gpunode.allocate.cel import SelectorError, Selectors
from gpunode.allocate.nodefit import PodNeeds, pod_needs
from gpunode.allocate.pools import NodeDevices, Pool, build_pool, devices_on
from gpunode.gang.gangs import Owners, Ownership
from gpunode.model.core import Pod
from gpunode.model.gang import Config, Snapshot
from gpunode.model.resource import DeviceClass, DeviceTaintRule, ResourceClaim

# Extended resource that stands for a device class by its name (k8s.io/api/resource/v1 ResourceDeviceClassPrefix).
IMPLICIT_EXTENDED_RESOURCE: Final = "deviceclass.resource.kubernetes.io/"

K = TypeVar("K")
V = TypeVar("V")


class _ByIdentity(Generic[K, V]):
    """Remembers a value for a key as long as its source objects are the same."""

    def __init__(self) -> None:
        self._entries: dict[K, tuple[tuple[object, ...], V]] = {}

    def get(self, key: K, sources: tuple[object, ...], compute: Callable[[], V]) -> V:
        entry = self._entries.get(key)
        if entry is not None and len(entry[0]) == len(sources) and all(map(_same, entry[0], sources)):
            return entry[1]
        value = compute()
        self._entries[key] = (sources, value)
        return value

    def trim(self, live: int) -> None:
        """Start over once most entries belong to objects that are gone."""
        if len(self._entries) > 2 * live + 64:
            self._entries.clear()


def _same(left: object, right: object) -> bool:
    return left is right


@dataclass(frozen=True, eq=False)
class View:
    """The devices of one snapshot: pools by (driver, name) and what each node can use.

    shared: some pool serves more than one node.
    """

    pools: dict[tuple[str, str], Pool]
    nodes: dict[str, NodeDevices]
    shared: bool


@dataclass(frozen=True, eq=False)
class Match:
    """How one kind of ask meets one node.

    look: equal for nodes on which the same search has the same outcome, position by position, as long as the same
    positions are in use; None if that is not known.
    usable: bit mask of the positions that any want could take.
    """

    found: Candidates
    look: int | None
    usable: int


class Derived:
    """Caches over decisions. Not safe for use by several threads at once."""

    def __init__(self) -> None:
        self.selectors = Selectors()
        self._needs: _ByIdentity[str, PodNeeds | str] = _ByIdentity()
        self._spec: _ByIdentity[str, bytes] = _ByIdentity()
        self._pools: _ByIdentity[tuple[str, str], Pool] = _ByIdentity()
        self._devices: _ByIdentity[str, NodeDevices] = _ByIdentity()
        self._classes: tuple[object, ...] = ()
        self._class_table: dict[str, DeviceClass] = {}
        self._asks: dict[tuple[bytes, ...], Ask | Failure] = {}
        self._matches: dict[tuple[bytes, ...], dict[str, tuple[NodeDevices, Match | SelectorError]]] = {}
        self._used: set[tuple[bytes, ...]] = set()
        self._looks: dict[object, int] = {}
        self.trials: dict[object, tuple[tuple[tuple[int, int], ...] | Failure, int]] = {}

    def begin(self, snapshot: Snapshot, config: Config) -> View:
        """Bring the caches in step with a snapshot."""
        classes = tuple(snapshot.classes[name] for name in sorted(snapshot.classes))
        if len(classes) != len(self._classes) or not all(map(_same, classes, self._classes)):
            self._classes, self._class_table = classes, dict(snapshot.classes)
            self._asks.clear()
            self._matches.clear()
            self.trials.clear()
        self._needs.trim(len(snapshot.pods))
        self._spec.trim(len(snapshot.claims))
        # What the last decision did not ask about is forgotten.
        for table in (self._matches, self._asks):
            for key in [k for k in table if k not in self._used]:
                del table[key]
        self._used.clear()
        if len(self.trials) > 100_000 or len(self._looks) > 100_000:
            self._matches.clear()
            self._looks.clear()
            self.trials.clear()
        return self._view(snapshot, config)

    def _view(self, snapshot: Snapshot, config: Config) -> View:
        grouped: dict[tuple[str, str], list[str]] = {}
        for name, slice_ in snapshot.slices.items():
            if slice_.spec.driver in config.drivers:
                grouped.setdefault((slice_.spec.driver, slice_.spec.pool.name), []).append(name)
        rules = _rules_by_pool(snapshot)
        pools: dict[tuple[str, str], Pool] = {}
        for key in sorted(grouped):
            slices = [snapshot.slices[name] for name in sorted(grouped[key])]
            ours = rules.get(key[1], rules[""])
            pools[key] = self._pools.get(key, (*slices, None, *ours), lambda s=slices, r=ours: build_pool(s, r))  # type: ignore[misc]
        local: dict[str, list[Pool]] = {}
        shared: list[Pool] = []
        for pool in pools.values():
            if pool.local:
                local.setdefault(pool.local, []).append(pool)
            else:
                shared.append(pool)
        nodes: dict[str, NodeDevices] = {}
        for name in sorted(snapshot.nodes):
            node = snapshot.nodes[name]
            own = sorted([*local.get(name, ()), *shared], key=lambda p: (p.driver, p.name))
            sources = (node if shared else None, *own)
            nodes[name] = self._devices.get(name, sources, lambda n=node, o=own: devices_on(n, o))  # type: ignore[misc]
        self._pools.trim(len(pools))
        self._devices.trim(len(nodes))
        return View(pools, nodes, bool(shared))

    def needs(self, pod: Pod) -> PodNeeds | str:
        """Node needs of a pod, or what is wrong with its requests."""

        def compute() -> PodNeeds | str:
            try:
                return pod_needs(pod)
            except ValueError as error:
                return str(error)

        return self._needs.get(pod.metadata.key, (pod,), compute)

    def spec_key(self, claim: ResourceClaim) -> bytes:
        """Equal for claims that ask for the same."""
        return self._spec.get(claim.metadata.key, (claim,), lambda: msgspec.json.encode(claim.spec, order="sorted"))

    def ask(self, claims: tuple[ResourceClaim, ...]) -> Ask | Failure:
        """The ask of some claims; parsed once for all claims with equal specs."""
        key = tuple(self.spec_key(c) for c in claims)
        self._used.add(key)
        known = self._asks.get(key)
        if known is None:
            known = self._asks[key] = build_ask(claims, self._class_table)
        return known if isinstance(known, Failure) else Ask(claims, known.requests, known.constraints)

    def match(self, key: tuple[bytes, ...], ask: Ask, devices: NodeDevices) -> Match:
        """Candidates of an ask on a node. Raises SelectorError."""
        table = self._matches.setdefault(key, {})
        entry = table.get(devices.node)
        if entry is None or entry[0] is not devices:
            known: Match | SelectorError
            try:
                known = self._match(key, ask, devices)
            except SelectorError as error:
                known = error
            entry = table[devices.node] = (devices, known)
        if isinstance(entry[1], SelectorError):
            raise entry[1]
        return entry[1]

    def _match(self, key: tuple[bytes, ...], ask: Ask, devices: NodeDevices) -> Match:
        found = candidates(ask, devices, self.selectors)
        usable = 0
        for positions in found.usable:
            for position in positions:
                usable |= 1 << position
        if devices.counters is None:
            return Match(found, None, usable)
        values: dict[object, int] = {}
        normal = tuple(
            tuple(values.setdefault((n, v), len(values)) if (v := d.attribute(c.attribute)) is not None else None
                  for n, c in enumerate(ask.constraints))
            for d in devices.devices
        )  # fmt: skip
        groups: dict[object, int] = {}
        group = tuple(groups.setdefault(d.group, len(groups)) for d in devices.devices)
        pools: dict[object, int] = {}
        pool = tuple(pools.setdefault((d.id.driver, d.id.pool), len(pools)) for d in devices.devices)
        counters = tuple(d.counters for d in devices.devices) if devices.counters else None
        shares = tuple((at, tuple(sorted(share.items()))) for at, share in sorted(found.consumed.items()))
        sizes = tuple(tuple(sorted((n, c.value) for n, c in devices.devices[p].device.capacity.items()))
                      for p in devices.shareable)  # fmt: skip
        look = (
            *(key, found.usable, found.matching, normal, group, pool, shares, sizes),
            *(counters, devices.counters, devices.shareable, devices.incomplete, devices.invalid),
        )
        return Match(found, self._looks.setdefault(look, len(self._looks)), usable)

    def owners(self, snapshot: Snapshot, view: View, config: Config) -> Owners:
        """Tells who allocates a claim: the drivers that its device classes select decide.

        A class is ours if it names one of our drivers, or if a published device of one meets its selectors.
        """
        managed = {name: self._is_managed(c, view, config) for name, c in snapshot.classes.items()}

        def of(claim: ResourceClaim) -> Ownership:
            kinds = {managed.get(name) for name in _class_names(claim)}
            if True in kinds:
                return Ownership.MIXED if False in kinds else Ownership.OURS
            return Ownership.OTHERS if False in kinds else Ownership.UNKNOWN

        extended: set[str] = set()
        for name, class_ in snapshot.classes.items():
            if managed[name]:
                extended.add(IMPLICIT_EXTENDED_RESOURCE + name)
                extended.add(class_.spec.extended_resource_name or "")
        # Where a node offers the name itself, a device plugin serves it there.
        offered = {
            n for node in snapshot.nodes.values() for n in extended if node.status.allocatable.get(n, "0") != "0"
        }
        return Owners(of, frozenset(extended - offered - {""}))

    def _is_managed(self, class_: DeviceClass, view: View, config: Config) -> bool:
        expressions = [s.cel.expression for s in class_.spec.selectors if s.cel is not None]
        if any(f'"{driver}"' in e or f"'{driver}'" in e for driver in config.drivers for e in expressions):
            return True
        if any("device.driver" in e for e in expressions):
            return False
        for pool in view.pools.values():
            for device in pool.devices:
                try:
                    if all(self.selectors.matches(e, device.id.driver, device.device) for e in expressions):
                        return True
                except SelectorError:
                    continue
        return False


def _rules_by_pool(snapshot: Snapshot) -> dict[str, list[DeviceTaintRule]]:
    """Rules that may concern a pool, by pool name, in order of name; "" for pools that no rule names.

    So that a taint on one node's device does not touch what is known of the others.
    """
    ordered = [snapshot.taint_rules[name] for name in sorted(snapshot.taint_rules)]
    named = {s.pool for r in ordered if (s := r.spec.device_selector) is not None and s.pool is not None}
    table: dict[str, list[DeviceTaintRule]] = {name: [] for name in (*sorted(named), "")}
    for rule in ordered:
        selector = rule.spec.device_selector
        if selector is None:
            continue
        for rules in [table[selector.pool]] if selector.pool is not None else table.values():
            rules.append(rule)
    return table


def _class_names(claim: ResourceClaim) -> list[str]:
    names: list[str] = []
    for request in claim.spec.devices.requests:
        if request.exactly is not None:
            names.append(request.exactly.device_class_name)
        names.extend(sub.device_class_name for sub in request.first_available)
    return names
