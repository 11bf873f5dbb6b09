"""Running a program of the driver or the container toolkit: bounded in time, in what it may print, and in its end."""

import os
import selectors
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Final

from gpunode.model.errors import HardwareError

_READ: Final = 64 * 1024
_KILLED_S: Final = 2.0
_WORDS: Final = 300


def run_tool(command: Sequence[str], timeout_s: float, max_bytes: int = _READ) -> bytes:
    """What it prints. Blocks.

    Raises HardwareError: it is missing, it fails (with its own words), takes longer, or prints more.

    Never waited for without a limit: a process that hangs in the driver cannot be killed, and whoever waits for its
    end hangs with it.
    """
    try:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except (OSError, ValueError) as error:
        raise HardwareError(f"{command[0]}: {error}") from error
    if process.stdout is None or process.stderr is None:
        raise ValueError("a process without pipes")
    with process.stdout as out, process.stderr as err:
        try:
            printed, said, in_time = _read(out, err, time.monotonic() + timeout_s, max_bytes)
            ended = in_time and len(printed) <= max_bytes
            status = _end(process, timeout_s if ended else 0)
        finally:
            process.kill()
    what = " ".join(command)
    if len(printed) > max_bytes:
        raise HardwareError(f"{what} printed more than {max_bytes} bytes")
    if status is None or not in_time:
        raise HardwareError(f"{what} did not end within {timeout_s:g} s; look whether nvidia-smi answers on this node")
    if status != 0:
        words = " ".join((said or printed).decode(errors="replace").split())[-_WORDS:]
        raise HardwareError(f"{what} failed with status {status}: {words}")
    return printed


def _read(out: IO[bytes], err: IO[bytes], deadline: float, max_bytes: int) -> tuple[bytes, bytes, bool]:
    """Output, the end of the error output, and whether both were read whole in time."""
    printed, said = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(out, selectors.EVENT_READ, printed)
        selector.register(err, selectors.EVENT_READ, said)
        while selector.get_map() and len(printed) <= max_bytes:
            left = deadline - time.monotonic()
            if left <= 0:
                return bytes(printed), bytes(said), False
            for key, _ in selector.select(left):
                some = os.read(key.fd, _READ)
                if not some:
                    selector.unregister(key.fileobj)
                key.data.extend(some)
            del said[:-_READ]
    return bytes(printed), bytes(said), True


def _end(process: "subprocess.Popen[bytes]", patience_s: float) -> int | None:
    """Its status; it is killed when it does not end by itself. None when it cannot be."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(patience_s)
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)
    return None
