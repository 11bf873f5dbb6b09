"""Reads what a node's hardware is. The same code runs on real hardware and on a fake machine."""

import logging
from ctypes import byref
from dataclasses import replace
from itertools import islice
from typing import Any

import pynvml

from gpunode.hardware import sysfs
from gpunode.hardware.mig import existing_instances, profiles
from gpunode.hardware.nvml import Handle, Nvml, cores_per_multiprocessor, optional, text, words
from gpunode.hardware.roots import Roots
from gpunode.model.hardware import Fabric, Gpu, Inventory, Link, PciAddress

logger = logging.getLogger(__name__)

_MAX_GPUS = 64
_BRANDS = {
    pynvml.NVML_BRAND_QUADRO: "Quadro",
    pynvml.NVML_BRAND_TESLA: "Tesla",
    pynvml.NVML_BRAND_NVS: "NVS",
    pynvml.NVML_BRAND_GRID: "Grid",
    pynvml.NVML_BRAND_GEFORCE: "GeForce",
    pynvml.NVML_BRAND_TITAN: "Titan",
    pynvml.NVML_BRAND_QUADRO_RTX: "QuadroRTX",
    pynvml.NVML_BRAND_NVIDIA_RTX: "NvidiaRTX",
    pynvml.NVML_BRAND_NVIDIA: "Nvidia",
}
_ARCHITECTURES = {
    pynvml.NVML_DEVICE_ARCH_VOLTA: "Volta",
    pynvml.NVML_DEVICE_ARCH_TURING: "Turing",
    pynvml.NVML_DEVICE_ARCH_AMPERE: "Ampere",
    pynvml.NVML_DEVICE_ARCH_ADA: "Ada Lovelace",
    pynvml.NVML_DEVICE_ARCH_HOPPER: "Hopper",
    pynvml.NVML_DEVICE_ARCH_BLACKWELL: "Blackwell",
}
_ENDS = (pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH, pynvml.NVML_NVLINK_DEVICE_TYPE_GPU)
_MAX_BUS, _MAX_PCI_DEVICE = 0xFF, 0x1F
# More than any NVSwitch has (the third generation has 64); a larger number is the driver's "not known".
_MAX_PORTS = 1024
_MEMBERS = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
}
_FABRIC_STATES = {
    pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: "notStarted",
    pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: "inProgress",
    pynvml.NVML_GPU_FABRIC_STATE_COMPLETED: "completed",
}


def discover(nvml: Nvml, roots: Roots, node: str) -> Inventory:
    """The node's inventory, GPUs in PCI order. nvmlInit must have succeeded.

    A GPU that cannot be read (lost, being reset) is left out and logged; the others are not affected.
    Raises pynvml.NVMLError when NVML itself does not answer.
    """
    handles: dict[str, Handle] = {}
    gpus: list[Gpu] = []
    for index in range(min(nvml.nvmlDeviceGetCount(), _MAX_GPUS)):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu = _gpu(nvml, roots, handle)
        except pynvml.NVMLError as error:
            logger.warning("GPU with NVML index %d on %s is left out: %s", index, node, words(error))
            continue
        if gpu.uuid in handles:
            logger.warning("GPU with NVML index %d on %s is left out: UUID %s appears twice", index, node, gpu.uuid)
            continue
        handles[gpu.uuid] = handle
        gpus.append(gpu)
    gpus.sort(key=lambda g: str(g.pci))
    cuda = optional(nvml.nvmlSystemGetCudaDriverVersion_v2)
    return Inventory(
        node=node,
        boot_id=sysfs.boot_id(roots),
        driver_version=text(optional(nvml.nvmlSystemGetDriverVersion) or ""),
        cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
        gpus=tuple(_with_links(nvml, gpu, gpus, handles) for gpu in gpus),
        nics=sysfs.nics(roots),
    )


def pci_address(info: object) -> PciAddress:
    """NVML names a GPU by its function 0; the domain may need 8 hex digits (some clouds)."""
    return PciAddress(
        int(getattr(info, "domain")),  # noqa: B009 - a ctypes structure, whose fields no type checker knows
        int(getattr(info, "bus")),  # noqa: B009
        int(getattr(info, "device")),  # noqa: B009
    )


def _gpu(nvml: Nvml, roots: Roots, handle: Handle) -> Gpu:
    pci = pci_address(nvml.nvmlDeviceGetPciInfo_v3(handle))
    capability = optional(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    memory = optional(nvml.nvmlDeviceGetMemoryInfo, handle)
    cores = optional(nvml.nvmlDeviceGetNumGpuCores, handle)
    mig_mode = optional(nvml.nvmlDeviceGetMigMode, handle)
    minor = optional(nvml.nvmlDeviceGetMinorNumber, handle)
    per_sm = cores_per_multiprocessor(capability) if capability else 0
    mig_enabled = mig_mode is not None and mig_mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    kinds = profiles(nvml, handle) if mig_mode is not None else ()
    return Gpu(
        uuid=text(nvml.nvmlDeviceGetUUID(handle)),
        pci=pci,
        minor=-1 if minor is None else minor,
        product=text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total) if memory is not None else 0,
        pcie_root=sysfs.pcie_root(roots, pci),
        numa_node=sysfs.numa_node(roots, pci),
        brand=_BRANDS.get(optional(nvml.nvmlDeviceGetBrand, handle) or 0, ""),
        architecture=_ARCHITECTURES.get(optional(nvml.nvmlDeviceGetArchitecture, handle) or 0, ""),
        compute_capability=capability,
        multiprocessors=cores // per_sm if cores and per_sm else None,
        serial=text(optional(nvml.nvmlDeviceGetSerial, handle) or ""),
        fabric=fabric(nvml, handle),
        mig_enabled=mig_enabled,
        mig=existing_instances(nvml, handle, kinds) if mig_enabled else (),
        mig_profiles=kinds,
    )


