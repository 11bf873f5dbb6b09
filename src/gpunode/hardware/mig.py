"""MIG as NVML tells it: the instances a GPU has."""

import pynvml

from gpunode.hardware.nvml import Handle, Nvml, optional, text
from gpunode.model.hardware import MigSlice

_MIB = 1024 * 1024


def existing_instances(nvml: Nvml, handle: Handle) -> tuple[MigSlice, ...]:
    """The MIG devices of a GPU in MIG mode, by placement. Raises pynvml.NVMLError when the GPU is lost."""
    names = _profile_names(nvml, handle)
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
                profile=names.get(int(info.profileId), ""),
                placement_start=int(info.placement.start),
                placement_size=int(info.placement.size),
                gpu_instance=gi,
                compute_instance=nvml.nvmlDeviceGetComputeInstanceId(device),
                memory_bytes=int(memory.total) if memory is not None else 0,
            )
        )
    return tuple(sorted(found, key=lambda m: (m.placement_start, m.gpu_instance, m.compute_instance)))


def _profile_names(nvml: Nvml, handle: Handle) -> dict[int, str]:
    """Profile name ("1g.10gb") by the driver's profile id, which is not NVML's profile number."""
    names: dict[int, str] = {}
    for number in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        info = optional(nvml.nvmlDeviceGetGpuInstanceProfileInfoV, handle, number)
        if info is not None:
            names[int(info.id)] = text(info.name).removeprefix("MIG ")
    return names
