"""Knowing the hardware: waiting for it when a node boots, and looking again while it runs."""

import asyncio
import logging
from collections.abc import Callable

import pynvml

from gpunode.agent.machine import Machine
from gpunode.hardware.discover import discover
from gpunode.kube.events import ObjectRef, Recorder
from gpunode.model.hardware import Inventory

logger = logging.getLogger(__name__)
_RETRY_S = 5.0
_RESCAN_S = 30.0


async def first_inventory(machine: Machine, recorder: Recorder, about: ObjectRef) -> Inventory:
    """The node's inventory as soon as NVML answers; until then says why not and tries again."""
    told = ""
    while True:
        try:
            return await asyncio.to_thread(_read, machine, about.name)
        except pynvml.NVMLError as error:
            if str(error) != told:
                told = str(error)
                note = f"NVML is not usable yet ({error}); no GPUs are published until the driver is loaded"
                logger.warning("%s", note)
                await recorder.emit(about, "NvmlUnavailable", note, "Warning", "Discover")
        await asyncio.sleep(_RETRY_S)


async def rescan_forever(
    machine: Machine, node: str, current: Inventory, wake: asyncio.Event, changed: Callable[[Inventory], None]
) -> None:
    """Look again every half minute, and at once when `wake` is set: GPUs come back, drivers are loaded anew.

    `changed` is given each inventory that differs from the one before. While NVML does not answer, the last one
    stands: what cannot be asked has not changed.
    """
    while True:
        try:
            async with asyncio.timeout(_RESCAN_S):
                await wake.wait()
        except TimeoutError:
            pass
        wake.clear()
        try:
            found = await asyncio.to_thread(_read, machine, node)
        except pynvml.NVMLError as error:
            logger.warning("NVML does not answer, the GPUs found before stay published: %s", error)
            continue
        if found != current:
            logger.warning("the hardware changed: %d GPUs, driver %s", len(found.gpus), found.driver_version)
            current = found
            changed(found)


def _read(machine: Machine, node: str) -> Inventory:
    machine.nvml.nvmlInit()
    return discover(machine.nvml, machine.roots, node)
