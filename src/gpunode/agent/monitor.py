"""Keeps the node's health: takes signals from all sources, steps the machine, saves, and tells what happened.

The only writer of the health state file; while two agents serve a node (a rolling update), the newer one. Signals of
a burst are taken in together, so that a storm costs one step a batch, one save a second and one publication for each
thing that really happened.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpunode.health.devices import DeviceMap
from gpunode.health.machine import HealthMachine
from gpunode.health.signals import Signal
from gpunode.health.state import HealthState, Instant, Step, Transition
from gpunode.health.store import load, save, take_requests
from gpunode.model.health import GpuSample, NodeHealth

logger = logging.getLogger(__name__)
_BATCH_S = 0.02
# A batch is stepped in one go on the event loop: at most some tens of milliseconds.
_MAX_BATCH = 2_000
_MAX_PENDING = 20_000
# Time alone ends faults (hold-downs), and operators may have left a word: step at least this often.
_IDLE_S = 2.0
# What happened is saved at once. Counts, waits and recoveries may be lost with this much of the log, which is read
# again from where the saved state ends; what only polls told may be lost for longer, the next poll tells it again.
_SAVE_SIGNALS_S = 1.0
_SAVE_POLLS_S = 60.0

# Told after each step that changed the verdict on a device, once it is on disk, with what happened (perhaps only a
# better wording, then nothing).
Listener = Callable[[Sequence[Transition]], Awaitable[None]]
# Whether this agent is the one that writes the state and hears operators.
InCharge = Callable[[], bool]
# Told of what keeps health from working as it should: reason (CamelCase) and a sentence.
Complain = Callable[[str, str], None]


@dataclass(frozen=True)
class _Taken:
    """Signals that belong together. sequence: the kernel log record up to which everything has been told."""

    signals: tuple[Signal, ...]
    sequence: int | None = None


class HealthMonitor:
    """`health` is the current verdict on every device; nobody sees it before it is on disk (where that can be)."""

    def __init__(
        self,
        machine: HealthMachine,
        path: Path,
        listener: Listener,
        complain: Complain,
        in_charge: InCharge = lambda: True,
    ) -> None:
        self._machine = machine
        self._path = path
        self._listener = listener
        self._complain = complain
        self._in_charge = in_charge
        self._queue: asyncio.Queue[_Taken] = asyncio.Queue(maxsize=_MAX_PENDING)
        self._state = HealthState()
        self._devices = DeviceMap()
        self._health = NodeHealth()
        self._save_problem = ""
        self._save_at = float("inf")
        self._writing = threading.Lock()

    @property
    def health(self) -> NodeHealth:
        return self._health

    @property
    def state(self) -> HealthState:
        """Everything that is remembered, for metrics."""
        return self._state

    @property
    def kernel_sequence(self) -> int | None:
        """The last kernel log record that was taken in, so that a replay of the ring skips what is known."""
        return self._state.kernel_sequence

    def start(self, boot_id: str, devices: DeviceMap) -> tuple[Transition, ...]:
        """Load the saved state and carry it into this boot; what the reboot ended. Blocks on the disk."""
        loaded = load(self._path)
        if loaded.note:
            self._complain("HealthStateUnusable", loaded.note)
        self._devices = devices
        step = self._machine.rebooted(loaded.state, boot_id, now())
        self._state = step.state
        self._health = self._machine.project(self._state, devices)
        if self._state != loaded.state:
            self._save_at = time.monotonic()
        return step.transitions

    def use(self, devices: DeviceMap) -> None:
        """The inventory changed: signals mean these devices from now on."""
        self._devices = devices
        self._health = self._machine.project(self._state, devices)

    async def put(self, *signals: Signal, kernel_sequence: int | None = None) -> None:
        """Take in signals that belong together (the polls of one moment, say) in one step.

        kernel_sequence: the record that they are from; it may have none. Waits while too many are pending, so that
        a storm cannot fill the memory.
        """
        await self._queue.put(_Taken(signals, kernel_sequence))

    async def run(self) -> None:
        """Step until cancelled; what is not yet on disk is saved then."""
        try:
            while True:
                batch = await self._collect()
                words, problem = take_requests(self._path) if self._in_charge() else ((), "")
                if problem:
                    self._complain("HealthRequestUnusable", problem)
                signals = [*words, *(signal for taken in batch for signal in taken.signals)]
                step = self._machine.step(self._state, signals, self._devices, now())
                sequences = [taken.sequence for taken in batch if taken.sequence is not None]
                await self._settle(step, signals, sequences[-1] if sequences else None)
        finally:
            if self._save_at < float("inf") and self._in_charge():
                self._write()

    async def _collect(self) -> list[_Taken]:
        wait = min(_IDLE_S, max(0.0, self._save_at - time.monotonic()))
        try:
            async with asyncio.timeout(wait):
                batch = [await self._queue.get()]
        except TimeoutError:
            return []
        await asyncio.sleep(_BATCH_S)
        while len(batch) < _MAX_BATCH and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        return batch

    async def _settle(self, step: Step, signals: Sequence[Signal], sequence: int | None) -> None:
        state = step.state
        if sequence is not None:
            state = msgspec.structs.replace(state, kernel_sequence=sequence)
        if state != self._state:
            polls_only = all(isinstance(signal, GpuSample) for signal in signals)
            within = 0.0 if step.transitions else _SAVE_POLLS_S if polls_only else _SAVE_SIGNALS_S
            self._save_at = min(self._save_at, time.monotonic() + within)
        self._state = state
        if time.monotonic() >= self._save_at:
            await self._save()
        before, self._health = self._health, self._machine.project(state, self._devices)
        if step.transitions or self._health != before:
            await self._listener(step.transitions)

    async def _save(self) -> None:
        if not self._in_charge():
            self._save_at = time.monotonic() + _SAVE_SIGNALS_S
            return
        problem = await asyncio.to_thread(self._write)
        self._save_at = time.monotonic() + _SAVE_POLLS_S if problem else float("inf")
        if problem and problem != self._save_problem:
            self._complain("HealthStateNotSaved", problem)
        self._save_problem = problem

    def _write(self) -> str:
        """Save what is known now; one at a time, for at the agent's end a save may be under way in its thread."""
        with self._writing:
            return save(self._path, self._state)


def now() -> Instant:
    """This moment on both clocks."""
    return Instant(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME))
