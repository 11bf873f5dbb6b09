"""Files that are replaced as a whole, and a lock between processes."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

LOCK_POLL_S: Final = 0.005


def _no_step(_name: str) -> None:
    return None


def write_atomic(path: Path, data: bytes, *, durable: bool, step: Callable[[str], None] = _no_step) -> None:
    """Replace `path` so that readers see the old or the new content. durable: also after a power cut.

    Raises OSError; nothing is left behind then. A kill may leave one `.tmp` file that the next write reuses.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    step(f"write {path.name}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600 if durable else 0o644)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(fd)
        step(f"rename {path.name}")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        step(f"sync {path.parent.name}")
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
