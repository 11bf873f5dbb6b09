"""Where signals of health come from: the kernel log and NVML's events, each told to the monitor as it arrives."""

import logging
from pathlib import Path

from gpunode.agent.monitor import HealthMonitor
from gpunode.hardware import events, kmsg
from gpunode.hardware.nvml import Nvml
from gpunode.health.parse import Pending, parse
from gpunode.health.signals import GpuLost, Signal, XidSignal

logger = logging.getLogger(__name__)


async def follow_kernel_log(path: Path, monitor: HealthMonitor) -> None:
    """Every GPU message of the kernel log from where the saved state ends. An unreadable log is retried, not fatal."""
    after = monitor.kernel_sequence
    pending = Pending()
    async with kmsg.follow(path, -1 if after is None else after, limit=100_000) as records:
        async for record in records:
            signals, pending = parse(record.text, pending)
            for signal in signals:
                await monitor.put(signal, record.seq)


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
