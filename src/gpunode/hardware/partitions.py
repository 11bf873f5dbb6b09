"""Makes and removes MIG instances when claims come and go."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_uint
from dataclasses import dataclass

import pynvml

from gpunode.hardware.nodes import mig_device, whole_gpu
from gpunode.hardware.nvml import Handle, Nvml, optional, text, words
from gpunode.hardware.roots import Roots
from gpunode.model.errors import HardwareError, InUseError
from gpunode.model.hardware import Gpu, MigProfile, device_name, mig_device_name
from gpunode.model.injection import DeviceNodes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Place:
    """Where a partition goes; profile None means the whole GPU."""

    gpu: Gpu
    name: str
    profile: MigProfile | None = None
    start: int = 0


class MigPartitioner:
    """Partitions of the GPUs that `gpus` returns: those whose instances belong to claims, not to an administrator.

    Blocking, one call at a time. Every method finishes what an earlier, killed one began. A whole GPU can be created
    as well: MIG mode is then switched off, as CUDA sees no undivided GPU while it is on.
    """

    def __init__(self, nvml: Nvml, roots: Roots, gpus: Callable[[], Sequence[Gpu]]) -> None:
        self._nvml = nvml
        self._roots = roots
        self._gpus = gpus

    def create(self, device: str) -> DeviceNodes:
        """Make the partition or adopt the one that is there; one without its compute instance is made anew.

        Raises HardwareError with the driver's words.
        """
        place = self._places().get(device)
        if place is None:
            raise HardwareError(f"{device} is not a partition that can be made on this node")
        with _told(f"{device} cannot be made"):
            handle = self._nvml.nvmlDeviceGetHandleByUUID(place.gpu.uuid)
            self._set_mode(handle, place)
            if place.profile is None:
                return whole_gpu(place.gpu, self._roots)
            instance = self._complete(handle, place.profile, place.start)
            gi = int(self._nvml.nvmlGpuInstanceGetInfo(instance).id)
            uuid, ci = self._mig_device(handle, gi)
            return mig_device(place.gpu, device, uuid, gi, ci, self._roots)

    def remove(self, device: str) -> None:
        """Remove the partition; one that is not there, or whose GPU is gone, is removed already.

        Raises InUseError while a process uses it, HardwareError otherwise.
        """
        place = self._places().get(device)
        if place is None or place.profile is None:
            return
        with _told(f"{device} cannot be removed"):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByUUID(place.gpu.uuid)
            except (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_NotFound):
                return  # a reset, which a lost GPU needs, leaves no instance
            for instance in self._instances(handle, place.profile, place.start):
                self._destroy(instance)

    def existing(self) -> frozenset[str]:
        """Names of the partitions that are there, whole or half-made. Raises HardwareError."""
        found = set()
        for gpu in self._gpus():
            with _told(f"partitions of {device_name(gpu.pci)} cannot be listed"):
                try:
                    handle = self._nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                except (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_NotFound):
                    continue
                for profile in gpu.mig_profiles:
                    for start in profile.starts:
                        if self._instances(handle, profile, start):
                            found.add(mig_device_name(gpu.pci, profile.name, start))
        return frozenset(found)

    def _places(self) -> dict[str, _Place]:
        places = [_Place(gpu, device_name(gpu.pci)) for gpu in self._gpus()]
        places += [
            _Place(gpu, mig_device_name(gpu.pci, profile.name, start), profile, start)
            for gpu in self._gpus()
            for profile in gpu.mig_profiles
            for start in profile.starts
        ]
        return {place.name: place for place in places}

    def _set_mode(self, handle: Handle, place: _Place) -> None:
        wanted = pynvml.NVML_DEVICE_MIG_DISABLE if place.profile is None else pynvml.NVML_DEVICE_MIG_ENABLE
        if (self._nvml.nvmlDeviceGetMigMode(handle))[0] == wanted:
            return
        state = "on" if place.profile is not None else "off"
        status = self._nvml.nvmlDeviceSetMigMode(handle, wanted)
        if status != pynvml.NVML_SUCCESS or self._nvml.nvmlDeviceGetMigMode(handle)[0] != wanted:
            raise HardwareError(f"MIG mode of {device_name(place.gpu.pci)} goes {state} only when the GPU is reset")
        logger.info("switched MIG mode of %s %s", device_name(place.gpu.pci), state)

    def _complete(self, handle: Handle, profile: MigProfile, start: int) -> Handle:
        """The GPU instance with its compute instance."""
        for instance in self._instances(handle, profile, start):
            if self._compute_instances(instance):
                return instance
            self._destroy(instance)
        place = pynvml.c_nvmlGpuInstancePlacement_t(start, profile.size)
        instance = self._nvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile.id, byref(place))
        try:
            self._nvml.nvmlGpuInstanceCreateComputeInstance(instance, self._filling(instance, profile))
        except (pynvml.NVMLError, HardwareError):
            self._nvml.nvmlGpuInstanceDestroy(instance)
            raise
        return instance

    def _filling(self, instance: Handle, profile: MigProfile) -> int:
        """Id of the compute instance profile that takes all slices of the GPU instance."""
        for number in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            shared = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
            info = optional(self._nvml.nvmlGpuInstanceGetComputeInstanceProfileInfoV, instance, number, shared)
            if info is not None and int(info.sliceCount) == profile.slices:
                return int(info.id)
        raise HardwareError(f"the driver offers no compute instance of {profile.slices} slices for {profile.name}")

    def _instances(self, handle: Handle, profile: MigProfile, start: int) -> list[Handle]:
        """GPU instances of this profile at this place: at most one, as placements do not overlap."""
        found = (pynvml.c_nvmlGpuInstance_t * 16)()
        count = c_uint(0)
        if optional(self._nvml.nvmlDeviceGetGpuInstances, handle, profile.id, found, byref(count)) is None:
            return []
        instances = [found[i] for i in range(min(count.value, len(found)))]
        return [i for i in instances if self._nvml.nvmlGpuInstanceGetInfo(i).placement.start == start]

    def _compute_instances(self, instance: Handle) -> list[Handle]:
        all_found: list[Handle] = []
        for number in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            shared = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
            info = optional(self._nvml.nvmlGpuInstanceGetComputeInstanceProfileInfoV, instance, number, shared)
            if info is None:
                continue
            found = (pynvml.c_nvmlComputeInstance_t * 16)()
            count = c_uint(0)
            self._nvml.nvmlGpuInstanceGetComputeInstances(instance, int(info.id), found, byref(count))
            all_found += [found[i] for i in range(min(count.value, len(found)))]
        return all_found

    def _destroy(self, instance: Handle) -> None:
        for compute in self._compute_instances(instance):
            self._nvml.nvmlComputeInstanceDestroy(compute)
        self._nvml.nvmlGpuInstanceDestroy(instance)

    def _mig_device(self, handle: Handle, gi: int) -> tuple[str, int]:
        """UUID and compute instance id of the MIG device on a GPU instance."""
        for index in range(self._nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            device = optional(self._nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            if device is not None and self._nvml.nvmlDeviceGetGpuInstanceId(device) == gi:
                uuid = text(self._nvml.nvmlDeviceGetUUID(device))
                return uuid, self._nvml.nvmlDeviceGetComputeInstanceId(device)
        raise HardwareError(f"the driver made GPU instance {gi} but shows no MIG device for it")


@contextmanager
def _told(what: str) -> Iterator[None]:
    """NVML's errors as ours."""
    try:
        yield
    except pynvml.NVMLError_InUse as error:
        raise InUseError(f"{what}: {words(error)}") from error
    except pynvml.NVMLError as error:
        raise HardwareError(f"{what}: {words(error)}") from error
