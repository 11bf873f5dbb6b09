"""An NVML without a driver: pynvml's functions over the state of a fake machine.

Handles, structures, constants and errors are pynvml's own. Documentation of each call: NVIDIA's NVML reference.
"""

# Names and parameters are pynvml's, so that this object can stand in for the module.
# ruff: noqa: N802, N803

import time
from collections.abc import Sequence
from typing import Any

import pynvml

from gpunode.hardware.board import BoardMigProfile
from gpunode.hardware.fake.handles import Kind, device_handle, event_number, fail, lookup, make
from gpunode.hardware.fake.state import EventSet, FakeGpu, FakeState, MigInstance, SwitchEnd
from gpunode.hardware.nvml import Handle, cores_per_multiprocessor
from gpunode.model.hardware import PciAddress

_MIB = 1024 * 1024
_BRANDS = {
    "Nvidia": pynvml.NVML_BRAND_NVIDIA,
    "Tesla": pynvml.NVML_BRAND_TESLA,
    "Quadro": pynvml.NVML_BRAND_QUADRO,
    "NvidiaRTX": pynvml.NVML_BRAND_NVIDIA_RTX,
    "GeForce": pynvml.NVML_BRAND_GEFORCE,
}
_ARCHITECTURES = {
    "Volta": pynvml.NVML_DEVICE_ARCH_VOLTA,
    "Turing": pynvml.NVML_DEVICE_ARCH_TURING,
    "Ampere": pynvml.NVML_DEVICE_ARCH_AMPERE,
    "Ada Lovelace": pynvml.NVML_DEVICE_ARCH_ADA,
    "Hopper": pynvml.NVML_DEVICE_ARCH_HOPPER,
    "Blackwell": pynvml.NVML_DEVICE_ARCH_BLACKWELL,
}
_SUPPORTED_EVENTS = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError
_MAX_MIG = 7
_GPU_ONLY = (Kind.GPU,)
_COMPUTE_MODES = (
    pynvml.NVML_COMPUTEMODE_DEFAULT,
    pynvml.NVML_COMPUTEMODE_PROHIBITED,
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
)
# These replace faulty memory by pages; rows came with Ampere.
_PAGE_RETIREMENT = ("Volta", "Turing")
# Compute slices by compute instance profile; numbers are NVML's.
_COMPUTE_SLICES = {
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE: 1,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_2_SLICE: 2,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE: 3,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_4_SLICE: 4,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_7_SLICE: 7,
}


