"""How long gangs may stay on a faulty device: the value of a grace taint, written by the agent, read by the controller.

Effect None is ignored by kube-scheduler and by kube-controller-manager, so the taint only speaks to the controller.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

AT_ONCE: Final = 0
FOREVER: Final = None
# An end that is never reached.
NEVER: Final = datetime.max.replace(tzinfo=UTC)
# A month; what the health policy allows too.
MAX_GRACE_S: Final = 30 * 86400

_SECONDS = re.compile(r"([0-9]{1,7})s")


def grace_value(seconds: int | None) -> str:
    """The taint's value: `600s`, or `forever` for None."""
    return "forever" if seconds is FOREVER else f"{seconds}s"


def parse_grace(value: str) -> int | None:
    """The grace that a taint's value gives: seconds, None for ever. What cannot be read gives none, so 0."""
    if value == "forever":
        return FOREVER
    found = _SECONDS.fullmatch(value)
    return min(int(found[1]), MAX_GRACE_S) if found else AT_ONCE


def grace_end(since: datetime | None, seconds: int | None) -> datetime:
    """When a grace that began at `since` ends. NEVER for one without end, and where it is not known when it began.

    Also for tolerationSeconds, which may be any 64-bit number: what is beyond the calendar never comes.
    """
    if seconds is FOREVER or since is None:
        return NEVER
    try:
        return since + timedelta(seconds=seconds)
    except OverflowError:
        return NEVER
