"""Keeps a node's inventory current: NVML that is not there yet, driver reloads, GPUs lost and found, MIG changes."""

import logging
from dataclasses import dataclass, replace

import pynvml

from gpunode.hardware.discover import discover
from gpunode.hardware.nvml import Nvml, words
from gpunode.hardware.roots import Roots
from gpunode.model.hardware import Gpu, Inventory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scan:
    """What the node's hardware is now.

    inventory: None until NVML has answered once; a lost GPU stays in it as it was last seen, so that its device does
    not vanish and the NVLink domain keeps its name. lost: those that do not answer. error: why NVML cannot be used,
    "" when it can; then the inventory is that of before. mismatch: NVML's library and the kernel's driver are of
    different versions.
    """

    inventory: Inventory | None = None
    lost: tuple[Gpu, ...] = ()
    error: str = ""
    mismatch: bool = False


class Scanner:
    """Scans one node again and again; the agent calls `scan` from one thread at a time."""

    def __init__(self, nvml: Nvml, roots: Roots, node: str) -> None:
        self._nvml = nvml
        self._roots = roots
        self._node = node
        self._open = False
        self._last: Inventory | None = None

    def scan(self) -> Scan:
        """Blocks for tens of milliseconds on real hardware. Never raises NVML's errors."""
        try:
            found = self._found()
        except pynvml.NVMLError as error:
            self._close()
            lost = self._last.gpus if self._last else ()
            mismatch = isinstance(error, pynvml.NVMLError_LibRmVersionMismatch)
            remedy = (
                "the driver was upgraded and is not loaded anew; reload it or reboot the node"
                if mismatch
                else "is the NVIDIA driver loaded?"
            )
            return Scan(self._last, lost, f"NVML cannot be used: {words(error)}; {remedy}", mismatch)
        inventory, lost = merge(self._last, found)
        self._last = inventory
        return Scan(inventory, lost)

    def _found(self) -> Inventory:
        """One discovery. After a driver reload the old session is void in ways that differ from driver to driver
        (errors everywhere, or GPUs that all do not answer), so then a new one is begun once."""
        fresh = self._ensure_open()
        try:
            found = discover(self._nvml, self._roots, self._node)
            known = self._last is not None and self._last.gpus
            if fresh or found.gpus or not known:
                return found
        except pynvml.NVMLError:
            if fresh:
                raise
        self._close()
        self._ensure_open()
        return discover(self._nvml, self._roots, self._node)

    def _ensure_open(self) -> bool:
        """Whether a session was begun by this call."""
        if self._open:
            return False
        self._nvml.nvmlInit()
        self._open = True
        return True

    def _close(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            self._nvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            logger.debug("NVML session did not end cleanly: %s", words(error))


def merge(last: Inventory | None, found: Inventory) -> tuple[Inventory, tuple[Gpu, ...]]:
    """The inventory with GPUs of before that do not answer any more, and these. A GPU that was replaced, so that
    another one answers at its address, is gone for good; after a reboot nothing is remembered."""
    if last is None or last.boot_id != found.boot_id:
        return found, ()
    uuids, addresses = {g.uuid for g in found.gpus}, {g.pci for g in found.gpus}
    lost = tuple(g for g in last.gpus if g.uuid not in uuids and g.pci not in addresses)
    before = {g.uuid: g for g in last.gpus}
    gpus = sorted((*(_with_ends(g, before.get(g.uuid)) for g in found.gpus), *lost), key=lambda g: str(g.pci))
    return replace(found, gpus=tuple(gpus)), lost


def _with_ends(gpu: Gpu, before: Gpu | None) -> Gpu:
    """A link that went down may not say any more what it ends at, just when its switch's word on that port matters.
    Wires do not move while a machine runs: what the link said before in this boot stands."""
    ends = {link.index: (link.switch, link.port) for link in before.links} if before is not None else {}
    silent = [link for link in gpu.links if link.switch is None and link.peer in ("", "switch")]
    known = {link.index: ends[link.index] for link in silent if ends.get(link.index, (None, None))[0] is not None}
    if not known:
        return gpu
    links = tuple(
        replace(link, switch=known[link.index][0], port=known[link.index][1]) if link.index in known else link
        for link in gpu.links
    )
    return replace(gpu, links=links)
