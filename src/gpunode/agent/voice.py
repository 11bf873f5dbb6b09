"""What the agent tells people: Events on its node and on claims, sent beside whoever has something to tell."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

from gpunode.health.state import Transition
from gpunode.kube.events import ObjectRef, Recorder
from gpunode.kubelet.seams import Notice
from gpunode.model.health import Level

logger = logging.getLogger(__name__)
# Of what is not written yet; more is only logged. An API server that does not answer for hours must cost no memory.
_MAX_WAITING: Final = 1024


class Voice:
    """Nobody who tells something waits for the API server. `about` is the node."""

    def __init__(self, recorder: Recorder, about: ObjectRef) -> None:
        self._recorder = recorder
        self._about = about
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_order = asyncio.Lock()

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the caller."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def complain(self, reason: str, message: str) -> None:
        """From any thread: something of the agent's own does not work as it should."""
        self.notice(Notice(reason, message))

    def notice(self, notice: Notice) -> None:
        """From any thread: an Event on the claim it is about, else on the node."""
        logger.warning("%s: %s", notice.reason, notice.message)
        with suppress(RuntimeError):  # the agent has ended, and a thread of it has not
            self._loop.call_soon_threadsafe(self._soon, notice)

    def health(self, transitions: Sequence[Transition]) -> None:
        """What happened to devices, as Events of the node, in the order in which it happened."""
        if self._has_room(f"{len(transitions)} transitions"):
            self.later(self._report(transitions))

    def _soon(self, notice: Notice) -> None:
        if self._has_room(notice.reason):
            self.later(self._tell(notice))

    def _has_room(self, what: str) -> bool:
        if len(self._tasks) < _MAX_WAITING:
            return True
        logger.warning("%s: no Event, for %d others are still to be written", what, len(self._tasks))
        return False

    async def _tell(self, notice: Notice) -> None:
        about = self._about
        if notice.claim is not None:
            namespace, name, uid = notice.claim
            about = ObjectRef("resource.k8s.io/v1", "ResourceClaim", name, namespace, uid)
        action = "Prepare" if notice.claim else "Observe"
        await self._recorder.emit(about, notice.reason, notice.message, "Warning", action)

    async def _report(self, transitions: Sequence[Transition]) -> None:
        async with self._in_order:
            for one in transitions:
                reason, kind = _event(one)
                await self._recorder.emit(self._about, reason, f"{one.device}: {one.message}", kind, "WatchHealth")


def _event(transition: Transition) -> tuple[str, Literal["Normal", "Warning"]]:
    """Event reason and type of something that happened to a device."""
    if transition.change == "cleared" and transition.dimension is not None:
        return "GpuRecovered", "Normal"
    if transition.level is Level.HEALTHY:
        return "GpuNotice", "Normal"
    return ("GpuUnhealthy" if transition.level is Level.UNHEALTHY else "GpuDegraded"), "Warning"
