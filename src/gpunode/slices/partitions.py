"""MIG as DRA devices: instances that exist, and every instance that could, over counters they share."""

from typing import Final

from msgspec.structs import replace

from gpunode.model.hardware import Gpu, MigProfile, MigSlice, device_name, mig_device_name
from gpunode.model.quantity import format_bytes
from gpunode.model.resource import Attribute, Capacity, Counter, CounterConsumption, CounterSet, Device
from gpunode.slices.describe import text_attribute

# Engine counts of a profile: field, counter name (a DNS label), capacity name (an identifier).
_ENGINES = (
    ("copy_engines", "copy-engines", "copyEngines"),
    ("decoders", "decoders", "decoders"),
    ("encoders", "encoders", "encoders"),
    ("jpeg_engines", "jpeg-engines", "jpegEngines"),
    ("ofa_engines", "ofa-engines", "ofaEngines"),
)
# Counters of single memory slices begin with this; partitions that have one in common cannot exist side by side.
MEMORY_SLICE: Final = "memory-slice-"
# What a partition does not inherit from its GPU: MIG has no NVLink peer access.
_GPU_ONLY = ("uuid", "nvlinkDomain", "nvlinkLinksActive", "nvlinkLinksTotal", "fabricState")


def static_partitions(gpu: Gpu, whole: Device) -> tuple[Device, ...]:
    """The instances an administrator made, by placement. whole: the GPU itself as a device."""
    profiles = {profile.name: profile for profile in gpu.mig_profiles}
    devices: dict[str, Device] = {}
    for instance in gpu.mig:
        name = mig_device_name(gpu.pci, instance.profile, instance.placement_start)
        if name in devices:  # a GPU instance that is cut further into compute instances
            name = f"{name}-ci{instance.compute_instance}"
        devices[name] = _static(name, instance, profiles.get(instance.profile), gpu, whole)
    return tuple(devices.values())


def dynamic_partitions(gpu: Gpu, whole: Device) -> tuple[tuple[Device, ...], CounterSet]:
    """Every profile at every placement, and the whole GPU, each consuming what it takes from one counter set.

    Devices are in the order in which they should be given out: small profiles first and from the high end of the
    memory slices, so that the low half, the only place of the largest partitions, stays whole longest.
    """
    counters = counter_set(gpu)
    devices: list[Device] = []
    for profile in gpu.mig_profiles:  # placements differ only in memory slices, so the rest is made once
        model = replace(_partition("", profile.name, gpu, whole), capacity=_capacity(profile))
        taken = _taken(profile)
        for start in sorted(profile.starts, reverse=True):
            use = CounterConsumption(counter_set=counters.name, counters=taken | _memory_slices(start, profile.size))
            name = mig_device_name(gpu.pci, profile.name, start)
            devices.append(replace(model, name=name, consumes_counters=(use,)))
    everything = CounterConsumption(counter_set=counters.name, counters=counters.counters)
    return (*devices, replace(whole, consumes_counters=(everything,))), counters


def counter_set(gpu: Gpu) -> CounterSet:
    """What there is to share on a GPU. Engines: as many as the largest profile has."""
    engines = {name: max(getattr(p, field) for p in gpu.mig_profiles) for field, name, _ in _ENGINES}
    widest = max(p.multiprocessors for p in gpu.mig_profiles)
    memory = max(gpu.memory_bytes, *(p.memory_bytes for p in gpu.mig_profiles))
    slices = max(start + p.size for p in gpu.mig_profiles for start in p.starts)
    return CounterSet(
        name=f"{device_name(gpu.pci)}-counters",
        counters={
            "memory": Counter(value=format_bytes(memory)),
            "multiprocessors": Counter(value=str(max(gpu.multiprocessors or 0, widest))),
            **_counters(engines),
            **_memory_slices(0, slices),
        },
    )


def consumption(profile: MigProfile, start: int) -> dict[str, Counter]:
    """What one instance takes, from the profile table: multiprocessors are not in proportion to slices."""
    return _taken(profile) | _memory_slices(start, profile.size)


def _taken(profile: MigProfile) -> dict[str, Counter]:
    return {
        "memory": Counter(value=format_bytes(profile.memory_bytes)),
        "multiprocessors": Counter(value=str(profile.multiprocessors)),
        **_counters({name: getattr(profile, field) for field, name, _ in _ENGINES}),
    }


def engine_capacity(profiles: tuple[MigProfile, ...]) -> dict[str, Capacity]:
    """Engines of the whole GPU, where the MIG profiles tell."""
    counts = {name: max((getattr(p, field) for p in profiles), default=0) for field, _, name in _ENGINES}
    return {name: Capacity(value=str(count)) for name, count in counts.items() if count}


def _static(name: str, instance: MigSlice, profile: MigProfile | None, gpu: Gpu, whole: Device) -> Device:
    made = _partition(name, instance.profile, gpu, whole)
    uuid = text_attribute(instance.uuid)
    capacity = _capacity(profile) if profile else {}
    if instance.memory_bytes:
        capacity["memory"] = Capacity(value=format_bytes(instance.memory_bytes))
    return replace(made, attributes=made.attributes | ({"uuid": uuid} if uuid else {}), capacity=capacity)


def _partition(name: str, profile: str, gpu: Gpu, whole: Device) -> Device:
    inherited = {key: value for key, value in whole.attributes.items() if key not in _GPU_ONLY}
    own = {
        "type": Attribute(string="mig"),
        "parentUUID": text_attribute(gpu.uuid),
        "profile": text_attribute(profile),
    }
    return Device(name=name, attributes=inherited | {key: value for key, value in own.items() if value is not None})


def _capacity(profile: MigProfile) -> dict[str, Capacity]:
    return {
        "memory": Capacity(value=format_bytes(profile.memory_bytes)),
        "multiprocessors": Capacity(value=str(profile.multiprocessors)),
        **engine_capacity((profile,)),
    }


def _counters(counts: dict[str, int]) -> dict[str, Counter]:
    return {name: Counter(value=str(count)) for name, count in counts.items() if count}


def _memory_slices(start: int, size: int) -> dict[str, Counter]:
    return {f"{MEMORY_SLICE}{n}": Counter(value="1") for n in range(start, start + size)}
