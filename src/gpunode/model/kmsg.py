"""Records of the Linux kernel log as /dev/kmsg gives them: one reader for the live log and for recorded ones.

Source: Documentation/ABI/testing/dev-kmsg of the Linux kernel, and msg_add_ext_text in kernel/printk/printk.c.
"""

import re
from dataclasses import dataclass
from typing import Final

MAX_TEXT: Final = 4096
_HEAD = re.compile(r"(?a)(\d{1,4}),(\d{1,20}),(\d{1,20}),[^;]{0,64};")
_ESCAPED = re.compile(r"(?:\\x[0-9a-f]{2})+")


@dataclass(frozen=True)
class KernelRecord:
    """One message. seq rises by one a record; usec: microseconds since boot; level: 0 emergency to 7 debug.

    text: what was given to printk, of perhaps several lines, without the line end; at most MAX_TEXT characters.
    """

    seq: int
    usec: int
    text: str
    level: int = 6


def parse_record(line: str) -> KernelRecord | None:
    """`prio,seq,usec,flags[,...];text`; what follows the first line end (" KEY=value") does not count. None for
    anything else.

    The kernel writes control characters, the backslash and all beyond ASCII as \\xNN. They are what they were again in
    `text`, so that a line end in it is one that was printed, and the characters of an escape are only ever text.
    """
    head = _HEAD.match(line)
    if head is None:
        return None
    priority, seq, usec = head.groups()
    # An escape takes four characters.
    text = line[head.end() : head.end() + 4 * MAX_TEXT].partition("\n")[0]
    return KernelRecord(int(seq), int(usec), unescaped(text)[:MAX_TEXT], int(priority) & 7)


def unescaped(text: str) -> str:
    """The text that the kernel escaped; bytes that are no UTF-8 become U+FFFD."""
    return _ESCAPED.sub(_bytes, text) if "\\x" in text else text


def _bytes(match: re.Match[str]) -> str:
    return bytes.fromhex(match[0].replace("\\x", "")).decode("utf-8", "replace")
