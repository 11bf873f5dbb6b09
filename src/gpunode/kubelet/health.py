"""The health feed: the newest verdict of every device, told to the kubelet at once and again before it goes stale.

The kubelet stamps each report on arrival and reads a device as Unknown once it has heard nothing for the timeout, so
an unchanged state is sent again well within it. A slow reader misses intermediate states, never the newest one.
Source: pkg/kubelet/cm/dra/manager.go (1.37).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

MESSAGE_LIMIT: Final = 1024


@dataclass(frozen=True)
class DeviceReport:
    """healthy: None means unknown. message: at most 1024 characters are sent."""

    healthy: bool | None
    message: str = ""


@dataclass(frozen=True)
class HealthReport:
    """All devices of the node by device name, and when the state last changed (Unix seconds)."""

    devices: Mapping[str, DeviceReport]
    changed: int


class HealthFeed:
    """Newest state, many readers. `timeout_s` is told to the kubelet; heartbeats come every third of it."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.timeout_s = timeout_s
        self._report = HealthReport(MappingProxyType({}), int(time.time()))
        self._changed = asyncio.Event()
        self._closed = False

    def update(self, devices: Mapping[str, DeviceReport]) -> None:
        """Replace the state of all devices. Readers wake only if something differs."""
        if devices == self._report.devices:
            return
        self._report = HealthReport(MappingProxyType(dict(devices)), int(time.time()))
        self._wake()

    def close(self) -> None:
        """End all readers: the agent leaves."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch(self) -> AsyncIterator[HealthReport]:
        """The state now, at every change, and again after a third of the timeout without one. Ends with `close`."""
        while not self._closed:
            changed = self._changed
            yield self._report
            if changed is not self._changed:
                continue
            try:
                await asyncio.wait_for(changed.wait(), self.timeout_s / 3)
            except TimeoutError:
                continue
