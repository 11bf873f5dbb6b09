"""Health of devices as values: what is wrong, since when, and what should follow."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum

from gpunode.model.grace import AT_ONCE, grace_end
from gpunode.model.hardware import PARTITION_MARK, PciAddress
from gpunode.model.times import parse_time


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


_WORST_FIRST = (Level.UNHEALTHY, Level.DEGRADED, Level.HEALTHY)
_WEAKEST_FIRST = ("None", "NoSchedule", "NoExecute")


class Action(StrEnum):
    """What has to happen before the device may be used again."""

    NONE = "none"
    RESTART_APP = "restart-app"
    DRAIN = "drain"
    RESET_GPU = "reset-gpu"
    RESTART_HOST = "restart-host"
    INSPECT = "inspect"


class Clear(StrEnum):
    """Events that may end a finding. The operator's word and a replaced board end every finding."""

    REBOOT = "reboot"
    RESET = "reset"
    VERDICT = "verdict"
    SAMPLE = "sample"


class RecoveryAction(StrEnum):
    """The driver's own verdict on a GPU (NVML field 230 and XID 154). UNKNOWN: the driver does not say.

    Source: nvml.h, nvmlDeviceGpuRecoveryAction_t.
    """

    UNKNOWN = "unknown"
    NONE = "none"
    GPU_RESET = "gpu-reset"
    NODE_REBOOT = "node-reboot"
    DRAIN_P2P = "drain-p2p"
    DRAIN_AND_RESET = "drain-and-reset"
    RECOVER_IMEX = "recover-imex-domain"
    BUS_RESET = "bus-reset"
    SYSTEM_REBOOT = "system-reboot"


@dataclass(frozen=True)
class GpuSample:
    """What a poll of one GPU's health counters found. None: the driver does not offer the value.

    ecc_uncorrected is the volatile count (since driver load or reset), the aggregate one survives both.
    fabric_state is unsupported, notStarted, inProgress or completed; fabric_faults names what its health mask
    reports (e.g. "route-unhealthy"). links_active and links_total count NVLinks. throttle names slowdown reasons.
    leftover_pids: processes that have the GPU open although no claim holds it; None: nobody has looked.
    """

    uuid: str
    pci: PciAddress
    present: bool = True
    recovery: RecoveryAction = RecoveryAction.UNKNOWN
    ecc_uncorrected: int | None = None
    ecc_uncorrected_aggregate: int | None = None
    sram_threshold_exceeded: bool | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    pages_retired: int | None = None
    retirement_pending: bool | None = None
    fabric_state: str = "unsupported"
    fabric_faults: frozenset[str] = frozenset()
    links_active: int | None = None
    links_total: int | None = None
    throttle: frozenset[str] = frozenset()
    leftover_pids: tuple[int, ...] | None = None
    error: str = ""


@dataclass(frozen=True)
class Finding:
    """The verdict of one dimension of one device.

    code: what names it in a taint value, e.g. "79" for XID 79. since: RFC 3339, UTC, seconds.
    message: code, meaning and action in one sentence of at most 1024 characters.
    clears: which events may end it.
    effect: of the taint that tells of it: None (for information), NoSchedule or NoExecute.
    grace: seconds from `since` on for which gangs may stay on the device; None for ever.
    """

    dimension: Dimension
    level: Level
    code: str
    action: Action
    message: str
    since: str
    clears: frozenset[Clear] = frozenset()
    effect: str = "NoSchedule"
    grace: int | None = AT_ONCE


def urgency(finding: Finding) -> tuple[int, datetime, int, str, str]:
    """Sort key for the one finding of a dimension that a taint tells: the stronger effect, then the earlier end of the
    grace, then the worse level. Of equals the older one comes first.

    So a taint is never milder than any of the findings, whatever the policy gives to which.
    """
    began = parse_time(finding.since) or datetime.min.replace(tzinfo=UTC)
    ends = grace_end(began, finding.grace) if finding.grace != AT_ONCE else datetime.min.replace(tzinfo=UTC)
    effect = _WEAKEST_FIRST.index(finding.effect) if finding.effect in _WEAKEST_FIRST else 0
    return -effect, ends, _WORST_FIRST.index(finding.level), finding.since, finding.code


def severity(finding: Finding) -> tuple[int, tuple[int, datetime, int, str, str]]:
    """Sort key for what is said of a device: the worse level first, then as `urgency`."""
    return _WORST_FIRST.index(finding.level), urgency(finding)


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
    """Health of every device of a node, by device name. Devices not named are healthy, or are as their GPU is."""

    devices: dict[str, DeviceHealth] = field(default_factory=dict)

    def of(self, device: str) -> DeviceHealth:
        """Health of one device. A partition that is not named (one that could be made, say) has its GPU's faults."""
        known = self.devices.get(device) or self.devices.get(device.partition(PARTITION_MARK)[0])
        return DeviceHealth(device, known.findings if known else ())
