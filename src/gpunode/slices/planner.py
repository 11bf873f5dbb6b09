"""From hardware and its health to the ResourceSlices that describe it. Pure: same input, same slices.

Health enters here and nowhere else, so no publish path can forget a taint.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from gpunode.model import names
from gpunode.model.grace import AT_ONCE, grace_value
from gpunode.model.hardware import Inventory
from gpunode.model.health import Finding, Level, NodeHealth, urgency
from gpunode.model.resource import CounterSet, Device, DeviceTaint, ResourceSlice
from gpunode.slices.layout import GpuMode, SliceConfig, Unit, pack, units
from gpunode.slices.linter import MAX_TAINTS
from gpunode.slices.partitions import MEMORY_SLICE

__all__ = ["GpuMode", "SliceConfig", "plan"]

_MIG_MARK = "-mig-"
Since = dict[tuple[str, str, str], str | None]


def plan(
    inventory: Inventory,
    health: NodeHealth,
    config: SliceConfig,
    existing: Sequence[ResourceSlice] = (),
    in_use: frozenset[str] = frozenset(),
    held: frozenset[str] = frozenset(),
) -> tuple[ResourceSlice, ...]:
    """The slices the node's pool should consist of; an empty node gets one empty slice (driver is up, no devices).

    existing: the slices now in the API, which tell taint times, the generation, and how a vanished device looked.
    in_use: names of devices in live allocations; they stay published even when the hardware is gone.
    held: names of devices that no live claim has but the node has not let go of; nobody else is to get them yet.
    """
    ours = [s for s in existing if s.spec.driver == config.driver and s.spec.pool.name == config.node]
    published = {d.name: d for s in sorted(ours, key=_generation) for d in s.spec.devices}
    sets = {c.name: c for s in sorted(ours, key=_generation) for c in s.spec.shared_counters}
    wanted = units(inventory, config)
    retained = _retained(wanted, published, sets, health, in_use)
    final = [(wanted | retained)[name] for name in sorted(wanted.keys() | retained.keys())]
    tainted = [
        unit.having(_with_taints(d, unit, health, config, published, retained, held) for d in unit.devices)
        for unit in final
    ]
    return _with_generation(pack(tainted, config), ours)


def _generation(found: ResourceSlice) -> int:
    return found.spec.pool.generation


def _retained(
    wanted: dict[str, Unit],
    published: dict[str, Device],
    sets: dict[str, CounterSet],
    health: NodeHealth,
    in_use: frozenset[str],
) -> dict[str, Unit]:
    """GPUs that have to stay published as they were: a claim holds a device that they no longer offer (unpublishing
    it would free its counters, or offer the whole GPU beside a partition in use), or health knows a vanished one."""
    before: dict[str, list[Device]] = {}
    for device in published.values():
        before.setdefault(device.name.partition(_MIG_MARK)[0], []).append(device)
    unhealthy = {name for name, state in health.devices.items() if state.level is Level.UNHEALTHY}
    kept = {}
    for name, devices in before.items():
        needed = in_use if name in wanted else in_use | unhealthy
        offered = {d.name for d in wanted[name].devices} if name in wanted else set()
        if any(d.name in needed and d.name not in offered for d in devices):
            kept[name] = _as_before(name, devices, sets)
    return kept


def _as_before(name: str, devices: list[Device], sets: dict[str, CounterSet]) -> Unit:
    """Counters go where their set is lost: a device that refers to a set nobody published voids the whole pool."""
    used = {c.counter_set for d in devices for c in d.consumes_counters}
    counters = next((sets[n] for n in sorted(used) if n in sets), None)
    if counters is None:
        devices = [replace(d, consumes_counters=()) for d in devices]
    return Unit(name, tuple(devices), counters)


def _with_taints(
    device: Device,
    unit: Unit,
    health: NodeHealth,
    config: SliceConfig,
    published: dict[str, Device],
    retained: dict[str, Unit],
    held: frozenset[str],
) -> Device:
    """A partition has its GPU's faults as well as its own. What is merely degraded is told in taints that keep nobody
    away, unless the health policy says otherwise."""
    about = (device.name,) if device.name == unit.name else (device.name, unit.name)
    findings = sorted((finding for name in about for finding in health.of(name).findings), key=urgency)
    old = published.get(device.name)
    since: Since = {_told(t): t.time_added for t in old.taints} if old else {}
    wanted = [taint for found in _one_each(findings) for taint in _health_taints(found, since)]
    # Where a device has every taint there is, one more that keeps people away is one too many for the API.
    if unit.name in retained and len(wanted) <= MAX_TAINTS - 3:
        wanted.append(DeviceTaint(key=names.RETAINED_TAINT, effect="NoSchedule"))
    if _in_the_way(device, unit, held):
        wanted.append(DeviceTaint(key=names.HELD_TAINT, effect="NoSchedule"))
    if config.managed_taint:
        wanted.append(DeviceTaint(key=names.MANAGED_TAINT, value="true", effect="NoSchedule"))
    return replace(device, taints=tuple(replace(t, time_added=t.time_added or since.get(_told(t))) for t in wanted))


def _one_each(findings: Sequence[Finding]) -> list[Finding]:
    """The first finding of each dimension, in order of the dimensions' names."""
    first = {finding.dimension: finding for finding in reversed(findings)}
    return [first[dimension] for dimension in sorted(first)]


