"""Blast-radius guard: when very many devices fail at once, the cause is rarely the devices."""

from collections.abc import Iterable

import msgspec


class BlastRadius(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much may fail before nothing more is evicted and a person is asked.

    share: of all devices, 0 to 1. window_s: failures this recent count, in seconds. minimum: fewer failures than
    this never stop anything, so that one broken machine of a small cluster is still dealt with.
    """

    share: float = 0.2
    window_s: float = 600.0
    minimum: int = 16

    def exceeded(self, failed_at: Iterable[float], total: int, now: float) -> str:
        """Why to stop acting, or "". failed_at: when each faulty device failed; total: all devices, faulty or not.

        Times are Unix seconds. A failure in the future (a wrong clock somewhere) counts as recent.
        """
        recent = sum(now - at <= self.window_s for at in failed_at)
        if recent < self.minimum or recent <= self.share * total:
            return ""
        return (
            f"{recent} of {total} devices failed within {self.window_s:g} s, more than {self.share:.0%}: "
            "nothing is evicted until a person has looked at it"
        )
