"""The machine under the agent: the real one, or a fake one that looks the same from here on up."""

import asyncio
import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from gpunode.agent.options import AgentOptions
from gpunode.hardware.fake import FakeMachine, Recover, Xid
from gpunode.hardware.nvml import Nvml, load_nvml
from gpunode.hardware.roots import Roots
from gpunode.model.faults import FaultOrder

_KMSG = Path("/dev/kmsg")


@dataclass(frozen=True)
class Machine:
    """`execute` carries out fault orders; None on real hardware, which takes no such orders."""

    nvml: Nvml
    roots: Roots
    execute: Callable[[FaultOrder], Awaitable[None]] | None = None


def open_machine(options: AgentOptions) -> Machine:
    """Blocks on the disk for a fake machine. Raises OSError when its directory cannot be written."""
    if options.board is None:
        return Machine(load_nvml(), Roots.real())
    fake = FakeMachine.create(options.board, options.node, options.fake_root, _own_kernel_log())

    async def execute(order: FaultOrder) -> None:
        fault = Recover(device=order.device) if order.xid is None else Xid(device=order.device, code=order.xid)
        await asyncio.to_thread(fake.inject, fault)

    return Machine(fake.nvml, fake.roots, execute)


def _own_kernel_log() -> Path | None:
    """/dev/kmsg where it is a file of this node's own (as on local cluster nodes), never the real kernel's log."""
    try:
        return _KMSG if stat.S_ISREG(_KMSG.stat().st_mode) else None
    except OSError:
        return None
