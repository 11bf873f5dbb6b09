"""Knowing the hardware: waiting for it when a node boots, looking again and polling counters while it runs."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from gpunode.agent.monitor import HealthMonitor
from gpunode.hardware.nvml import Nvml
from gpunode.hardware.rescan import Scanner
from gpunode.hardware.sample import sample_all
from gpunode.health.signals import GpuLost
from gpunode.kube.events import ObjectRef, Recorder
from gpunode.model.hardware import Inventory
from gpunode.model.health import GpuSample

logger = logging.getLogger(__name__)
_RETRY_S = 5.0
_RESCAN_S = 10.0
# A process keeps the NVML library that it has loaded: when another driver is loaded for good, only a new process can
# talk to it.
_MISMATCH_S = 60.0


class DriverReplacedError(Exception):
    """The driver was replaced by one that this process's NVML library does not fit; a restart loads the right one."""


async def first_inventory(scanner: Scanner, recorder: Recorder, about: ObjectRef) -> Inventory:
    """The node's inventory as soon as NVML answers; until then says why not and tries again."""
    told = ""
    while True:
        scan = await asyncio.to_thread(scanner.scan)
        if scan.inventory is not None:
            return scan.inventory
        if scan.error != told:
            told = scan.error
            note = f"{scan.error} No GPUs are published until then."
            logger.warning("%s", note)
            await recorder.emit(about, "NvmlUnavailable", note, "Warning", "Discover")
        await asyncio.sleep(_RETRY_S)


class HardwareWatch:
    """Scans and polls every ten seconds, and at once when `wake` is called.

    `changed` is given each inventory that differs from the one before. While NVML does not answer the last one
    stands: what cannot be asked has not changed, and a reload of the driver is no loss of GPUs. `mark` adds to the
    samples what others than NVML know of the GPUs.
    """

    def __init__(
        self,
        scanner: Scanner,
        nvml: Nvml,
        current: Inventory,
        monitor: HealthMonitor,
        changed: Callable[[Inventory], None],
        mark: Callable[[Sequence[GpuSample]], Sequence[GpuSample]] = tuple,
    ) -> None:
        self._scanner = scanner
        self._nvml = nvml
        self._current = current
        self._monitor = monitor
        self._changed = changed
        self._mark = mark
        self._wake = asyncio.Event()
        self._error = ""
        self._fitted = asyncio.get_running_loop().time()

    def wake(self) -> None:
        """Something happened to the hardware: look now."""
        self._wake.set()

    async def run(self) -> None:
        """Watch until cancelled. Raises DriverReplacedError."""
        while True:
            await self._look()
            try:
                async with asyncio.timeout(_RESCAN_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def _look(self) -> None:
        scan = await asyncio.to_thread(self._scanner.scan)
        if scan.error != self._error:
            self._error = scan.error
            if scan.error:
                logger.warning("%s The GPUs found before stay published.", scan.error)
        now = asyncio.get_running_loop().time()
        if not scan.mismatch:
            self._fitted = now
        elif now - self._fitted > _MISMATCH_S:
            raise DriverReplacedError(f"{scan.error} Ending, so that a new process loads the driver's new library.")
        if scan.error or scan.inventory is None:
            return
        if scan.inventory != self._current:
            logger.warning("the hardware changed: %d GPUs", len(scan.inventory.gpus))
            self._current = scan.inventory
            self._changed(scan.inventory)
        lost = [GpuLost(gpu.pci, "NVML says that the GPU is lost") for gpu in scan.lost]
        samples = await asyncio.to_thread(sample_all, self._nvml, self._current)
        await self._monitor.put(*lost, *self._mark(samples))
