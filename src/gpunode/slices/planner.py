"""From hardware and its health to the ResourceSlices that describe it. Pure: same input, same slices.

Health enters here and nowhere else, so no publish path can forget a taint.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from gpunode.model import names
from gpunode.model.hardware import Inventory
from gpunode.model.health import Level, NodeHealth
from gpunode.model.meta import ObjectMeta
from gpunode.model.resource import Device, DeviceTaint, Pool, ResourceSlice, ResourceSliceSpec
from gpunode.slices.describe import gpu_device, nvlink_domains

# A slice holds 128 devices, but 64 as soon as one has a taint. Always 64, so that a taint never moves a device.
DEVICES_PER_SLICE = 64
_NAME_LIMIT = 253

TaintEffect = Literal["None", "NoSchedule", "NoExecute"]


@dataclass(frozen=True)
class SliceConfig:
    """driver: DRA driver name. node: node and pool name. managed_taint: whether the agent keeps kube-scheduler away."""

    driver: str
    node: str
    taint_effect: TaintEffect = "NoSchedule"
    managed_taint: bool = False


def plan(
    inventory: Inventory,
    health: NodeHealth,
    config: SliceConfig,
    existing: Sequence[ResourceSlice] = (),
    in_use: frozenset[str] = frozenset(),
) -> tuple[ResourceSlice, ...]:
    """The slices the node's pool should consist of; an empty node gets one empty slice (driver is up, no devices).

    existing: the slices now in the API, which tell taint times, the generation, and how a vanished device looked.
    in_use: names of devices in live allocations; they stay published even when the hardware is gone.
    """
    ours = [s for s in existing if s.spec.driver == config.driver and s.spec.pool.name == config.node]
    published = {d.name: d for s in sorted(ours, key=_generation) for d in s.spec.devices}
    domains = nvlink_domains(inventory)
    devices = [gpu_device(gpu, inventory, domains.get(gpu.uuid)) for gpu in inventory.gpus]
    devices += _vanished(published, {d.name for d in devices}, health, in_use)
    devices.sort(key=lambda d: d.name)
    tainted = [_with_taints(d, health, config, published.get(d.name)) for d in devices]
    return _with_generation(_pack(tainted, config), ours)


def slice_name(config: SliceConfig, index: int) -> str:
    """`<node>-<driver>-<index>`, a DNS subdomain of at most 253 characters; too long a node name is cut and hashed."""
    tail = f"-{config.driver.lower()}-{index}"
    if len(config.node) + len(tail) <= _NAME_LIMIT:
        return config.node + tail
    digest = hashlib.sha256(config.node.encode()).hexdigest()[:10]
    head = config.node[: _NAME_LIMIT - len(tail) - len(digest) - 1].rstrip("-.")
    return f"{head}-{digest}{tail}"


def _generation(found: ResourceSlice) -> int:
    return found.spec.pool.generation


def _vanished(
    published: dict[str, Device], present: set[str], health: NodeHealth, in_use: frozenset[str]
) -> list[Device]:
    """Devices that are gone but must stay: allocated, or known to health as lost (taint, not disappearance)."""
    unhealthy = {name for name, state in health.devices.items() if state.level is Level.UNHEALTHY}
    return [d for name, d in published.items() if name not in present and name in (in_use | unhealthy)]


def _with_taints(device: Device, health: NodeHealth, config: SliceConfig, published: Device | None) -> Device:
    before = {(t.key, t.value, t.effect): t.time_added for t in published.taints} if published else {}
    wanted = [
        DeviceTaint(
            key=names.HEALTH_TAINT_PREFIX + finding.dimension,
            value=_label_value(finding.code),
            effect=config.taint_effect,
            time_added=finding.since or None,
        )
        for finding in sorted(health.of(device.name).findings, key=lambda f: f.dimension)
        if finding.level is Level.UNHEALTHY
    ]
    if config.managed_taint:
        wanted.append(DeviceTaint(key=names.MANAGED_TAINT, effect="NoSchedule"))
    taints = [replace(t, time_added=before.get((t.key, t.value, t.effect)) or t.time_added) for t in _one_each(wanted)]
    return replace(device, taints=tuple(taints))


def _one_each(taints: Iterable[DeviceTaint]) -> list[DeviceTaint]:
    """The API wants each key and effect once on a device; the first one stands."""
    return list({(t.key, t.effect): t for t in reversed(list(taints))}.values())[::-1]


def _label_value(code: str) -> str:
    """A taint's value is a label value: at most 63 of [A-Za-z0-9_.-], alphanumeric at both ends."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in code)
    return kept[:63].strip("-_.")


def _pack(devices: Sequence[Device], config: SliceConfig) -> list[ResourceSlice]:
    chunks = [tuple(devices[i : i + DEVICES_PER_SLICE]) for i in range(0, len(devices), DEVICES_PER_SLICE)] or [()]
    return [
        ResourceSlice(
            metadata=ObjectMeta(name=slice_name(config, index)),
            spec=ResourceSliceSpec(
                driver=config.driver,
                pool=Pool(name=config.node, generation=1, resource_slice_count=len(chunks)),
                node_name=config.node,
                devices=chunk,
            ),
        )
        for index, chunk in enumerate(chunks)
    ]


def _with_generation(wanted: list[ResourceSlice], ours: Sequence[ResourceSlice]) -> tuple[ResourceSlice, ...]:
    """Consumers only see a pool whose slices agree on the newest generation, so one that needs several writes gets
    a new one; a single write is atomic by itself and keeps it (as k8s.io/dynamic-resource-allocation does)."""
    newest = max((_generation(s) for s in ours), default=0)
    current = {s.metadata.name: s.spec for s in ours}
    if newest == 0:
        return tuple(wanted)
    kept = [_at_generation(s, newest) for s in wanted]
    writes = sum(current.get(s.metadata.name) != s.spec for s in kept)
    deletes = len(current.keys() - {s.metadata.name for s in kept})
    return tuple(kept if writes + deletes <= 1 else [_at_generation(s, newest + 1) for s in wanted])


def _at_generation(wanted: ResourceSlice, generation: int) -> ResourceSlice:
    pool = replace(wanted.spec.pool, generation=generation)
    return replace(wanted, spec=replace(wanted.spec, pool=pool))