def _with_links(nvml: Nvml, gpu: Gpu, gpus: list[Gpu], handles: dict[str, Handle]) -> Gpu:
    """Links and peers need all handles of the node, so they are read after every GPU is known."""
    handle = handles[gpu.uuid]
    by_pci = {g.pci: g.uuid for g in gpus}
    try:
        found = links(nvml, handle, by_pci)
        linked = {link.peer for link in found if link.active and link.peer in handles}
        switched = {o for o in handles if o != gpu.uuid and _nvlink_p2p(nvml, handle, handles[o])} if found else set()
    except pynvml.NVMLError as error:
        logger.warning("NVLinks of %s could not be read: %s", gpu.pci, words(error))
        return gpu
    return replace(gpu, links=found, nvlink_peers=frozenset(linked | switched))


def links(nvml: Nvml, handle: Handle, by_pci: dict[PciAddress, str]) -> tuple[Link, ...]:
    """The NVLinks a GPU has, up or down. by_pci: UUIDs of the node's GPUs, to name direct peers."""
    found = _links(nvml, handle, by_pci)
    ports = _switch_ports(nvml, handle, [link.index for link in found if link.switch is not None])
    return tuple(
        Link(k.index, k.active, k.peer, k.version, k.switch, ports[k.index]) if k.index in ports else k for k in found
    )


def _links(nvml: Nvml, handle: Handle, by_pci: dict[PciAddress, str]) -> list[Link]:
    found = []
    for index in range(pynvml.NVML_NVLINK_MAX_LINKS):
        state = optional(nvml.nvmlDeviceGetNvLinkState, handle, index)
        if state is None:
            if index == 0:
                break
            continue
        remote = optional(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, index)
        peer = "switch" if remote == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH else ""
        end = _remote(nvml, handle, index) if remote in _ENDS else None
        if remote == pynvml.NVML_NVLINK_DEVICE_TYPE_GPU:
            peer = by_pci.get(end, "") if end is not None else ""
        version = optional(nvml.nvmlDeviceGetNvLinkVersion, handle, index) or 0
        switch = end if peer == "switch" else None
        found.append(Link(index, state == pynvml.NVML_FEATURE_ENABLED, peer, version, switch))
    return found


def _remote(nvml: Nvml, handle: Handle, link: int) -> PciAddress | None:
    """Address of what a link ends at. Switches that are no PCI function of this host (NVLink 5) have none: drivers
    leave the structure empty or fill it with ones."""
    info = optional(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
    if info is None:
        return None
    found = pci_address(info)
    exists = found.bus <= _MAX_BUS and found.device <= _MAX_PCI_DEVICE and found != PciAddress(0, 0, 0)
    return found if exists else None


def _switch_ports(nvml: Nvml, handle: Handle, links: list[int]) -> dict[int, int]:
    """The switch's own number of each of these links, in one call (nvml.h: the field's scope is the GPU's link)."""
    fields = [(pynvml.NVML_FI_DEV_NVLINK_REMOTE_NVLINK_ID, link) for link in links]
    values = optional(nvml.nvmlDeviceGetFieldValues, handle, fields) if fields else None
    given = zip(links, values or (), strict=False)
    numbers = {link: _number(value) for link, value in given if value.nvmlReturn == pynvml.NVML_SUCCESS}
    return {link: port for link, port in numbers.items() if port is not None and 0 <= port < _MAX_PORTS}


def _number(value: Any) -> int | None:
    """A field value, whichever member of the union the driver says that it filled."""
    member = _MEMBERS.get(value.valueType)
    return int(getattr(value.value, member)) if member else None


def fabric(nvml: Nvml, handle: Handle) -> Fabric:
    """Fabric registration, by the newest structure the driver knows (v3, v2, then the call without a version)."""
    for make, call in (
        (pynvml.c_nvmlGpuFabricInfo_v3_t, nvml.nvmlDeviceGetGpuFabricInfoV),
        (pynvml.c_nvmlGpuFabricInfo_v2_t, nvml.nvmlDeviceGetGpuFabricInfoV),
        (pynvml.c_nvmlGpuFabricInfo_t, nvml.nvmlDeviceGetGpuFabricInfo),
    ):
        info = make()
        if optional(call, handle, byref(info)) is not None:
            return _fabric(info)
    return Fabric("unsupported")


def _fabric(info: object) -> Fabric:
    """status and clique are only valid once the state is completed."""
    read = info.__getattribute__
    state = _FABRIC_STATES.get(read("state"), "unsupported")
    if state != "completed":
        return Fabric(state)
    raw = bytes(islice(read("clusterUuid"), pynvml.NVML_GPU_FABRIC_UUID_LEN))
    cluster = raw.hex() if any(raw) else ""
    dashed = "-".join((cluster[:8], cluster[8:12], cluster[12:16], cluster[16:20], cluster[20:])) if cluster else ""
    summary = getattr(info, "healthSummary", pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_NOT_SUPPORTED)
    bad = (pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY, pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_LIMITED_CAPACITY)
    healthy = read("status") == pynvml.NVML_SUCCESS and summary not in bad
    return Fabric(state, dashed, int(read("cliqueId")), healthy)


def _nvlink_p2p(nvml: Nvml, a: Handle, b: Handle) -> bool:
    status = optional(nvml.nvmlDeviceGetP2PStatus, a, b, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return bool(status == pynvml.NVML_P2P_STATUS_OK)
