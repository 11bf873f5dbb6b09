"""The machine under the agent: the real one, or a fake one that looks the same from here on up."""

import asyncio
import logging
import stat
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec

from gpunode.agent.options import AgentOptions
from gpunode.hardware.driver import DriverRoot, load_nvml
from gpunode.hardware.fake import FakeMachine, Fault, Recover, Xid
from gpunode.hardware.fake.faults import parse_fault
from gpunode.hardware.fake.state import Play
from gpunode.hardware.nvml import Nvml
from gpunode.hardware.roots import Roots
from gpunode.health.scenario import ScenarioError, TimedFault, expand, parse_scenario
from gpunode.kubelet.cdi import NOTHING, CommonEdits
from gpunode.kubelet.timeslice import run_command
from gpunode.kubelet.toolkit import TOOL, common_edits
from gpunode.model.errors import HardwareError
from gpunode.model.faults import FaultOrder

logger = logging.getLogger(__name__)
_KMSG = Path("/dev/kmsg")
# Faults of a scenario that are this close together happen together; the hardware is looked at this often meanwhile.
_TOGETHER_S = 0.01
_LOOK_S = 0.5
_MAX_TOGETHER = 1000

# Called when the hardware has changed and is worth a look.
Changed = Callable[[], None]
# Carries an order out; what is returned is still to be run (a scenario takes its time). Raises LookupError for a device
# that is not here, ValueError for a scenario that is not one.
Execute = Callable[[FaultOrder, Changed], Awaitable[Coroutine[None, None, None] | None]]
# Goes on with what an earlier agent began; what is returned is still to be run.
Resume = Callable[[Changed], Sequence[Coroutine[None, None, None]]]


def _nothing_to_resume(_changed: Changed) -> Sequence[Coroutine[None, None, None]]:
    return ()


@dataclass(frozen=True)
class Machine:
    """`execute` carries out fault orders; None on real hardware, which takes no such orders. `resume` goes on with the
    scenarios of orders that an earlier agent could not finish; what it returns is still to be run.

    libraries: asks what containers get besides device nodes; raises HardwareError. run: how driver tools are run.
    """

    nvml: Nvml
    roots: Roots
    execute: Execute | None = None
    resume: Resume = _nothing_to_resume
    libraries: Callable[[], CommonEdits] = lambda: NOTHING
    run: Callable[[Sequence[str]], None] = run_command


def open_machine(options: AgentOptions) -> Machine:
    """Blocks on the disk for a fake machine. Raises OSError when its directory cannot be written."""
    if options.board is None:
        return _real(DriverRoot(options.host_root, options.driver_root))
    fake = FakeMachine.create(options.board, options.node, options.fake_root, _own_kernel_log())

    async def execute(order: FaultOrder, changed: Changed) -> Coroutine[None, None, None] | None:
        if order.scenario:
            script = _script(fake, order.id, order.scenario)
            return _play(fake, script, await asyncio.to_thread(fake.begin, order.id, order.scenario), changed)
        fault = Recover(device=order.device) if order.xid is None else Xid(device=order.device, code=order.xid)
        await asyncio.to_thread(fake.inject, fault)
        changed()
        return None

    return Machine(fake.nvml, fake.roots, execute, partial(_resume, fake), run=_tell_nobody)


def _real(root: DriverRoot) -> Machine:
    def libraries() -> CommonEdits:
        return common_edits(root.command(TOOL, host_paths=True), root.installed() or "/")

    def run(command: Sequence[str]) -> None:
        tool, *arguments = command
        begin = root.command(tool)
        if begin is None:
            raise HardwareError(f"{tool} is not installed beside the driver; see --host-root and --driver-root")
        run_command([*begin, *arguments])

    return Machine(load_nvml(root), Roots.real(), libraries=libraries, run=run)


def _script(fake: FakeMachine, order: str, scenario: str) -> Iterator[TimedFault]:
    """Raises ScenarioError."""
    return expand(parse_scenario(scenario, f"order {order}"), len(fake.state.gpus))


def _resume(fake: FakeMachine, changed: Changed) -> list[Coroutine[None, None, None]]:
    """Scenarios that were under way when the agent before this one ended. What should have happened since happens at
    once, in order."""
    rest = []
    for play in list(fake.state.saved.playing):
        try:
            script = _script(fake, play.order, play.scenario)
        except ScenarioError as error:  # of a newer or older version of ours
            logger.error("a fault scenario is not gone on with: %s", error)
            with suppress(OSError):
                fake.end(play)
            continue
        logger.warning("fault scenario of order %s goes on after %d faults", play.order, play.done)
        rest.append(_play(fake, islice(script, play.done, None), play, changed))
    return rest


async def _play(fake: FakeMachine, script: Iterator[TimedFault], play: Play, changed: Changed) -> None:
    """Each fault at its time. A disk that is full ends it, and is told. Whoever cancels it can have it gone on with."""
    looked = time.monotonic()
    due: list[Fault] = []

    async def happen() -> None:
        nonlocal looked
        await asyncio.to_thread(partial(fake.inject, *due, of=play))
        due.clear()
        if time.monotonic() - looked >= _LOOK_S:
            looked = time.monotonic()
            changed()

    try:
        for timed in script:
            wait = _until(play.began + timed.at)
            if due and (wait > _TOGETHER_S or len(due) >= _MAX_TOGETHER):
                await happen()
            if wait > _TOGETHER_S:
                await asyncio.sleep(_until(play.began + timed.at))
            due.append(parse_fault(msgspec.json.encode(timed.fault)))
        await happen()
        await asyncio.to_thread(fake.end, play)
    except (OSError, LookupError, ValueError) as error:
        logger.error("a fault scenario ended early: %s", error)
        with suppress(OSError):
            await asyncio.to_thread(fake.end, play)
    changed()


def _until(moment: float) -> float:
    """Seconds until a moment of the clock that agents of one boot share."""
    return moment - time.clock_gettime(time.CLOCK_BOOTTIME)


def _tell_nobody(_command: Sequence[str]) -> None:
    """Fake GPUs have no driver tools; settings made with them are only noted."""


def _own_kernel_log() -> Path | None:
    """/dev/kmsg where it is a file of this node's own (as on local cluster nodes), never the real kernel's log."""
    try:
        return _KMSG if stat.S_ISREG(_KMSG.stat().st_mode) else None
    except OSError:
        return None
