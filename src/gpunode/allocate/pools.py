"""ResourceSlices to pools of devices, and the devices each node can use.

Rules: k8s.io/dynamic-resource-allocation/structured/internal/incubating/pools_incubating.go (v1.37). Only
the slices with a pool's highest generation count; a pool with fewer slices than it announces is incomplete;
duplicate device or counter-set names, and references to counters that do not exist, make a pool invalid.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gpunode.allocate.selectors import matches_node
from gpunode.model.core import Node
from gpunode.model.names import MANAGED_TAINT
from gpunode.model.quantity import parse_milli
from gpunode.model.resource import (
    AllocationResult,
    Device,
    DeviceTaint,
    DeviceTaintRule,
    NodeSelector,
    ResourceSlice,
)

# Attributes whose equal values mean that devices work best together: the driver's own, then the standard one.
GROUP_ATTRIBUTES: Final = ("nvlinkDomain", "resource.kubernetes.io/numaNode")


class DeviceId(NamedTuple):
    """Names one published device in the cluster; shown as driver/pool/device."""

    driver: str
    pool: str
    device: str

    def __str__(self) -> str:
        return f"{self.driver}/{self.pool}/{self.device}"


def result_id(result: AllocationResult) -> DeviceId:
    """The device that an allocation result names."""
    return DeviceId(result.driver, result.pool, result.device)


@dataclass(frozen=True, eq=False, slots=True)
class PoolDevice:
    """A device with its place and the taints of its slice and of matching DeviceTaintRules.

    managed: kube-scheduler is kept off it by the managed taint.
    counters: what it consumes, (counter set, counter) to thousandths.
    group: devices with equal values belong together (NVLink domain, NUMA node); None where nothing is known.
    """

    id: DeviceId
    device: Device
    taints: tuple[DeviceTaint, ...]
    managed: bool
    counters: tuple[tuple[tuple[str, str], int], ...] = ()
    group: object = None

    def attribute(self, name: str) -> object:
        """Value of an attribute by its fully qualified name, typed; None where the device lacks it."""
        found = self.device.attributes.get(name)
        if found is None:
            domain, _, bare = name.rpartition("/")
            found = self.device.attributes.get(bare) if domain == self.id.driver else None
        return None if found is None else (type(found.value).__name__, found.version is not None, found.value)


@dataclass(frozen=True, eq=False, slots=True)
class Pool:
    """One pool at its highest generation.

    invalid: why no device may be taken from it, or "". counters: capacity by (counter set, counter), thousandths.
    local: the node's name if every slice is that node's. suspects: devices with a taint besides the managed one.
    """

    driver: str
    name: str
    generation: int
    complete: bool
    invalid: str
    local: str
    devices: tuple[PoolDevice, ...]
    slices: tuple[ResourceSlice, ...]
    counters: dict[tuple[str, str], int] = field(default_factory=dict)
    suspects: dict[str, PoolDevice] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, slots=True)
class NodeDevices:
    """The devices one node can use, in allocation order, and the pools it cannot use yet.

    incomplete, invalid: `driver/pool` names, the latter with the reason.
    shareable: positions of devices that several claims may share.
    counters: capacities of the pools' counters, as one comparable value; None if a pool with counters also serves
    other nodes, so that what is left of them does not depend on this node's devices alone.
    """

    node: str
    devices: tuple[PoolDevice, ...]
    incomplete: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()
    shareable: tuple[int, ...] = ()
    counters: tuple[object, ...] | None = ()


def matching_taints(id_: DeviceId, device: Device, rules: Iterable[DeviceTaintRule]) -> tuple[DeviceTaint, ...]:
    """Taints in force on a device: those in its slice, then those of the rules that select it."""
    extra = tuple(r.spec.taint for r in rules if _selected(id_, r))
    return (*device.taints, *extra) if extra else device.taints


def _selected(id_: DeviceId, rule: DeviceTaintRule) -> bool:
    selector = rule.spec.device_selector
    return (
        selector is not None
        and selector.driver in (None, id_.driver)
        and selector.pool in (None, id_.pool)
        and selector.device in (None, id_.device)
    )


def build_pool(slices: list[ResourceSlice], rules: list[DeviceTaintRule]) -> Pool:
    """One pool from all its slices (any generation), sorted by name."""
    generation = max(s.spec.pool.generation for s in slices)
    current = tuple(s for s in slices if s.spec.pool.generation == generation)
    first = current[0].spec
    own_rules = [
        rule
        for rule in rules
        if (selector := rule.spec.device_selector) is not None
        and selector.driver in (None, first.driver)
        and selector.pool in (None, first.pool.name)
    ]
    devices = tuple(
        _pool_device(DeviceId(first.driver, first.pool.name, d.name), d, own_rules)
        for s in current
        for d in s.spec.devices
    )
    counters, problem = _counters(current)
    locals_ = {s.spec.node_name for s in current}
    return Pool(
        driver=first.driver,
        name=first.pool.name,
        generation=generation,
        complete=all(s.spec.pool.resource_slice_count == len(current) for s in current),
        invalid=problem or _invalid_devices(devices, counters),
        local=(locals_.pop() or "") if len(locals_) == 1 else "",
        devices=devices,
        slices=current,
        counters=counters,
        suspects={d.id.device: d for d in devices if any(t.key != MANAGED_TAINT for t in d.taints)},
    )


def _pool_device(id_: DeviceId, device: Device, rules: list[DeviceTaintRule]) -> PoolDevice:
    taints = matching_taints(id_, device, rules)
    return PoolDevice(
        id=id_,
        device=device,
        taints=taints,
        managed=any(t.key == MANAGED_TAINT and t.effect == "NoSchedule" for t in taints),
        counters=tuple(
            ((c.counter_set, name), _milli(counter.value))
            for c in device.consumes_counters
            for name, counter in c.counters.items()
        ),
        group=_group(device),
    )


def _group(device: Device) -> object:
    values = tuple(a.value if (a := device.attributes.get(name)) is not None else None for name in GROUP_ATTRIBUTES)
    return values if any(v is not None for v in values) else None


def _milli(text: str) -> int:
    """A quantity in thousandths; -1 for text that is none (the pool is then invalid)."""
    try:
        return parse_milli(text)
    except ValueError:
        return -1


def _counters(slices: tuple[ResourceSlice, ...]) -> tuple[dict[tuple[str, str], int], str]:
    counters: dict[tuple[str, str], int] = {}
    names: set[str] = set()
    for slice_ in slices:
        for counter_set in slice_.spec.shared_counters:
            if counter_set.name in names:
                return counters, f"duplicate counter set {counter_set.name}"
            names.add(counter_set.name)
            for name, counter in counter_set.counters.items():
                counters[counter_set.name, name] = _milli(counter.value)
    return counters, ""


def _invalid_devices(devices: tuple[PoolDevice, ...], counters: dict[tuple[str, str], int]) -> str:
    seen: set[str] = set()
    for device in devices:
        if device.id.device in seen:
            return f"duplicate device {device.id.device}"
        seen.add(device.id.device)
        for key, amount in device.counters:
            if key not in counters:
                return f"device {device.id.device} consumes unknown counter {key[0]}/{key[1]}"
            if amount < 0 or counters[key] < 0:
                return f"device {device.id.device}: counter {key[0]}/{key[1]} is not a quantity"
        if any(_milli(c.value) < 0 for c in device.device.capacity.values()):
            return f"device {device.id.device} has a capacity that is not a quantity"
    return ""


def devices_on(node: Node, pools: Iterable[Pool]) -> NodeDevices:
    """The devices of those pools that the node can use; pools must be sorted by (driver, name)."""
    devices: list[PoolDevice] = []
    bound: list[PoolDevice] = []
    incomplete: list[str] = []
    invalid: list[str] = []
    counters: list[object] = []
    local = True
    for pool in pools:
        usable = _usable(node, pool)
        if usable is None:
            continue
        if pool.counters:
            local = local and pool.local == node.metadata.name
            counters.append((pool.driver, tuple(sorted(pool.counters.items()))))
        name = f"{pool.driver}/{pool.name}"
        if not pool.complete:
            incomplete.append(name)
        elif pool.invalid:
            invalid.append(f"{name}: {pool.invalid}")
        else:
            # As upstream: devices that need binding conditions come last.
            for device in usable:
                (bound if device.device.binding_conditions else devices).append(device)
    every = (*devices, *bound)
    return NodeDevices(
        node=node.metadata.name,
        devices=every,
        incomplete=tuple(incomplete),
        invalid=tuple(invalid),
        shareable=tuple(i for i, d in enumerate(every) if d.device.allow_multiple_allocations),
        counters=tuple(counters) if local else None,
    )


def _usable(node: Node, pool: Pool) -> tuple[PoolDevice, ...] | None:
    """Devices of a pool that a node reaches; None if no slice of the pool is meant for it."""
    name = node.metadata.name
    if pool.local:
        return pool.devices if pool.local == name else None
    found: list[PoolDevice] = []
    reached = False
    position = 0
    for slice_ in pool.slices:
        spec = slice_.spec
        members = pool.devices[position : position + len(spec.devices)]
        position += len(spec.devices)
        if spec.per_device_node_selection:
            here = [
                d for d in members if _reaches(node, d.device.node_name, d.device.node_selector, d.device.all_nodes)
            ]
            reached = reached or bool(here)
            found.extend(here)
        elif _reaches(node, spec.node_name, spec.node_selector, spec.all_nodes):
            reached = True
            found.extend(members)
    return tuple(found) if reached else None


def _reaches(node: Node, node_name: str | None, selector: NodeSelector | None, all_nodes: bool) -> bool:
    if node_name:
        return node_name == node.metadata.name
    if selector is not None:
        return matches_node(selector, node)
    return all_nodes
