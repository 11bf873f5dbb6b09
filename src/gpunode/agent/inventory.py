"""Waiting for the hardware: NVML may not be there yet when a node boots."""

import asyncio
import logging

import pynvml

from gpunode.agent.machine import Machine
from gpunode.hardware.discover import discover
from gpunode.kube.events import ObjectRef, Recorder
from gpunode.model.hardware import Inventory

logger = logging.getLogger(__name__)
_RETRY_S = 5.0


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


def _read(machine: Machine, node: str) -> Inventory:
    machine.nvml.nvmlInit()
    return discover(machine.nvml, machine.roots, node)