def _health_taints(finding: Finding, since: Since) -> list[DeviceTaint]:
    """The taint of a finding and, where gangs may stay in spite of it, the one that says for how long from then on."""
    key, value = names.HEALTH_TAINT_PREFIX + finding.dimension, _label_value(finding.code)
    taint = DeviceTaint(key=key, value=value, effect=finding.effect)
    taint = replace(taint, time_added=since.get(_told(taint)) or finding.since or None)
    if finding.grace == AT_ONCE or finding.effect != "NoSchedule":
        return [taint]
    key, value = names.GRACE_TAINT_PREFIX + finding.dimension, grace_value(finding.grace)
    return [taint, DeviceTaint(key=key, value=value, effect="None", time_added=taint.time_added)]


def _told(taint: DeviceTaint) -> tuple[str, str, str]:
    """What makes two taints the same one, so that its time stays."""
    return taint.key, taint.value, taint.effect


def _in_the_way(device: Device, unit: Unit, held: frozenset[str]) -> bool:
    """Whether a held device is this one, or one that cannot exist beside it: partitions overlap, and with the whole
    GPU, where they consume the same memory slices. A held device that is not published here is anywhere on its GPU."""
    here = {name for name in held if name.partition(_MIG_MARK)[0] == unit.name}
    if not here:
        return False
    if device.name in here:
        return True
    published = {d.name: d for d in unit.devices}
    return any(name not in published or _slices(published[name]) & _slices(device) for name in here)


def _slices(device: Device) -> set[str]:
    return {name for c in device.consumes_counters for name in c.counters if name.startswith(MEMORY_SLICE)}


def _label_value(code: str) -> str:
    """A taint's value is a label value: at most 63 of [A-Za-z0-9_.-], alphanumeric at both ends."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in code)
    return kept.strip("-_.")[:63].strip("-_.")


def _with_generation(wanted: list[ResourceSlice], ours: Sequence[ResourceSlice]) -> tuple[ResourceSlice, ...]:
    """Consumers only see a pool whose slices agree on the newest generation, so one that needs several writes gets
    a new one; a single write is atomic by itself and keeps it (as k8s.io/dynamic-resource-allocation does)."""
    newest = max((_generation(s) for s in ours), default=0)
    if newest == 0:
        return tuple(wanted)
    current = {s.metadata.name: s.spec for s in ours}
    kept = [_at_generation(s, newest) for s in wanted]
    writes = sum(current.get(s.metadata.name) != s.spec for s in kept)
    deletes = len(current.keys() - {s.metadata.name for s in kept})
    return tuple(kept if writes + deletes <= 1 else [_at_generation(s, newest + 1) for s in wanted])


def _at_generation(wanted: ResourceSlice, generation: int) -> ResourceSlice:
    pool = replace(wanted.spec.pool, generation=generation)
    return replace(wanted, spec=replace(wanted.spec, pool=pool))
