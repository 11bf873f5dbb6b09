"""The controller's loop: woken by changes, and by nothing but time."""

import asyncio
import contextlib
from datetime import datetime, timedelta
from typing import Any

from prometheus_client import CollectorRegistry

from gpunode.controller.metrics import ControllerMetrics
from gpunode.controller.run import _Loop
from gpunode.model.gang import Action, Config, Reason, ReasonCode, Report

GRACE_S = 1.5


class Still:
    """A world in which nothing changes, a worker whose one gang waits for a time to come, and who is told of it."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.asked: list[datetime] = []
        self.applied: list[str] = []

    async def synced(self) -> None:
        """At once."""

    def take_changes(self) -> list[Any]:
        self.changed.clear()
        return []

    async def decide(self, _changes: list[Any], now: datetime, _config: Config) -> tuple[Action, ...]:
        self.asked.append(now)
        over = now >= self.asked[0] + timedelta(seconds=GRACE_S)
        return (Report("g", Reason(ReasonCode.DEVICE_FAULT if over else ReasonCode.FAULT_GRACE, "")),)

    async def apply(self, actions: tuple[Action, ...]) -> int:
        self.applied += [a.reason.code.value for a in actions if isinstance(a, Report)]
        return 0


async def test_a_grace_ends_though_nothing_happens() -> None:
    still = Still()
    metrics = ControllerMetrics(CollectorRegistry())
    loop = _Loop(still, still, still, metrics, Config(frozenset()))  # type: ignore[arg-type]
    task = asyncio.create_task(loop.run())
    async with asyncio.timeout(10):
        while "DeviceFault" not in still.applied:
            await asyncio.sleep(0.05)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert still.applied[0] == "DeviceFaultGrace"
    late = (still.asked[-1] - still.asked[0]).total_seconds() - GRACE_S
    assert 0 <= late < 2.5, "found out about a second after its end"
    assert len(still.asked) <= 8, "and without haste"
