"""NVML's events as an async stream of plain values."""

import logging
import threading
import time
from collections.abc import Callable
from ctypes import c_void_p, cast
from dataclasses import dataclass
from typing import Literal

import pynvml

from gpunode.hardware.discover import pci_address
from gpunode.hardware.nvml import Handle, Nvml, optional, text, words
from gpunode.hardware.stream import Put, ThreadStream
from gpunode.model.hardware import PciAddress

logger = logging.getLogger(__name__)

_WAIT_MS = 200
_RETRY_S = 1.0
_UNKNOWN_INSTANCE = 0xFFFFFFFF
_WANTED = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError
_KINDS: dict[int, Literal["xid", "dbe"]] = {
    pynvml.nvmlEventTypeXidCriticalError: "xid",
    pynvml.nvmlEventTypeDoubleBitEccError: "dbe",
}


@dataclass(frozen=True)
class NvmlEvent:
    """What NVML reported about one GPU. kind lost: NVML can no longer reach it (code is then 0).

    code: XID number (999 where the driver does not know it). gi, ci: MIG instances or None. at: time.monotonic().
    """

    pci: PciAddress
    uuid: str
    kind: Literal["xid", "dbe", "lost"]
    code: int
    gi: int | None
    ci: int | None
    at: float


@dataclass
class _Watch:
    """One event set and the GPUs in it, by handle value. answering: how many of `total` GPUs did when it was made."""

    events: Handle
    gpus: dict[int, tuple[PciAddress, str, Handle]]
    total: int
    answering: int = 0


def watch(nvml: Nvml, limit: int = 1024, clock: Callable[[], float] = time.monotonic) -> ThreadStream[NvmlEvent]:
    """Events of all GPUs, from now on. nvmlInit must have succeeded; when NVML goes away (driver reload) the watch
    begins anew as soon as it is back. A lost GPU is told once and the others go on."""

    def source(put: Put[NvmlEvent], stopped: threading.Event) -> None:
        lost: set[str] = set()
        while not stopped.is_set():
            try:
                _watch_once(nvml, put, stopped, lost, clock)
            except pynvml.NVMLError as error:
                logger.info("NVML event watch begins anew: %s", words(error))
                stopped.wait(_RETRY_S)

    return ThreadStream("NVML events", source, limit)


def _watch_once(
    nvml: Nvml, put: Put[NvmlEvent], stopped: threading.Event, lost: set[str], clock: Callable[[], float]
) -> None:
    """Until the set of GPUs that can be watched changes. `lost` keeps what has been told already."""
    current = _register(nvml)
    lost -= {uuid for _, uuid, _ in current.gpus.values()}
    try:
        while not stopped.is_set():
            try:
                data = nvml.nvmlEventSetWait_v2(current.events, _WAIT_MS)
            except pynvml.NVMLError_Timeout:
                if current.answering < current.total and _answering(nvml) != current.answering:
                    return
                continue
            except pynvml.NVMLError_GpuIsLost:
                gone = [(pci, uuid) for pci, uuid, handle in current.gpus.values() if _is_lost(nvml, handle)]
                for pci, uuid in gone:
                    if uuid not in lost:
                        lost.add(uuid)
                        put(NvmlEvent(pci, uuid, "lost", 0, None, None, clock()))
                if not gone:
                    stopped.wait(_RETRY_S)
                return
            _deliver(data, current, put, clock)
    finally:
        _free(nvml, current.events)


def _register(nvml: Nvml) -> _Watch:
    current = _Watch(nvml.nvmlEventSetCreate(), {}, nvml.nvmlDeviceGetCount())
    try:
        for index in range(current.total):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                current.answering += 1
                pci, uuid = pci_address(nvml.nvmlDeviceGetPciInfo_v3(handle)), text(nvml.nvmlDeviceGetUUID(handle))
                mask = (optional(nvml.nvmlDeviceGetSupportedEventTypes, handle) or 0) & _WANTED
                if mask:
                    nvml.nvmlDeviceRegisterEvents(handle, mask, current.events)
                    current.gpus[_value(handle)] = pci, uuid, handle
                else:
                    logger.warning("GPU %s offers no NVML events; only the kernel log tells of its faults", pci)
            except pynvml.NVMLError as error:
                logger.warning("GPU with NVML index %d is not watched: %s", index, words(error))
    except pynvml.NVMLError:
        _free(nvml, current.events)
        raise
    return current


def _deliver(data: object, current: _Watch, put: Put[NvmlEvent], clock: Callable[[], float]) -> None:
    read = data.__getattribute__
    kind, known = _KINDS.get(int(read("eventType"))), current.gpus.get(_value(read("device")))
    if kind is None or known is None:
        return
    gi, ci = (None if v == _UNKNOWN_INSTANCE else int(v) for v in (read("gpuInstanceId"), read("computeInstanceId")))
    put(NvmlEvent(known[0], known[1], kind, int(read("eventData")), gi, ci, clock()))


def _value(handle: Handle) -> int:
    """NVML hands out one pointer a GPU, so equal pointers are the same GPU, even one that no longer answers."""
    return cast(handle, c_void_p).value or 0


def _is_lost(nvml: Nvml, handle: Handle) -> bool:
    try:
        nvml.nvmlDeviceGetUUID(handle)
    except pynvml.NVMLError:
        return True
    return False


def _answering(nvml: Nvml) -> int:
    """How many GPUs answer now."""
    answering = 0
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            nvml.nvmlDeviceGetHandleByIndex(index)
            answering += 1
        except pynvml.NVMLError:
            continue
    return answering


def _free(nvml: Nvml, events: Handle) -> None:
    try:
        nvml.nvmlEventSetFree(events)
    except pynvml.NVMLError as error:
        logger.debug("event set not freed: %s", words(error))
