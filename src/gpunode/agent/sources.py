"""Where signals of health come from: the kernel log and NVML's events, each told to the monitor as it arrives."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from gpunode.agent.monitor import Complain, HealthMonitor
from gpunode.hardware import events, kmsg
from gpunode.hardware.nvml import Nvml
from gpunode.health.parse import Pending, parse
from gpunode.health.signals import GpuLost, Signal, XidSignal

# Records that may wait for us; a storm that is faster for long loses its oldest.
_WAITING = 100_000
# While records keep coming nothing else would run: let it, this often.
_BREATHE = 256


async def follow_kernel_log(path: Path, monitor: HealthMonitor, complain: Complain) -> None:
    """Every GPU message of the kernel log from where the saved state ends.

    A log that cannot be read is complained of and tried again for ever: meanwhile NVML alone tells of faults.
    """
    after = monitor.kernel_sequence
    pending = Pending()
    failed = _unreadable(path, complain)
    async with kmsg.follow(path, -1 if after is None else after, limit=_WAITING, failed=failed) as records:
        overrun = _Overrun(path, complain, after)
        count = 0
        async for record in records:
            overrun.read(record.seq)
            signals, pending = parse(record.text, pending)
            await monitor.put(*signals, kernel_sequence=record.seq)
            count += 1
            if count % _BREATHE == 0:
                await asyncio.sleep(0)


class _Overrun:
    """Complains of records that were never read, at most once a minute. Numbers rise by one a record, so a gap is what
    the kernel overwrote (also while no agent ran) or what we dropped. A lower number is a log that began anew."""

    def __init__(self, path: Path, complain: Complain, last: int | None) -> None:
        self._path = path
        self._complain = complain
        self._last = last
        self._missing = 0
        self._quiet_until = 0.0

    def read(self, sequence: int) -> None:
        if self._last is not None and sequence > self._last + 1:
            self._missing += sequence - self._last - 1
        self._last = sequence
        if not self._missing or time.monotonic() < self._quiet_until:
            return
        self._complain(
            "KernelLogOverrun",
            f"{self._missing} lines of {self._path} were overwritten before they could be read: a fault that only they "
            "told of is not known. See gpunode health status, and nvidia-smi -q, for the state of the GPUs.",
        )
        self._missing = 0
        self._quiet_until = time.monotonic() + 60


def _unreadable(path: Path, complain: Complain) -> Callable[[OSError], None]:
    def failed(error: OSError) -> None:
        complain(
            "KernelLogUnreadable",
            f"{path} cannot be read ({error.strerror or error}): until it can, only NVML tells of GPU faults, and "
            "NVSwitch errors and what XID 74 and 144 to 150 are about stay unknown.",
        )

    return failed


async def follow_nvml(nvml: Nvml, monitor: HealthMonitor) -> None:
    """Every XID that NVML reports, and GPUs that it loses."""
    async with events.watch(nvml) as stream:
        async for event in stream:
            if (signal := _signal(event)) is not None:
                await monitor.put(signal)


def _signal(event: events.NvmlEvent) -> Signal | None:
    if event.kind == "xid":
        return XidSignal(pci=event.pci, code=event.code, gi=event.gi, ci=event.ci)
    if event.kind == "lost":
        return GpuLost(pci=event.pci, reason="NVML says that the GPU is lost")
    # A double bit error comes as XID 48 as well, with more to say.
    return None
