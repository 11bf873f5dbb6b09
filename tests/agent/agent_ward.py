"""A monitor that runs in a test, and what it said."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gpunode.agent.monitor import HealthMonitor
from gpunode.health.devices import DeviceMap, KnownGpu
from gpunode.health.machine import HealthMachine
from gpunode.health.policy import Policy
from gpunode.health.state import Transition
from gpunode.model.hardware import PciAddress, device_name

A, B = PciAddress(0, 7, 0), PciAddress(0, 0x0F, 0)
GPU_A, GPU_B = device_name(A), device_name(B)
MAP = DeviceMap((KnownGpu(GPU_A, "GPU-a", A, switched=True), KnownGpu(GPU_B, "GPU-b", B, switched=True)))
# Nothing is waited for after a fault has ended.
AT_ONCE = Policy(hold_down_s=0)


@dataclass
class Heard:
    """Everything that a monitor told, in order. calls: how often it told at all."""

    transitions: list[Transition] = field(default_factory=list)
    complaints: list[tuple[str, str]] = field(default_factory=list)
    calls: int = 0

    async def listen(self, transitions: Sequence[Transition]) -> None:
        self.calls += 1
        self.transitions += transitions

    def complain(self, reason: str, message: str) -> None:
        self.complaints.append((reason, message))

    def changes(self, device: str = GPU_A) -> list[tuple[str, str]]:
        return [(t.code, t.change) for t in self.transitions if t.device == device]


@asynccontextmanager
async def running(
    path: Path, heard: Heard, policy: Policy = AT_ONCE, devices: DeviceMap = MAP, boot: str = "boot-1"
) -> AsyncIterator[HealthMonitor]:
    """A started monitor on the state file `path`; stopped with the block."""
    monitor = HealthMonitor(HealthMachine(policy=policy), path, heard.listen, heard.complain)
    heard.transitions += monitor.start(boot, devices)
    task = asyncio.create_task(monitor.run())
    try:
        yield monitor
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Raises TimeoutError if it does not become true."""
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)
