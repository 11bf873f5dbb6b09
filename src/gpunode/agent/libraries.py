"""The driver's libraries as containers are given them: asked for at the start, and when they may have changed."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from gpunode.agent.monitor import Complain
from gpunode.kubelet.cdi import NOTHING, CommonEdits
from gpunode.model.errors import HardwareError

logger = logging.getLogger(__name__)
# Asking takes the toolkit seconds of CPU; what it finds changes when driver or toolkit are upgraded.
_EVERY_S = 1800.0
_RETRY_S = 10.0
# How long an agent that starts waits for the first answer: one that hangs must not keep the kubelet from its agent.
_FIRST_S = 10.0


class DriverLibraries:
    """Remembers the last good answer: a toolkit that fails later takes nothing from claims that are prepared."""

    def __init__(self, ask: Callable[[], CommonEdits], complain: Complain) -> None:
        self._ask = ask
        self._complain = complain
        self._known: CommonEdits | None = None
        self._error = "the container toolkit has not answered yet"
        self._wake = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None

    def current(self) -> CommonEdits:
        """Raises HardwareError as long as there was no good answer."""
        if self._known is None:
            raise HardwareError(f"the driver's libraries are not known: {self._error}")
        return self._known

    def wake(self) -> None:
        """The driver may have changed: ask soon."""
        self._wake.set()

    async def start(self) -> None:
        """Ask, and wait a while for the answer; one that comes later counts all the same."""
        self._asking = asyncio.create_task(self._ask_aside())
        await asyncio.wait([self._asking], timeout=_FIRST_S)

    def refresh(self) -> None:
        """Ask now. Blocks for seconds. What goes wrong is complained of, once for each way to fail."""
        try:
            found = self._ask()
            if found == NOTHING and self._known not in (None, NOTHING):
                raise HardwareError("the container toolkit is gone; what it said last stands until it is back")
            if found == NOTHING and self._known is None:
                logger.info("there is no container toolkit: containers get device nodes, not the driver's libraries")
            self._known, self._error = found, ""
        except (HardwareError, OSError) as error:  # the driver's directory may be a mount that went away
            if str(error) != self._error:
                self._complain("DriverLibrariesUnknown", str(error))
            self._error = str(error) or repr(error)

    async def run(self) -> None:
        """Keep asking until cancelled."""
        if self._asking is not None:
            await self._asking
        while True:
            # Looking whether a toolkit that was missing has come costs nothing.
            settled = not self._error and self._known != NOTHING
            try:
                async with asyncio.timeout(_EVERY_S if settled else _RETRY_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            before = self._known
            await self._ask_aside()
            if self._known not in (before, NOTHING):
                logger.info("the driver's libraries changed: %d mounts", len(self.current().mounts))

    async def _ask_aside(self) -> None:
        """In a thread that nobody waits for at the end of the process: the tool may hang in the driver."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def work() -> None:
            try:
                self.refresh()
            finally:
                with suppress(RuntimeError):  # the loop has ended meanwhile
                    loop.call_soon_threadsafe(done.set)

        threading.Thread(target=work, name="driver-libraries", daemon=True).start()
        await done.wait()
