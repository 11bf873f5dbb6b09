"""The black-hole guard: a device that fails claim after claim must stop attracting pods.

Only failures of the driver or the hardware count, and only those of distinct claims in a row: a claim that is refused
for what it asks for, or one claim tried again and again, says nothing about the device.
"""

from collections.abc import Callable, Iterable
from typing import Final

THRESHOLD: Final = 3


class BlackHoleGuard:
    """Calls `tripped(device, message)` when a device reaches the threshold, `cleared(device)` when it works again."""

    def __init__(
        self,
        tripped: Callable[[str, str], None],
        cleared: Callable[[str], None],
        threshold: int = THRESHOLD,
    ) -> None:
        self._tripped = tripped
        self._cleared = cleared
        self._threshold = threshold
        self._failed: dict[str, set[str]] = {}

    @property
    def devices(self) -> frozenset[str]:
        """Devices that have reached the threshold."""
        return frozenset(d for d, claims in self._failed.items() if len(claims) >= self._threshold)

    def failed(self, devices: Iterable[str], uid: str, message: str) -> None:
        """Hardware failed for this claim on these devices."""
        for device in devices:
            claims = self._failed.setdefault(device, set())
            if uid in claims or len(claims) >= self._threshold:
                continue
            claims.add(uid)
            if len(claims) == self._threshold:
                self._tripped(
                    device, f"{device} failed for {self._threshold} different claims in a row; last: {message}"[:1024]
                )

    def succeeded(self, devices: Iterable[str]) -> None:
        """These devices were prepared."""
        for device in devices:
            if len(self._failed.pop(device, ())) >= self._threshold:
                self._cleared(device)
