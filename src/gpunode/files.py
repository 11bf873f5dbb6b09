"""Files that are replaced as a whole, and files of another root directory."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

_MAX_LINKS: Final = 40  # as the kernel


def within(root: Path, path: str) -> Path:
    """Where a path leads for a process whose root directory is `root`: absolute links lead there, and none leads out.

    Blocks on the disk. The path may not exist. Raises OSError when its links go in circles.
    """
    found: list[str] = []
    rest = path.split("/")[::-1]
    links = 0
    while rest:
        part = rest.pop()
        if part == "..":
            del found[-1:]
        elif part not in ("", "."):
            try:
                target = str(root.joinpath(*found, part).readlink())
            except OSError:  # no link, or nothing there
                found.append(part)
                continue
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if target.startswith("/"):
                found.clear()
            rest += target.split("/")[::-1]
    return root.joinpath(*found)


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
