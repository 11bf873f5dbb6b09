"""Keeps the node's health: takes signals from all sources, steps the machine, saves, and tells what happened.

The only writer of the health state file. Signals of a burst are taken in together, so that a storm costs one step,
one save and one publication a batch.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from gpunode.health.devices import DeviceMap
from gpunode.health.machine import HealthMachine
from gpunode.health.signals import Signal
from gpunode.health.state import HealthState, Instant, Step, Transition
from gpunode.health.store import load, save
from gpunode.model.health import NodeHealth

logger = logging.getLogger(__name__)
_BATCH_S = 0.02
_MAX_BATCH = 20_000
# Time alone ends faults (hold-downs): step at least this often.
_IDLE_S = 2.0

# Told after each step in which something happened, once it is on disk.
Listener = Callable[[Sequence[Transition]], Awaitable[None]]


class HealthMonitor:
    """`health` is the current verdict on every device of `devices`."""

    def __init__(self, machine: HealthMachine, path: Path, listener: Listener) -> None:
        self._machine = machine
        self._path = path
        self._listener = listener
        self._queue: asyncio.Queue[tuple[Signal, int | None]] = asyncio.Queue(maxsize=_MAX_BATCH)
        self._state = HealthState()
        self._devices = DeviceMap()
        self._save_problem = ""

    @property
    def health(self) -> NodeHealth:
        return self._machine.project(self._state, self._devices)

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
            logger.error("%s", loaded.note)
        self._devices = devices
        step = self._machine.rebooted(loaded.state, boot_id, now())
        self._state = step.state
        return step.transitions

    def use(self, devices: DeviceMap) -> None:
        """The inventory changed: signals mean these devices from now on."""
        self._devices = devices

    async def put(self, signal: Signal, kernel_sequence: int | None = None) -> None:
        """Take in one signal; waits while too many are pending, so that a storm cannot fill the memory."""
        await self._queue.put((signal, kernel_sequence))

    async def run(self) -> None:
        """Step until cancelled."""
        while True:
            batch = await self._collect()
            step = self._machine.step(self._state, [signal for signal, _ in batch], self._devices, now())
            sequences = [sequence for _, sequence in batch if sequence is not None]
            await self._settle(step, max(sequences, default=None))

    async def _collect(self) -> list[tuple[Signal, int | None]]:
        try:
            async with asyncio.timeout(_IDLE_S):
                batch = [await self._queue.get()]
        except TimeoutError:
            return []
        await asyncio.sleep(_BATCH_S)
        while len(batch) < _MAX_BATCH and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        return batch

    async def _settle(self, step: Step, sequence: int | None) -> None:
        state = step.state
        if sequence is not None:
            state = msgspec.structs.replace(state, kernel_sequence=sequence)
        if state == self._state:
            return
        changed = bool(step.transitions) or sequence is not None
        self._state = state
        if changed:
            problem = await asyncio.to_thread(save, self._path, state)
            if problem and problem != self._save_problem:
                logger.error("%s", problem)
            self._save_problem = problem
        if step.transitions:
            await self._listener(step.transitions)


def now() -> Instant:
    """This moment on both clocks."""
    return Instant(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME))
