"""Follows the kernel log: /dev/kmsg, or a regular file of the same records (a fake machine's).

Record form and read semantics: Documentation/ABI/testing/dev-kmsg of the Linux kernel.
"""

import errno
import logging
import os
import select
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from gpunode.hardware.stream import Put, ThreadStream
from gpunode.model.kmsg import KernelRecord, parse_record

logger = logging.getLogger(__name__)

# The kernel's own limit of a record with its dictionary (CONSOLE_EXT_LOG_MAX).
_MAX_RECORD = 8192
_POLL_S = 0.1
_RETRY_S = 1.0


def follow(
    path: Path, after: int = -1, limit: int = 4096, failed: Callable[[OSError], None] | None = None
) -> ThreadStream[KernelRecord]:
    """The log from its oldest record on, then each new one; opening replays the ring, so records whose sequence
    number is not above `after` are left out. Never fails: a log that cannot be read is tried again and again, and
    `failed` is called, from the reading thread, once for each new reason.
    """

    def source(put: Put[KernelRecord], stopped: threading.Event) -> None:
        complained = ""
        last = after

        def keep(record: KernelRecord) -> None:
            nonlocal last
            if record.seq > last:
                last = record.seq
                put(record)

        while not stopped.is_set():
            try:
                if stat.S_ISCHR(path.stat().st_mode):
                    _follow_device(path, keep, stopped)
                else:
                    last = _follow_file(path, put, stopped, last)
                complained = ""
            except OSError as error:
                if str(error) != complained:
                    logger.warning("kernel log %s cannot be read, will retry: %s", path, error)
                    complained = str(error)
                    if failed is not None:
                        failed(error)
                stopped.wait(_RETRY_S if not isinstance(error, FileNotFoundError) else _POLL_S)

    return ThreadStream(f"kernel log {path}", source, limit)


def _follow_device(path: Path, keep: Put[KernelRecord], stopped: threading.Event) -> None:
    """One read gives one record. EPIPE: records were overwritten before they were read, the next read goes on."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not stopped.is_set():
            if not poll.poll(_POLL_S * 1000):
                continue
            try:
                data = os.read(descriptor, _MAX_RECORD)
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno == errno.EPIPE:
                    logger.warning("kernel log %s overran: records were lost", path)
                    continue
                if error.errno == errno.EINVAL:
                    continue  # a record longer than the buffer; the kernel has moved past it
                raise
            if not data:
                stopped.wait(_POLL_S)
                continue
            record = parse_record(data.decode("utf-8", "replace"))
            if record is not None:
                keep(record)
    finally:
        os.close(descriptor)


def _follow_file(path: Path, put: Put[KernelRecord], stopped: threading.Event, after: int) -> int:
    """Until the file is replaced or shortened, then returns where a new reading starts: from the beginning of a
    log that began anew (a reboot). While it is the same log, records up to `after` are left out."""
    with path.open("rb") as file:
        opened = os.fstat(file.fileno())
        last, rest, skipping = after, b"", False
        while not stopped.is_set():
            data = file.read(65536)
            if not data:
                if not _same(path, opened.st_ino, file.tell()):
                    return -1
                stopped.wait(_POLL_S)
                continue
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                record = None if skipping else parse_record(line[:_MAX_RECORD].decode("utf-8", "replace"))
                skipping = False
                if record is not None and record.seq > last:
                    last = record.seq
                    put(record)
            if len(rest) > _MAX_RECORD:  # a line without end: what was read of it is not kept
                rest, skipping = b"", True
        return last


def _same(path: Path, inode: int, offset: int) -> bool:
    try:
        now = path.stat()
    except FileNotFoundError:
        return False
    return now.st_ino == inode and now.st_size >= offset
