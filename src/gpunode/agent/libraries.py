"""The driver's libraries as containers are given them: asked for at the start, and when they may have changed."""

import asyncio
import logging
from collections.abc import Callable

from gpunode.kubelet.cdi import NOTHING, CommonEdits
from gpunode.model.errors import HardwareError

logger = logging.getLogger(__name__)
# Asking takes the toolkit seconds of CPU; what it finds changes when driver or toolkit are upgraded.
_EVERY_S = 1800.0
_RETRY_S = 10.0

# Told of what keeps the agent from working as it should: reason (CamelCase) and a sentence.
Complain = Callable[[str, str], None]


class DriverLibraries:
    """Remembers the last good answer: a toolkit that fails later takes nothing from claims that are prepared."""

    def __init__(self, ask: Callable[[], CommonEdits], complain: Complain) -> None:
        self._ask = ask
        self._complain = complain
        self._known: CommonEdits | None = None
        self._error = "the driver's libraries have not been asked for yet"
        self._wake = asyncio.Event()

    def current(self) -> CommonEdits:
        """Raises HardwareError as long as there was no good answer."""
        if self._known is None:
            raise HardwareError(f"the driver's libraries are not known: {self._error}")
        return self._known

    def wake(self) -> None:
        """The driver may have changed: ask soon."""
        self._wake.set()

    def refresh(self) -> None:
        """Ask now. Blocks for seconds. What goes wrong is complained of, once for each way to fail."""
        try:
            self._known, self._error = self._ask(), ""
        except HardwareError as error:
            if str(error) != self._error:
                self._complain("DriverLibrariesUnknown", str(error))
            self._error = str(error)

    async def run(self) -> None:
        """Keep asking until cancelled."""
        while True:
            try:
                async with asyncio.timeout(_RETRY_S if self._error else _EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            before = self._known
            await asyncio.to_thread(self.refresh)
            if self._known not in (before, NOTHING):
                logger.info("the driver's libraries changed: %d mounts", len(self.current().mounts))
