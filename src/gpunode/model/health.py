"""Health of devices as values: what is wrong, since when, and what should follow."""

from dataclasses import dataclass, field
from enum import StrEnum


class Dimension(StrEnum):
    """Independent sources of a verdict; a device is as healthy as its worst dimension."""

    XID = "xid"
    ECC = "ecc"
    REMAP = "remap"
    FABRIC = "fabric"
    LINK = "link"
    PRESENCE = "presence"
    PREPARE = "prepare"


class Level(StrEnum):
    """How bad: healthy < degraded (usable, act at leisure) < unhealthy (must not be used)."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"


class Action(StrEnum):
    """What has to happen before the device may be used again."""

    NONE = "none"
    RESTART_APP = "restart-app"
    RESET_GPU = "reset-gpu"
    RESTART_HOST = "restart-host"
    INSPECT = "inspect"


@dataclass(frozen=True)
class Finding:
    """The verdict of one dimension of one device.

    code: what names it in a taint value, e.g. "79" for XID 79. since: RFC 3339, UTC, seconds.
    message: code, meaning and action in one sentence of at most 1024 characters.
    """

    dimension: Dimension
    level: Level
    code: str
    action: Action
    message: str
    since: str
    clears: frozenset[str] = frozenset()


@dataclass(frozen=True)
class DeviceHealth:
    """All findings of one device (by device name); no finding means healthy."""

    device: str
    findings: tuple[Finding, ...] = ()

    @property
    def level(self) -> Level:
        levels = {f.level for f in self.findings}
        for level in (Level.UNHEALTHY, Level.DEGRADED):
            if level in levels:
                return level
        return Level.HEALTHY

    @property
    def message(self) -> str:
        """The worst finding's sentence, or "" when healthy; at most 1024 characters."""
        worst = sorted(self.findings, key=lambda f: (f.level != Level.UNHEALTHY, f.since))
        return worst[0].message[:1024] if worst else ""


@dataclass(frozen=True)
class NodeHealth:
    """Health of every device of a node, by device name. Devices not named are healthy."""

    devices: dict[str, DeviceHealth] = field(default_factory=dict)

    def of(self, device: str) -> DeviceHealth:
        return self.devices.get(device, DeviceHealth(device))
