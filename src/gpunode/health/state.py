"""What health remembers: a frozen, serialisable value."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import msgspec

from gpunode.health.rules import Raise
from gpunode.model.health import Dimension, Finding, Level, RecoveryAction
from gpunode.model.times import stamp

STATE_VERSION = 1
MAX_HISTORY = 500
MAX_NOTES = 64


@dataclass(frozen=True)
class Instant:
    """A moment: `wall` in Unix seconds for people, `uptime` in seconds since boot for durations.

    Durations never use the wall clock, so a wrong or stepped one only mislabels times.
    """

    wall: float
    uptime: float

    @property
    def text(self) -> str:
        """RFC 3339, UTC, seconds; the epoch where the clock is beyond what a date can hold."""
        try:
            return stamp(datetime.fromtimestamp(self.wall, UTC))
        except (OverflowError, ValueError, OSError):
            return "1970-01-01T00:00:00Z"


class Entry(msgspec.Struct, frozen=True):
    """One standing fault. `last`, `recovering`: uptime of the last sighting and since when its end is in sight,
    and `because` of what.

    kernel, nvml: sightings by source; both report each event, so the larger one is the number of events.
    detailed: the verdict rests on the text, not only on the code.
    level: before the policy; None in files of versions that did not keep it.
    """

    finding: Finding
    last: float
    kernel: int = 0
    nvml: int = 0
    detailed: bool = False
    recovering: float | None = None
    because: str = ""
    level: Level | None = None

    @property
    def count(self) -> int:
        return max(self.kernel, self.nvml, 1)


class Note(msgspec.Struct, frozen=True):
    """Sightings of something harmless. `told`, `seen`: uptime of the last transition and the last sighting.

    `place` and `pids` serve the rules about repetition.
    """

    text: str
    first: str
    last: str
    told: float
    seen: float = 0.0
    kernel: int = 0
    nvml: int = 0
    place: str = ""
    pids: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return max(self.kernel, self.nvml)


class Flaps(msgspec.Struct, frozen=True):
    """How often a fault came back soon after it was lifted, and when (uptime) the last one was lifted."""

    count: int = 0
    lifted: float = 0.0


class Waiting(msgspec.Struct, frozen=True):
    """A bare code from NVML whose meaning is in a kernel log line that may still come. `since`: uptime."""

    effect: Raise
    since: float


class DeviceState(msgspec.Struct, frozen=True):
    """One device. `entries` by "<dimension>/<code>", `notes` by code, `waiting` by code, `flaps` by dimension.

    sampled, valid: uptime of the last poll and whether it found the GPU present and content.
    absent: polls in a row that did not find it.
    """

    uuid: str = ""
    entries: dict[str, Entry] = {}
    notes: dict[str, Note] = {}
    flaps: dict[str, Flaps] = {}
    waiting: dict[str, Waiting] = {}
    verdict: RecoveryAction = RecoveryAction.UNKNOWN
    sampled: float | None = None
    valid: bool = True
    absent: int = 0
    prepare_failures: int = 0
    links_seen: int = 0
    ecc: int = 0


class Transition(msgspec.Struct, frozen=True):
    """One thing that happened to a device, for Events, metrics and the history. No dimension: mere information."""

    at: str
    device: str
    dimension: Dimension | None
    code: str
    change: Literal["raised", "changed", "cleared", "noted"]
    level: Level
    message: str


class HealthState(msgspec.Struct, frozen=True):
    """Everything. `kernel_sequence`: the last kernel log record taken in, of this boot.

    lifetime_ecc: uncorrected memory errors in a board's life as last polled, by the board's UUID; it outlives boots.
    """

    boot_id: str = ""
    version: int = STATE_VERSION
    devices: dict[str, DeviceState] = {}
    history: tuple[Transition, ...] = ()
    kernel_sequence: int | None = None
    lifetime_ecc: dict[str, int] = {}


@dataclass(frozen=True)
class Step:
    """A new state and what happened on the way, oldest first."""

    state: HealthState
    transitions: tuple[Transition, ...] = ()
