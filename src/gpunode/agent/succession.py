"""Two agents on one node: in a rolling update the new one is there before the old one leaves.

Both hold claims by turns (the node lock) and would publish slices, each as its own version wants them, and undo each
other's work without end. So the one that came last publishes, and the other only answers the kubelet's calls.

The one that publishes also removes the sockets of agents that were killed, which the kubelet would dial for ever.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path

from gpunode.kubelet.plugin import DeadSocket, KubeletPaths

logger = logging.getLogger(__name__)
_CONNECT_S = 1.0


class Succession:
    """`superseded` is whether a newer agent of the driver serves this node; `changed` is called when that changes.

    The newest is the one whose registration socket was made last and still answers: one that was killed leaves its
    socket, but nobody behind it.
    """

    def __init__(
        self, paths: KubeletPaths, driver: str, instance: str, changed: Callable[[], None], every_s: float = 1.0
    ) -> None:
        self.superseded = False
        self._paths = paths
        self._driver = driver
        self._dead: frozenset[DeadSocket] = frozenset()
        self._own = paths.registration_socket(driver, instance)
        self._changed = changed
        self._every_s = every_s

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            try:
                self.look()
                if not self.superseded:
                    await asyncio.to_thread(self.sweep)
            except OSError as error:  # a directory that goes while it is read
                logger.info("other agents of this node not looked for, will retry: %s", error)
            await asyncio.sleep(self._every_s)

    def look(self) -> None:
        """Look once. Blocks for as long as a stat takes, and a second for a newer agent that hangs."""
        mine = _made(self._own)
        others = (path for path in self._paths.registration_sockets(self._driver) if path != self._own)
        newer = [path for path in others if mine is not None and (_made(path) or (0, "")) > mine]
        superseded = any(_answers(path) for path in newer)
        if superseded != self.superseded:
            self.superseded = superseded
            logger.info("another agent serves this node: %s", "it publishes from now on" if superseded else "it left")
            self._changed()

    def sweep(self) -> None:
        """Remove sockets that were dead at the last call as well: one that was only just bound may not listen yet.
        Blocks."""
        dead = self._paths.dead_sockets(self._driver)
        for one in dead & self._dead:
            one.remove()
        self._dead = dead


def _made(path: Path) -> tuple[int, str] | None:
    """Orders sockets by when they were made; by name where the file system's clock does not tell."""
    try:
        return path.stat().st_ctime_ns, path.name
    except OSError:
        return None


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_CONNECT_S)
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True
