"""Files that are replaced as a whole, and a lock between processes."""

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

LOCK_POLL_S: Final = 0.005


def write_atomic(path: Path, data: bytes, *, durable: bool) -> None:
    """Replace `path` so that readers see the old or the new content. durable: also after a power cut.

    Raises OSError; nothing is left behind then except, after a crash, one `.tmp` file that the next write reuses.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600 if durable else 0o644)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(fd)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class NodeLock:
    """One holder a node: an asyncio lock inside this process, flock between plugin instances.

    Two instances run side by side during a rolling update and the kubelet may call either.
    """

    def __init__(self, path: Path, timeout_s: float = 30.0) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._inside = asyncio.Lock()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Raises TimeoutError when another process keeps the lock longer than the timeout, OSError on the file."""
        async with self._inside:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                await self._wait(fd)
                yield
            finally:
                os.close(fd)

    async def _wait(self, fd: int) -> None:
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
                await asyncio.sleep(LOCK_POLL_S)
