"""Blast-radius guard: when very many devices fail at once, the cause is rarely the devices."""

from collections.abc import Iterable

import msgspec


class BlastRadius(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much may fail at once before nothing is done about it and a person is asked.

    share: of all devices, 0 to 1. window_s: failures within this many seconds of each other are one burst.
    minimum: fewer failures than this never stop anything, so that one broken machine of a small cluster is still
    dealt with.
    """

    share: float = 0.2
    window_s: float = 600.0
    minimum: int = 16

    def bursts(self, failed_at: Iterable[float], total: int) -> tuple[tuple[float, float], ...]:
        """First and last time of each burst that is too large, in order, none overlapping.

        failed_at: when each device that is faulty now failed, Unix seconds. total: all devices, faulty or not.

        A burst stands until enough of its devices are well again, however long ago it was; what fails at another
        time is no part of it.
        """
        ordered = sorted(failed_at)
        found: list[tuple[float, float]] = []
        end = 0
        for start, first in enumerate(ordered):
            while end < len(ordered) and ordered[end] - first <= self.window_s:
                end += 1
            if end - start < self.minimum or end - start <= self.share * total:
                continue
            last = ordered[end - 1]
            if found and first <= found[-1][1]:
                found[-1] = (found[-1][0], last)
            else:
                found.append((first, last))
        return tuple(found)
