"""Which devices each GPU is published as, and how a node's devices are laid out in slices."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, TypeVar, get_args

from msgspec.structs import replace

from gpunode.model.hardware import Gpu, Inventory, device_name
from gpunode.model.meta import ObjectMeta
from gpunode.model.quantity import format_bytes
from gpunode.model.resource import (
    Capacity,
    CounterSet,
    Device,
    Pool,
    RequestPolicy,
    ResourceSlice,
    ResourceSliceSpec,
    ValidRange,
)
from gpunode.slices.describe import gpu_device, nearest_nics, nvlink_domains
from gpunode.slices.partitions import dynamic_partitions, engine_capacity, static_partitions

# A slice holds 128 devices, but 64 as soon as one has a taint. Always 64, so that a taint never moves a device.
DEVICES_PER_SLICE = 64
COUNTER_SETS_PER_SLICE = 8
_NAME_LIMIT = 253
_GIB = 1024**3
_GPU_NAME = re.compile(r"gpu-[0-9a-f]{4,8}-[0-9a-f]{2}-[0-9a-f]{2}-[0-7]")

GpuMode = Literal["none", "static", "dynamic", "shared"]


@dataclass(frozen=True)
class SliceConfig:
    """driver: DRA driver name. node: node and pool name. managed_taint: whether the agent keeps kube-scheduler away.

    mode: how GPUs are given out, and by device name in `modes` where one differs. none: only whole, in MIG mode not
    at all. static: whole, in MIG mode the instances that exist. dynamic: whole or as any MIG instance, made when a
    claim is prepared (GPUs without MIG: whole). shared: to several claims at once, each with its share of memory
    (GPUs of less than 2 GiB: whole).
    """

    driver: str
    node: str
    managed_taint: bool = False
    mode: GpuMode = "static"
    modes: Mapping[str, GpuMode] = field(default_factory=dict)

    def mode_of(self, gpu: Gpu) -> GpuMode:
        return self.modes.get(device_name(gpu.pci), self.mode)


@dataclass(frozen=True)
class Unit:
    """All devices of one GPU, which stay together; name is the whole GPU's device name."""

    name: str
    devices: tuple[Device, ...] = ()
    counters: CounterSet | None = None

    def having(self, devices: Iterable[Device]) -> "Unit":
        """The same with other devices."""
        return Unit(self.name, tuple(devices), self.counters)


def parse_modes(texts: Sequence[str]) -> tuple[GpuMode, dict[str, GpuMode]]:
    """From "static" or "gpu-0000-07-00-0=dynamic", the last of a kind counts: the mode of all, and of single GPUs.

    Raises ValueError naming what is not understood.
    """
    general: GpuMode = "static"
    single: dict[str, GpuMode] = {}
    for text in texts:
        device, separator, word = text.rpartition("=")
        mode = next((m for m in get_args(GpuMode) if m == word.strip()), None)
        if mode is None or (separator and not _GPU_NAME.fullmatch(device.strip())):
            modes = ", ".join(get_args(GpuMode))
            raise ValueError(f"GPU mode {text[:80]!r} is not MODE or DEVICE=MODE with a mode of {modes}")
        if separator:
            single[device.strip()] = mode
        else:
            general = mode
    return general, single


def units(inventory: Inventory, config: SliceConfig) -> dict[str, Unit]:
    """What each GPU is published as, by device name of the whole GPU, in PCI order; without taints."""
    domains, nics = nvlink_domains(inventory), nearest_nics(inventory)
    made = [
        _unit(gpu, gpu_device(gpu, inventory, domains.get(gpu.uuid), nics.get(gpu.uuid)), config.mode_of(gpu))
        for gpu in sorted(inventory.gpus, key=lambda g: str(g.pci))
    ]
    return {unit.name: unit for unit in made}


def _unit(gpu: Gpu, whole: Device, mode: GpuMode) -> Unit:
    if mode == "dynamic" and gpu.mig_profiles:
        devices, counters = dynamic_partitions(gpu, _with_engines(gpu, whole))
        return Unit(whole.name, devices, counters)
    if gpu.mig_enabled:
        return Unit(whole.name, static_partitions(gpu, whole) if mode == "static" else ())
    if mode == "shared" and gpu.memory_bytes >= 2 * _GIB:
        return Unit(whole.name, (_shared(gpu, whole),))
    return Unit(whole.name, (_with_engines(gpu, whole),))


def _with_engines(gpu: Gpu, whole: Device) -> Device:
    return replace(whole, capacity=whole.capacity | engine_capacity(gpu.mig_profiles))


def _shared(gpu: Gpu, whole: Device) -> Device:
    """Memory in steps of a GiB; a claim that names no amount gets all of it, so sharing is always asked for.

    Memory is the only capacity: of one without a policy each claim would take everything. Never with counters,
    whose sums the allocators before 1.37 get wrong for devices that several claims hold.
    """
    memory = format_bytes(gpu.memory_bytes // _GIB * _GIB)
    policy = RequestPolicy(default=memory, valid_range=ValidRange(min="1Gi", max=memory, step="1Gi"))
    return replace(
        whole, allow_multiple_allocations=True, capacity={"memory": Capacity(value=memory, request_policy=policy)}
    )


def slice_name(config: SliceConfig, tail: str) -> str:
    """`<node>-<driver>-<tail>`, a DNS subdomain of at most 253 characters; too long a node name is cut and hashed."""
    tail = f"-{config.driver.lower()}-{tail}"
    if len(config.node) + len(tail) <= _NAME_LIMIT:
        return config.node + tail
    digest = hashlib.sha256(config.node.encode()).hexdigest()[:10]
    head = config.node[: _NAME_LIMIT - len(tail) - len(digest) - 1].rstrip("-.")
    return f"{head}-{digest}{tail}"


def pack(wanted: Sequence[Unit], config: SliceConfig) -> list[ResourceSlice]:
    """Slices of generation 1. Undivided GPUs share slices; one with counters has its own, so that a change to it
    rewrites nothing else. Allocators try slices by name and devices in order."""
    undivided = list(chain.from_iterable(u.devices for u in wanted if u.counters is None))
    divided = [u for u in wanted if u.counters is not None]
    specs: list[tuple[str, tuple[Device, ...], tuple[CounterSet, ...]]] = [
        (str(index), tuple(part), ()) for index, part in enumerate(_chunks(undivided, DEVICES_PER_SLICE))
    ]
    sets = [u.counters for u in divided if u.counters is not None]
    specs += [
        (f"counters-{index}", (), tuple(part)) for index, part in enumerate(_chunks(sets, COUNTER_SETS_PER_SLICE))
    ]
    for unit in divided:
        parts = _chunks(unit.devices, DEVICES_PER_SLICE)
        specs += [(unit.name + (f"-{i}" if i else ""), tuple(part), ()) for i, part in enumerate(parts)]
    specs = specs or [("0", (), ())]
    return [_slice(config, tail, devices, counters, len(specs)) for tail, devices, counters in specs]


def _slice(
    config: SliceConfig, tail: str, devices: tuple[Device, ...], counters: tuple[CounterSet, ...], count: int
) -> ResourceSlice:
    return ResourceSlice(
        metadata=ObjectMeta(name=slice_name(config, tail)),
        spec=ResourceSliceSpec(
            driver=config.driver,
            pool=Pool(name=config.node, generation=1, resource_slice_count=count),
            node_name=config.node,
            devices=devices,
            shared_counters=counters,
        ),
    )


T = TypeVar("T")


def _chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
