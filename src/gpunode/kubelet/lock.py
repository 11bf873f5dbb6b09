"""A lock between the processes that serve one node."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LOCK_POLL_S: Final = 0.005


class NodeLock:
    """One holder a node, across processes and threads (flock).

    Two plugin instances run side by side during a rolling update, and the kubelet may call either.
    """

    def __init__(self, path: Path, timeout_s: float = 20.0) -> None:
        self._path = path
        self._timeout_s = timeout_s

    @contextmanager
    def held(self) -> Iterator[None]:
        """Blocks. Raises TimeoutError when another holder keeps it longer than the timeout, OSError on the file."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._wait(fd)
            yield
        finally:
            os.close(fd)

    def _wait(self, fd: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has held {self._path} for {self._timeout_s:.0f} s; "
                        "look for a second plugin instance that hangs"
                    ) from None
                time.sleep(LOCK_POLL_S)
