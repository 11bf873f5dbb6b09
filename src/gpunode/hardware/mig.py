"""MIG as NVML tells it: the instances a GPU has, and the kinds of instances it could have."""

from ctypes import byref, c_uint

import pynvml

from gpunode.hardware.nvml import Handle, Nvml, optional, text
from gpunode.model.hardware import MigProfile, MigSlice

_MIB = 1024 * 1024
_MAX_PLACEMENTS = 64
# Placements (first memory slices, size) by NVML's profile number for GPUs of seven compute slices, for drivers that
# list them only while MIG mode is on. The same on A100, H100 and H200 (`nvidia-smi mig -lgipp`, MIG user guide).
_SEVEN_SLICE_PLACEMENTS = {
    pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE: ((0, 1, 2, 3, 4, 5, 6), 1),
    pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1: ((0, 1, 2, 3, 4, 5, 6), 1),
    pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2: ((0, 2, 4, 6), 2),
    pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE: ((0, 2, 4), 2),
    pynvml.NVML_GPU_INSTANCE_PROFILE_3_SLICE: ((0, 4), 4),
    pynvml.NVML_GPU_INSTANCE_PROFILE_4_SLICE: ((0,), 4),
    pynvml.NVML_GPU_INSTANCE_PROFILE_7_SLICE: ((0,), 8),
}


def profiles(nvml: Nvml, handle: Handle) -> tuple[MigProfile, ...]:
    """Every profile with a legal placement, smallest first; empty where the GPU has no MIG.

    Raises pynvml.NVMLError when the GPU does not answer.
    """
    infos = {
        number: info
        for number in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT)
        if (info := optional(nvml.nvmlDeviceGetGpuInstanceProfileInfoV, handle, number)) is not None
    }
    seven = pynvml.NVML_GPU_INSTANCE_PROFILE_7_SLICE in infos
    found = []
    for number, info in infos.items():
        known = _SEVEN_SLICE_PLACEMENTS.get(number, ((), 0)) if seven else ((), 0)
        starts, size = _placements(nvml, handle, int(info.id)) or known
        if starts:
            found.append(_profile(info, starts, size))
    return tuple(sorted(found, key=lambda p: (p.slices, p.size, p.name)))


def existing_instances(nvml: Nvml, handle: Handle, known: tuple[MigProfile, ...]) -> tuple[MigSlice, ...]:
    """The MIG devices of a GPU in MIG mode, by placement. Raises pynvml.NVMLError when the GPU does not answer."""
    names = {profile.id: profile.name for profile in known}
    found: list[MigSlice] = []
    for index in range(optional(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        device = optional(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if device is None:
            continue
        gi = nvml.nvmlDeviceGetGpuInstanceId(device)
        info = nvml.nvmlGpuInstanceGetInfo(nvml.nvmlDeviceGetGpuInstanceById(handle, gi))
        memory = optional(nvml.nvmlDeviceGetMemoryInfo, device)
        found.append(
            MigSlice(
                uuid=text(nvml.nvmlDeviceGetUUID(device)),
                profile=names.get(int(info.profileId), f"id{int(info.profileId)}"),
                placement_start=int(info.placement.start),
                placement_size=int(info.placement.size),
                gpu_instance=gi,
                compute_instance=nvml.nvmlDeviceGetComputeInstanceId(device),
                memory_bytes=int(memory.total) if memory is not None else 0,
            )
        )
    return tuple(sorted(found, key=lambda m: (m.placement_start, m.gpu_instance, m.compute_instance)))


def _placements(nvml: Nvml, handle: Handle, profile_id: int) -> tuple[tuple[int, ...], int] | None:
    """First memory slices and size; None where the driver does not tell (now)."""
    call = nvml.nvmlDeviceGetGpuInstancePossiblePlacements
    count = c_uint(0)
    if optional(call, handle, profile_id, None, byref(count)) is None or not 0 < count.value <= _MAX_PLACEMENTS:
        return None
    places = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    if optional(call, handle, profile_id, places, byref(count)) is None:
        return None
    return tuple(sorted(int(p.start) for p in places)), int(places[0].size)


def _profile(info: object, starts: tuple[int, ...], size: int) -> MigProfile:
    read = info.__getattribute__
    return MigProfile(
        name=text(read("name")).removeprefix("MIG ") or f"id{int(read('id'))}",
        id=int(read("id")),
        slices=int(read("sliceCount")),
        starts=starts,
        size=size,
        memory_bytes=int(read("memorySizeMB")) * _MIB,
        multiprocessors=int(read("multiprocessorCount")),
        copy_engines=int(read("copyEngineCount")),
        decoders=int(read("decoderCount")),
        encoders=int(read("encoderCount")),
        jpeg_engines=int(read("jpegCount")),
        ofa_engines=int(read("ofaCount")),
    )
