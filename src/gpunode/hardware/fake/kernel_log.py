"""The fake's kernel log: a file of /dev/kmsg records, or the real device where the machine was given one."""

import os
import re
import stat
import time
from pathlib import Path

# Facility kern, level err: how the NVIDIA driver logs an XID.
_PRIORITY = 3
# Two records of the largest size.
_TAIL = 16 * 1024
_PLAIN = re.compile(r"[ -\[\]-~]*")


def append(path: Path, text: str) -> None:
    """One record `prio,seq,usec,-;text`. All but printable ASCII, and the backslash, become \\xNN, as the kernel writes
    them, so that a text cannot pass for another record. usec: microseconds since boot."""
    safe = text if _PLAIN.fullmatch(text) else "".join(_escaped(byte) for byte in text.encode())
    if path.exists() and stat.S_ISCHR(path.stat().st_mode):
        with path.open("wb", buffering=0) as device:
            device.write(f"<{_PRIORITY}>{safe}".encode())
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        record = f"{_PRIORITY},{_next_sequence(file.fileno())},{time.monotonic_ns() // 1000},-;{safe}\n"
        file.write(record.encode())


def _escaped(byte: int) -> str:
    return chr(byte) if 0x20 <= byte < 0x7F and byte != 0x5C else f"\\x{byte:02x}"


def _next_sequence(descriptor: int) -> int:
    size = os.fstat(descriptor).st_size
    lines = os.pread(descriptor, _TAIL, max(0, size - _TAIL)).splitlines()
    for line in reversed(lines):
        fields = line.split(b";", 1)[0].split(b",")
        if len(fields) >= 4 and fields[1].isdigit():
            return int(fields[1]) + 1
    return 0