class FakeNvml:
    """See gpunode.hardware.nvml.Nvml for the functions; all state is in `state`."""

    def __init__(self, state: FakeState) -> None:
        self.state = state
        self._switch_infos: dict[int, Any] = {}

    def __getattribute__(self, name: str) -> Any:
        """A function that the (older) driver lacks fails when it is called, as in pynvml."""
        if name[:4] == "nvml" and name in object.__getattribute__(self, "state").missing:
            return lambda *_args, **_kwargs: fail(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return object.__getattribute__(self, name)

    # System

    def nvmlInit(self) -> None:
        with self.state.changed:
            if not self.state.saved.driver_loaded:
                fail(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
            self.state.initialized += 1

    def nvmlShutdown(self) -> None:
        with self.state.changed:
            self._ready()
            self.state.initialized -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._ready()
        return self.state.saved.driver_version

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        self._ready()
        major, minor = self.state.board.cuda_version.split(".")
        return int(major) * 1000 + int(minor) * 10

    # Devices

    def nvmlDeviceGetCount(self) -> int:
        self._ready()
        return len(self.state.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        self._ready()
        if not 0 <= index < len(self.state.gpus):
            fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._handle(self.state.gpus[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Handle:
        self._ready()
        found = next((g for g in self.state.gpus if g.uuid == uuid), None)
        return self._handle(found) if found else fail(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        gpu, instance = self._device(handle)
        return gpu.mig_uuid(instance) if instance else gpu.uuid

    def nvmlDeviceGetPciInfo_v3(self, handle: Handle) -> Any:
        return self._pci_info(self._gpu(handle).pci, self.state.board.pci_device_id)

    def nvmlDeviceGetMinorNumber(self, handle: Handle) -> int:
        return self._gpu(handle).index

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        gpu, instance = self._device(handle)
        return self.state.board.product + (f" MIG {instance.profile}" if instance and gpu else "")

    def nvmlDeviceGetBrand(self, handle: Handle) -> int:
        self._gpu(handle)
        return int(_BRANDS[self.state.board.brand])

    def nvmlDeviceGetArchitecture(self, device: Handle) -> int:
        self._gpu(device)
        return int(_ARCHITECTURES[self.state.board.architecture])

    def nvmlDeviceGetCudaComputeCapability(self, handle: Handle) -> tuple[int, int]:
        self._gpu(handle)
        major, minor = self.state.board.compute_capability.split(".")
        return int(major), int(minor)

    def nvmlDeviceGetNumGpuCores(self, device: Handle) -> int:
        capability = self.nvmlDeviceGetCudaComputeCapability(device)
        return self.state.board.multiprocessors * cores_per_multiprocessor(capability)

    def nvmlDeviceGetSerial(self, handle: Handle) -> str:
        return f"16{int(self._gpu(handle).uuid[4:12], 16):011d}"

    def nvmlDeviceGetMemoryInfo(self, handle: Handle, version: int | None = None) -> Any:
        _, instance = self._device(handle)
        info = pynvml.c_nvmlMemory_v2_t() if version else pynvml.c_nvmlMemory_t()
        mib = self.state.profile(instance.profile).memory_mib if instance else self.state.board.memory_mib
        if mib == 0:
            fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info.total = info.free = mib * _MIB
        return info

    def nvmlDeviceGetComputeMode(self, handle: Handle) -> int:
        return self._gpu(handle).saved.compute_mode

    def nvmlDeviceSetComputeMode(self, handle: Handle, mode: int) -> None:
        """Root only on real drivers. EXCLUSIVE_THREAD is gone from them."""
        with self.state.changed:
            gpu = self._gpu(handle)
            if mode not in _COMPUTE_MODES:
                fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            gpu.saved.compute_mode = mode
            self.state.save()

    # NVLink and fabric

    def nvmlDeviceGetNvLinkState(self, device: Handle, link: int) -> int:
        gpu = self._link(device, link)
        return int(pynvml.NVML_FEATURE_DISABLED if link in gpu.saved.dead_links else pynvml.NVML_FEATURE_ENABLED)

    def nvmlDeviceGetNvLinkVersion(self, device: Handle, link: int) -> int:
        self._link(device, link)
        return self.state.board.nvlink.version

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Handle, link: int) -> int:
        gpu = self._link(handle, link)
        if link in gpu.saved.dead_links:
            return int(pynvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN)
        switched = self.state.board.nvlink.to == "switch"
        return int(pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if switched else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: Handle, link: int) -> Any:
        gpu = self._link(device, link)
        if (peer := self._peer(gpu, link)) is not None:
            return self._pci_info(peer.pci, self.state.board.pci_device_id)
        end = self._switch_end(gpu, link)
        if end is None:
            fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        infos = self._switch_infos
        if end.switch not in infos:
            infos[end.switch] = self._pci_info(end.pci, "0x0")
        return infos[end.switch]

    def nvmlDeviceGetP2PStatus(self, device1: Handle, device2: Handle, p2pIndex: int) -> int:
        a, b = self._gpu(device1), self._gpu(device2)
        if p2pIndex != pynvml.NVML_P2P_CAPS_INDEX_NVLINK or a is b:
            return int(pynvml.NVML_P2P_STATUS_NOT_SUPPORTED)
        if self.state.board.nvlink.to == "switch":
            linked = all(self._live_links(g) for g in (a, b))
        else:
            linked = any(self._peer(a, link) is b for link in self._live_links(a))
        mig = a.saved.mig_enabled or b.saved.mig_enabled
        return int(pynvml.NVML_P2P_STATUS_OK if linked and not mig else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED)

    def nvmlDeviceGetGpuFabricInfo(self, device: Handle, gpuFabricInfo: Any) -> int:
        self._fill_fabric(self._gpu(device), gpuFabricInfo._obj)
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetGpuFabricInfoV(self, device: Handle, gpuFabricInfo: Any) -> int:
        gpu, info = self._gpu(device), gpuFabricInfo._obj
        if info.version not in (pynvml.nvmlGpuFabricInfo_v2, pynvml.nvmlGpuFabricInfo_v3):
            fail(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        self._fill_fabric(gpu, info)
        info.healthMask = gpu.saved.fabric_mask
        if info.version == pynvml.nvmlGpuFabricInfo_v3:
            info.healthSummary = gpu.saved.fabric_summary
        return int(pynvml.NVML_SUCCESS)

    # MIG

    def nvmlDeviceGetMigMode(self, device: Handle) -> list[int]:
        gpu = self._gpu(device)
        if not self.state.board.mig_profiles:
            fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(gpu.saved.mig_enabled), int(gpu.saved.mig_pending)]

    def nvmlDeviceSetMigMode(self, device: Handle, mode: int) -> int:
        """Ampere changes the mode only at the next reset: the returned status says so. Root only on real drivers."""
        with self.state.changed:
            gpu = self._gpu(device)
            if not self.state.board.mig_profiles:
                fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
            if gpu.saved.instances and not mode:
                fail(pynvml.NVML_ERROR_IN_USE)
            gpu.saved.mig_pending = bool(mode)
            if gpu.saved.mig_enabled == bool(mode):
                return int(pynvml.NVML_SUCCESS)
            if self.state.board.architecture == "Ampere":
                self.state.save()
                return int(pynvml.NVML_ERROR_RESET_REQUIRED)
            gpu.saved.mig_enabled = bool(mode)
            self.state.layout_changed()
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Handle) -> int:
        self._gpu(device)
        return _MAX_MIG if self.state.board.mig_profiles else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Handle, index: int) -> Handle:
        gpu = self._gpu(device)
        ready = [i for i in gpu.saved.instances if i.compute]
        if not 0 <= index < len(ready):
            fail(pynvml.NVML_ERROR_NOT_FOUND)
        return make(self.state, Kind.MIG, gpu.index, ready[index].gi)

    def nvmlDeviceGetGpuInstanceId(self, device: Handle) -> int:
        return self._mig(device)[1].gi

    def nvmlDeviceGetComputeInstanceId(self, device: Handle) -> int:
        self._mig(device)
        return 0

    def nvmlDeviceGetGpuInstanceById(self, device: Handle, gpuInstanceId: int) -> Handle:
        gpu = self._gpu(device)
        if all(i.gi != gpuInstanceId for i in gpu.saved.instances):
            fail(pynvml.NVML_ERROR_NOT_FOUND)
        return make(self.state, Kind.INSTANCE, gpu.index, gpuInstanceId)

    def nvmlGpuInstanceGetInfo(self, gpuInstance: Handle) -> Any:
        gpu, instance = self._instance(gpuInstance)
        profile = self.state.profile(instance.profile)
        info = pynvml.c_nvmlGpuInstanceInfo_t()
        info.device, info.id, info.profileId = device_handle(self.state, gpu), instance.gi, profile.id
        info.placement.start, info.placement.size = instance.start, profile.size
        return info

    def nvmlDeviceGetGpuInstanceProfileInfoV(self, device: Handle, profile: int, version: int = 2) -> Any:
        self._gpu(device)
        found = next((p for p in self.state.board.mig_profiles if p.number == profile), None)
        if found is None or version != 2:
            fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info = pynvml.c_nvmlGpuInstanceProfileInfo_v2_t()
        info.id, info.sliceCount, info.instanceCount = found.id, found.slices, len(found.starts)
        info.multiprocessorCount, info.copyEngineCount = found.multiprocessors, found.copy_engines
        info.decoderCount, info.encoderCount = found.decoders, found.encoders
        info.jpegCount, info.ofaCount = found.jpeg_engines, found.ofa_engines
        info.memorySizeMB, info.name = found.memory_mib, f"MIG {found.name}".encode()
        return info

    def nvmlDeviceGetGpuInstancePossiblePlacements(
        self, device: Handle, profileId: int, placementsRef: Any, countRef: Any
    ) -> int:
        gpu = self._gpu(device)
        if not gpu.saved.mig_enabled:
            fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        profile = self._profile(profileId)
        countRef._obj.value = len(profile.starts)
        for place, start in zip(placementsRef or (), profile.starts, strict=False):
            place.start, place.size = start, profile.size
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceCreateGpuInstanceWithPlacement(self, device: Handle, profileId: int, placement: Any) -> Handle:
        with self.state.changed:
            gpu = self._gpu(device)
            if not gpu.saved.mig_enabled:
                fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
            profile, start = self._profile(profileId), int(placement._obj.start)
            if start not in profile.starts or not self.state.fits(gpu, profile, start):
                fail(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
            taken = {i.gi for i in gpu.saved.instances}
            gi = next(n for n in range(profile.slices != _MAX_MIG, _MAX_MIG + 2) if n not in taken)
            gpu.saved.instances.append(MigInstance(gi=gi, profile=profile.name, start=start, compute=False))
            self.state.layout_changed()
            return self.nvmlDeviceGetGpuInstanceById(device, gi)

    def nvmlDeviceGetGpuInstances(self, device: Handle, profileId: int, gpuInstancesRef: Any, countRef: Any) -> int:
        gpu, profile = self._gpu(device), self._profile(profileId)
        found = [i.gi for i in gpu.saved.instances if i.profile == profile.name]
        countRef._obj.value = len(found)
        for position, gi in enumerate(found):
            gpuInstancesRef[position] = self.nvmlDeviceGetGpuInstanceById(device, gi)
        return int(pynvml.NVML_SUCCESS)

    def nvmlGpuInstanceDestroy(self, gpuInstance: Handle) -> int:
        with self.state.changed:
            gpu, instance = self._instance(gpuInstance)
            if instance.compute:
                fail(pynvml.NVML_ERROR_IN_USE)
            gpu.saved.instances.remove(instance)
            self.state.layout_changed()
        return int(pynvml.NVML_SUCCESS)

    def nvmlGpuInstanceGetComputeInstanceProfileInfoV(
        self, device: Handle, profile: int, engProfile: int, version: int = 2
    ) -> Any:
        """device: the GPU instance. The compute instance that fills it is the only kind offered."""
        _, instance = self._instance(device)
        slices = self.state.profile(instance.profile).slices
        if version != 2 or engProfile != 0 or _COMPUTE_SLICES.get(profile) != slices:
            fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info = pynvml.c_nvmlComputeInstanceProfileInfo_v2_t()
        info.id, info.sliceCount, info.instanceCount = profile, slices, 1
        return info

    def nvmlGpuInstanceCreateComputeInstance(self, gpuInstance: Handle, profileId: int) -> Handle:
        with self.state.changed:
            gpu, instance = self._instance(gpuInstance)
            if instance.compute or _COMPUTE_SLICES.get(profileId) != self.state.profile(instance.profile).slices:
                fail(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
            instance.compute = True
            self.state.layout_changed()
            return make(self.state, Kind.COMPUTE, gpu.index, instance.gi)

    def nvmlGpuInstanceGetComputeInstances(
        self, gpuInstance: Handle, profileId: int, computeInstancesRef: Any, countRef: Any
    ) -> int:
        gpu, instance = self._instance(gpuInstance)
        match = instance.compute and _COMPUTE_SLICES.get(profileId) == self.state.profile(instance.profile).slices
        countRef._obj.value = int(match)
        if match:
            computeInstancesRef[0] = make(self.state, Kind.COMPUTE, gpu.index, instance.gi)
        return int(pynvml.NVML_SUCCESS)

    def nvmlComputeInstanceDestroy(self, computeInstance: Handle) -> int:
        with self.state.changed:
            gpu, instance = self._lookup(computeInstance, Kind.COMPUTE)
            if instance is None or gpu.mig_uuid(instance) in self.state.busy:
                fail(pynvml.NVML_ERROR_IN_USE)
            instance.compute = False
            self.state.layout_changed()
        return int(pynvml.NVML_SUCCESS)

    # Health

    def nvmlDeviceGetRemappedRows(self, device: Handle) -> tuple[int, int, int, int]:
        saved = self._gpu(device).saved
        if self.state.board.architecture in _PAGE_RETIREMENT:
            fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 0, int(saved.remap_pending or saved.remap_failed), int(saved.remap_pending), int(saved.remap_failed)

    def nvmlDeviceGetTotalEccErrors(self, handle: Handle, errorType: int, counterType: int) -> int:
        saved = self._gpu(handle).saved
        if errorType != pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED:
            return 0
        return saved.ecc_volatile if counterType == pynvml.NVML_VOLATILE_ECC else saved.ecc_aggregate

    def nvmlDeviceGetSramEccErrorStatus(self, device: Handle, status: Any) -> int:
        self._gpu(device)
        if self.state.board.architecture in _PAGE_RETIREMENT:
            fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        status._obj.bThresholdExceeded = 0
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetRetiredPages(self, device: Handle, sourceFilter: int) -> list[int]:
        saved = self._gpu(device).saved
        if self.state.board.architecture not in _PAGE_RETIREMENT:
            fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        double = sourceFilter == pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR
        return [0x1000 * n for n in range(saved.ecc_volatile if double else 0)]

    def nvmlDeviceGetRetiredPagesPendingStatus(self, device: Handle) -> int:
        saved = self._gpu(device).saved
        if self.state.board.architecture not in _PAGE_RETIREMENT:
            fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return int(pynvml.NVML_FEATURE_ENABLED if saved.remap_pending else pynvml.NVML_FEATURE_DISABLED)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Handle) -> int:
        self._gpu(handle)
        return int(pynvml.nvmlClocksEventReasonGpuIdle)

    def nvmlDeviceGetFieldValues(self, handle: Handle, fieldIds: Sequence[int | tuple[int, int]]) -> Any:
        """fieldIds: each a field, or a field and its scope (here the number of a link)."""
        gpu = self._gpu(handle)
        values = (pynvml.c_nvmlFieldValue_t * len(fieldIds))()
        for value, asked in zip(values, fieldIds, strict=True):
            value.fieldId, value.scopeId = asked if isinstance(asked, tuple) else (asked, 0)
            value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
            found = self._field(gpu, value.fieldId, value.scopeId)
            value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED if found is None else pynvml.NVML_SUCCESS
            value.value.uiVal = found or 0
        return values

    # Events

    def nvmlEventSetCreate(self) -> Handle:
        with self.state.changed:
            self._ready()
            number = max(self.state.event_sets, default=0) + 1
            self.state.event_sets[number] = EventSet()
            return make(self.state, Kind.EVENTS, number)

    def nvmlEventSetFree(self, eventSet: Handle) -> None:
        with self.state.changed:
            self.state.event_sets.pop(self._event_set(eventSet)[0], None)

    def nvmlDeviceGetSupportedEventTypes(self, handle: Handle) -> int:
        self._gpu(handle)
        return int(_SUPPORTED_EVENTS)

    def nvmlDeviceRegisterEvents(self, handle: Handle, eventTypes: int, eventSet: Handle) -> None:
        with self.state.changed:
            gpu, events = self._gpu(handle), self._event_set(eventSet)[1]
            if eventTypes & ~_SUPPORTED_EVENTS:
                fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
            events.masks[gpu.index] = events.masks.get(gpu.index, 0) | eventTypes

    def nvmlEventSetWait_v2(self, eventSet: Handle, timeoutms: int) -> Any:
        """The next event; Timeout after timeoutms, GpuIsLost while a registered GPU is lost and no event waits."""
        deadline = time.monotonic() + timeoutms / 1000
        with self.state.changed:
            while True:
                events = self._event_set(eventSet)[1]
                if events.waiting:
                    return events.waiting.popleft()
                if any(self.state.gpus[index].saved.lost for index in events.masks):
                    fail(pynvml.NVML_ERROR_GPU_IS_LOST)
                left = deadline - time.monotonic()
                if left <= 0 or not self.state.changed.wait(left):
                    fail(pynvml.NVML_ERROR_TIMEOUT)

    # Shared by the above

    def _field(self, gpu: FakeGpu, field: int, scope: int) -> int | None:
        """None: this driver does not know the field."""
        if field == pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION:
            return gpu.saved.recovery
        if field == pynvml.NVML_FI_DEV_NVLINK_REMOTE_NVLINK_ID and field not in self.state.missing_fields:
            end = self._switch_end(gpu, scope)
            return end.port if end else None
        return None

    def _ready(self) -> None:
        if self.state.initialized <= 0:
            fail(pynvml.NVML_ERROR_UNINITIALIZED)

    def _handle(self, gpu: FakeGpu) -> Handle:
        if gpu.saved.lost:
            fail(pynvml.NVML_ERROR_GPU_IS_LOST)
        return device_handle(self.state, gpu)

    def _lookup(self, handle: Handle, *kinds: Kind) -> tuple[FakeGpu, MigInstance | None]:
        self._ready()
        return lookup(self.state, handle, kinds)

    def _device(self, handle: Handle) -> tuple[FakeGpu, MigInstance | None]:
        return self._lookup(handle, Kind.GPU, Kind.MIG)

    def _gpu(self, handle: Handle) -> FakeGpu:
        """What most functions begin with; an attribute of this object costs more than elsewhere."""
        state = self.state
        if state.initialized <= 0:
            fail(pynvml.NVML_ERROR_UNINITIALIZED)
        return lookup(state, handle, _GPU_ONLY)[0]

    def _mig(self, handle: Handle) -> tuple[FakeGpu, MigInstance]:
        gpu, instance = self._lookup(handle, Kind.MIG)
        return (gpu, instance) if instance else fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def _instance(self, handle: Handle) -> tuple[FakeGpu, MigInstance]:
        gpu, instance = self._lookup(handle, Kind.INSTANCE)
        return (gpu, instance) if instance else fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def _profile(self, profile_id: int) -> BoardMigProfile:
        found = next((p for p in self.state.board.mig_profiles if p.id == profile_id), None)
        return found or fail(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _event_set(self, handle: Handle) -> tuple[int, EventSet]:
        self._ready()
        number = event_number(self.state, handle)
        found = self.state.event_sets.get(number)
        return (number, found) if found else fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def _link(self, handle: Handle, link: int) -> FakeGpu:
        gpu = self._gpu(handle)
        if not 0 <= link < self.state.board.nvlink.links:
            fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return gpu

    def _live_links(self, gpu: FakeGpu) -> list[int]:
        return [link for link in range(self.state.board.nvlink.links) if link not in gpu.saved.dead_links]

    def _peer(self, gpu: FakeGpu, link: int) -> FakeGpu | None:
        if self.state.board.nvlink.to == "switch" or not gpu.peers or link in gpu.saved.dead_links:
            return None
        return self.state.gpus[gpu.peers[link * len(gpu.peers) // self.state.board.nvlink.links]]

    def _switch_end(self, gpu: FakeGpu, link: int) -> SwitchEnd | None:
        """Of a link that is up: a dead one tells nothing."""
        return None if link in gpu.saved.dead_links else self.state.switch_end(gpu, link)

    def _pci_info(self, pci: PciAddress, device_id: str) -> Any:
        info = pynvml.nvmlPciInfo_t()
        info.domain, info.bus, info.device = pci.domain, pci.bus, pci.device
        info.pciDeviceId = int(device_id, 16)
        info.busIdLegacy = str(pci)[-12:].upper().encode()
        info.busId = f"{pci.domain:08X}{str(pci).upper()[-8:]}".encode()
        return info

    def _fill_fabric(self, gpu: FakeGpu, info: Any) -> None:
        if gpu.saved.fabric_state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
            fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info.state, info.status = gpu.saved.fabric_state, pynvml.NVML_SUCCESS
        if gpu.saved.fabric_state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED:
            info.cliqueId = self.state.clique
            for i, byte in enumerate(bytes.fromhex(self.state.board.fabric.cluster_uuid.replace("-", ""))):
                info.clusterUuid[i] = byte
