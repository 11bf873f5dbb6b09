"""Processes that have a GPU open although no claim holds it: what keeps a GPU from being reset or divided."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from gpunode.hardware.nodes import whole_gpu
from gpunode.hardware.roots import Roots
from gpunode.kubelet.checkpoint import Entries
from gpunode.kubelet.seams import Leftover
from gpunode.model.hardware import PARTITION_MARK, Inventory, device_name
from gpunode.model.health import GpuSample
from gpunode.model.injection import DeviceNodes

logger = logging.getLogger(__name__)

# A look costs some 8 µs an open file of the node (22 ms where 140 processes have 2,800), and nothing while claims hold
# all GPUs.
EVERY_S: Final = 300.0
# What keeps GPUs open by right: the driver's and the fabric's daemons, monitoring, display servers, MPS, and agents of
# ours. The kernel keeps 15 characters of a name. docs/health.md lists them.
HOST_DAEMONS: Final = (
    "dcgm-exporter",
    "gpunode",
    "nv-fabricmanager",
    "nv-hostengine",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-persistenced",
    "nvlsm",
    "Xorg",
)
_KERNEL_NAME: Final = 15
_BY_RIGHT: Final = frozenset(name[:_KERNEL_NAME] for name in HOST_DAEMONS)


class Users(Protocol):
    """Who has devices open. Blocking."""

    def users(self, devices: Mapping[str, DeviceNodes]) -> Mapping[str, Sequence[Leftover]]:
        """Users of each device by its key, those without one left out."""
        ...


class LeftoverWatch:
    """Looks every five minutes, beside the polls, whose samples `mark` completes with what was found since.

    A process counts once two looks in a row have found it, and only on GPUs that no claim held before and after each:
    what a pod does between being prepared and released is never called a leftover, nor is one that is just ending.
    """

    def __init__(
        self,
        processes: Users,
        entries: Callable[[], Awaitable[Entries]],
        inventory: Callable[[], Inventory],
        roots: Roots,
        every_s: float = EVERY_S,
    ) -> None:
        self._processes = processes
        self._entries = entries
        self._inventory = inventory
        self._roots = roots
        self._every_s = every_s
        self._before: Mapping[str, frozenset[int]] = {}
        self._found: dict[str, tuple[int, ...]] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.look()

    async def look(self) -> None:
        """Once. A checkpoint that cannot be read says nothing about who holds what, so then nothing is found."""
        try:
            free = await self._free()
            users = await asyncio.to_thread(self._processes.users, free)
            still = await self._free()
        except OSError as error:
            logger.info("leftover processes not looked for, will retry: %s", error)
            return
        now = {uuid: _strangers(users.get(uuid, ())) for uuid in free if uuid in still}
        self._found = {uuid: tuple(sorted(pids & self._before.get(uuid, frozenset()))) for uuid, pids in now.items()}
        self._before = now

    def mark(self, samples: Sequence[GpuSample]) -> tuple[GpuSample, ...]:
        """The samples with the result of the last look, which counts once."""
        found, self._found = self._found, {}
        return tuple(
            replace(one, leftover_pids=found[one.uuid]) if one.present and one.uuid in found else one for one in samples
        )

    async def _free(self) -> dict[str, DeviceNodes]:
        """Nodes of the GPUs, by UUID, that no claim holds, whole or in part."""
        held = {d.device.partition(PARTITION_MARK)[0] for e in (await self._entries()).values() for d in e.devices}
        gpus = [gpu for gpu in self._inventory().gpus if device_name(gpu.pci) not in held]
        return {gpu.uuid: whole_gpu(gpu, self._roots) for gpu in gpus}


def _strangers(users: Sequence[Leftover]) -> frozenset[int]:
    return frozenset(user.pid for user in users if user.command[:_KERNEL_NAME] not in _BY_RIGHT)
