"""One poll of a GPU's health counters, for the health state machine."""

from ctypes import byref

import pynvml

from gpunode.hardware.nvml import Handle, Nvml, optional, words
from gpunode.model.hardware import Gpu, Inventory
from gpunode.model.health import GpuSample, RecoveryAction

_RECOVERY = {
    pynvml.NVML_GPU_RECOVERY_ACTION_NONE: RecoveryAction.NONE,
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: RecoveryAction.GPU_RESET,
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: RecoveryAction.NODE_REBOOT,
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: RecoveryAction.DRAIN_P2P,
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: RecoveryAction.DRAIN_AND_RESET,
    # Numbers of actions that older bindings have no name for: nvml.h, nvmlDeviceGpuRecoveryAction_t.
    5: RecoveryAction.RECOVER_IMEX,
    6: RecoveryAction.BUS_RESET,
    7: RecoveryAction.SYSTEM_REBOOT,
}
_THROTTLE = {
    pynvml.nvmlClocksEventReasonHwSlowdown: "hw-slowdown",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hw-thermal",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "hw-power-brake",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "sw-thermal",
}
# Two-bit fields of the fabric health mask (nvml.h): shift and name; the value 1 says that it is so.
_FABRIC_FAULTS = {0: "degraded-bandwidth", 2: "route-recovery", 4: "route-unhealthy", 6: "access-timeout-recovery"}
_CONFIGURATION_SHIFT, _CONFIGURATION_NONE = 8, 1
_FABRIC_STATES = {
    pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: "notStarted",
    pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: "inProgress",
    pynvml.NVML_GPU_FABRIC_STATE_COMPLETED: "completed",
}


def sample_all(nvml: Nvml, inventory: Inventory) -> tuple[GpuSample, ...]:
    """A poll of every GPU of the inventory; never raises. A GPU that cannot be read is one that is not present."""
    return tuple(sample(nvml, gpu) for gpu in inventory.gpus)


def sample(nvml: Nvml, gpu: Gpu) -> GpuSample:
    """A poll of one GPU, found by its UUID (indices shift when another GPU is lost)."""
    try:
        return _sample(nvml, gpu, nvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
    except pynvml.NVMLError as error:
        return GpuSample(gpu.uuid, gpu.pci, present=False, error=words(error))


def _sample(nvml: Nvml, gpu: Gpu, handle: Handle) -> GpuSample:
    state, faults = _fabric(nvml, handle)
    rows = optional(nvml.nvmlDeviceGetRemappedRows, handle)
    retiring = optional(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle) if rows is None else None
    links = [optional(nvml.nvmlDeviceGetNvLinkState, handle, link.index) for link in gpu.links]
    uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    reasons = optional(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
    return GpuSample(
        uuid=gpu.uuid,
        pci=gpu.pci,
        recovery=_recovery(nvml, handle),
        ecc_uncorrected=optional(nvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, pynvml.NVML_VOLATILE_ECC),
        ecc_uncorrected_aggregate=optional(
            nvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, pynvml.NVML_AGGREGATE_ECC
        ),
        sram_threshold_exceeded=_sram(nvml, handle),
        remap_pending=bool(rows[2]) if rows else None,
        remap_failed=bool(rows[3]) if rows else None,
        pages_retired=_pages(nvml, handle) if rows is None else None,
        retirement_pending=None if retiring is None else retiring == pynvml.NVML_FEATURE_ENABLED,
        fabric_state=state,
        fabric_faults=faults,
        links_active=sum(link == pynvml.NVML_FEATURE_ENABLED for link in links) if links else None,
        links_total=len(links) if links else None,
        throttle=frozenset(name for bit, name in _THROTTLE.items() if reasons & bit),
    )


def _recovery(nvml: Nvml, handle: Handle) -> RecoveryAction:
    values = optional(nvml.nvmlDeviceGetFieldValues, handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    if values is None or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return RecoveryAction.UNKNOWN
    return _RECOVERY.get(int(values[0].value.uiVal), RecoveryAction.UNKNOWN)


def _sram(nvml: Nvml, handle: Handle) -> bool | None:
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    if optional(nvml.nvmlDeviceGetSramEccErrorStatus, handle, byref(status)) is None:
        return None
    return bool(status.bThresholdExceeded)


def _pages(nvml: Nvml, handle: Handle) -> int | None:
    causes = (
        pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
        pynvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
    )
    pages = [optional(nvml.nvmlDeviceGetRetiredPages, handle, cause) for cause in causes]
    return None if None in pages else sum(len(p) for p in pages if p is not None)


def _fabric(nvml: Nvml, handle: Handle) -> tuple[str, frozenset[str]]:
    """State, and what the health mask (or, in its absence, the summary) says is wrong."""
    info = pynvml.c_nvmlGpuFabricInfo_v3_t()
    if optional(nvml.nvmlDeviceGetGpuFabricInfoV, handle, byref(info)) is None:
        info = pynvml.c_nvmlGpuFabricInfo_v2_t()
        if optional(nvml.nvmlDeviceGetGpuFabricInfoV, handle, byref(info)) is None:
            return "unsupported", frozenset()
    state = _FABRIC_STATES.get(info.state, "unsupported")
    if state != "completed":
        return state, frozenset()
    mask = int(info.healthMask)
    faults = {name for shift, name in _FABRIC_FAULTS.items() if mask >> shift & 0x3 == 1}
    if mask >> _CONFIGURATION_SHIFT & 0xF > _CONFIGURATION_NONE:
        faults.add("incorrect-configuration")
    summary = getattr(info, "healthSummary", pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_NOT_SUPPORTED)
    if summary == pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_LIMITED_CAPACITY:
        faults.add("limited-capacity")
    if summary == pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY and not faults:
        faults.add("route-unhealthy")
    if info.status != pynvml.NVML_SUCCESS:
        faults.add("incorrect-configuration")
    return state, frozenset(faults)
