"""Whether so many devices failed at once that no gang is to be restarted for them."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from gpunode.allocate.pools import DeviceId, PoolDevice
from gpunode.gang.derived import View
from gpunode.health.guard import BlastRadius
from gpunode.model.gang import Config
from gpunode.model.hardware import PARTITION_MARK
from gpunode.model.names import HEALTH_DIMENSIONS, HEALTH_TAINT_PREFIX, QUARANTINE_TAINT
from gpunode.model.times import parse_time

_FAILED = frozenset(HEALTH_TAINT_PREFIX + dimension for dimension in HEALTH_DIMENSIONS)
_HARMFUL = ("NoSchedule", "NoExecute")


@dataclass(frozen=True)
class Alarm:
    """Devices that failed in a burst too large to act on, and the sentence that says so."""

    devices: frozenset[DeviceId] = frozenset()
    text: str = ""

    def holds(self, devices: Iterable[DeviceId]) -> bool:
        """Whether all of these faulty devices are part of it, so that nothing is done about them."""
        return bool(self.devices) and self.devices.issuperset(devices)


def alarm(view: View, config: Config, now: datetime) -> Alarm:
    """The alarm of a snapshot. A partition counts as the GPU that it is of.

    A device that a person has quarantined is not held back: that is a decision. A fault without a time is of now.
    """
    radius = BlastRadius(config.blast_share, config.blast_window_s, config.blast_minimum)
    failed: dict[tuple[str, str, str], float] = {}
    suspects = [device for pool in view.pools.values() for device in pool.suspects.values()]
    if len(suspects) < radius.minimum:
        return Alarm()
    for device in suspects:
        at = _failed_at(device, now)
        if at is not None:
            failed[_gpu(device.id)] = min(at, failed.get(_gpu(device.id), at))
    total = len({_gpu(device.id) for pool in view.pools.values() for device in pool.devices})
    bursts = radius.bursts(failed.values(), total)
    if not bursts:
        return Alarm()
    within = {gpu for gpu, at in failed.items() if any(first <= at <= last for first, last in bursts)}
    held = frozenset(d.id for d in suspects if _gpu(d.id) in within and not _quarantined(d))
    return Alarm(
        held,
        f"{len(within)} of {total} GPUs failed within {radius.window_s:g} s of each other, more than "
        f"{radius.share:.0%}: the cause is rarely the GPUs, so nothing is restarted until they recover or are "
        "quarantined (gpunode quarantine), or the controller runs with --blast-share 1",
    )


def _gpu(id_: DeviceId) -> tuple[str, str, str]:
    return id_.driver, id_.pool, id_.device.partition(PARTITION_MARK)[0]


def _failed_at(device: PoolDevice, now: datetime) -> float | None:
    times = [parse_time(t.time_added) or now for t in device.taints if t.key in _FAILED and t.effect in _HARMFUL]
    return min(times).timestamp() if times else None


def _quarantined(device: PoolDevice) -> bool:
    return any(t.key == QUARANTINE_TAINT for t in device.taints)
