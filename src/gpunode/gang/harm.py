"""Which devices of a gang are faulty, and until when it may stay on them all the same."""

from dataclasses import dataclass
from datetime import datetime
from functools import partial

from gpunode.allocate.allocator import tolerated
from gpunode.allocate.pools import DeviceId, result_id
from gpunode.gang.board import location
from gpunode.gang.derived import View
from gpunode.gang.gangs import GangState, Stage
from gpunode.model.gang import Snapshot
from gpunode.model.grace import grace_end, parse_grace
from gpunode.model.names import GRACE_TAINT_PREFIX, HEALTH_DIMENSIONS, HEALTH_TAINT_PREFIX, QUARANTINE_TAINT
from gpunode.model.resource import AllocationResult, DeviceTaint
from gpunode.model.times import parse_time

HEALTH_KEYS = (*(HEALTH_TAINT_PREFIX + dimension for dimension in HEALTH_DIMENSIONS), QUARANTINE_TAINT)


@dataclass(frozen=True)
class Fault:
    """A device of a gang that its claim may no longer use.

    until: until when the gang may stay on it in spite of that (NEVER: as long as it likes); None: no longer.
    """

    device: DeviceId
    taint: DeviceTaint
    node: str
    until: datetime | None = None

    def __str__(self) -> str:
        value = f"={self.taint.value}" if self.taint.value else ""
        return f"{self.device} is tainted {self.taint.key}{value}" + (f" on {self.node}" if self.node else "")


def find_faults(state: GangState, view: View, snapshot: Snapshot, now: datetime) -> tuple[Fault, ...]:
    """Faults of the devices that a gang's members hold, for as long as their claims do not tolerate them.

    A grace is for pods that run: what only waiting members hold has none. Of claims that share a device, the one whose
    use of it ends first counts: each tolerates what it tolerates.
    """
    faults: dict[DeviceId, Fault] = {}
    for member in sorted(state.members, key=lambda m: m.stage is Stage.WAITING):
        runs = member.stage is not Stage.WAITING
        for claim in member.claims:
            for result in claim.status.allocation.devices.results if claim.status.allocation is not None else ():
                id_, found = result_id(result), _fault(result, view, now)
                if found is None:
                    continue
                known = faults.get(id_)
                if known is None or (runs and _order(now, found) < _order(now, (known.taint, known.until))):
                    taint, until = found
                    faults[id_] = Fault(id_, taint, location(member.pod, snapshot), until if runs else None)
    return tuple(faults[id_] for id_ in sorted(faults))


def _fault(result: AllocationResult, view: View, now: datetime) -> tuple[DeviceTaint, datetime | None] | None:
    """The taint that ends a device's use, or will end it first, and when."""
    pool = view.pools.get((result.driver, result.pool))
    if result.admin_access or pool is None or not pool.complete:
        return None
    device = pool.suspects.get(result.device)
    taints = device.taints if device is not None else ()
    harmful = [
        (taint, _until(taint, taints, now))
        for taint in taints
        if taint.key in HEALTH_KEYS and taint.effect in ("NoSchedule", "NoExecute") and _expired(taint, result, now)
    ]
    return min(harmful, key=partial(_order, now), default=None)


def _order(now: datetime, fault: tuple[DeviceTaint, datetime | None]) -> tuple[datetime, int]:
    """An XID says more than the loss that follows it: dimensions are listed in that order."""
    taint, until = fault
    return until or now, HEALTH_KEYS.index(taint.key)


def _until(taint: DeviceTaint, taints: tuple[DeviceTaint, ...], now: datetime) -> datetime | None:
    """The end of the grace that stands beside a health taint; None where there is none (any more).

    It counts from the health taint's timeAdded, as tolerationSeconds does. For NoExecute there is none: Kubernetes
    itself ends the pods, one by one.
    """
    key = GRACE_TAINT_PREFIX + taint.key.removeprefix(HEALTH_TAINT_PREFIX)
    given = [parse_grace(beside.value) for beside in taints if beside.key == key]
    if not given or taint.effect != "NoSchedule":
        return None
    since = parse_time(taint.time_added)
    end = min(grace_end(since, seconds) for seconds in given)
    return end if end > now else None


def _expired(taint: DeviceTaint, result: AllocationResult, now: datetime) -> bool:
    """Whether no toleration covers the taint (any more).

    As in kube-controller-manager's device taint eviction: the smallest tolerationSeconds of those that match
    counts from timeAdded; without any, a match tolerates for ever.
    """
    matching = [t for t in result.tolerations if tolerated(taint, (t,))]
    if not matching:
        return True
    seconds = [t.toleration_seconds for t in matching if t.toleration_seconds is not None]
    return bool(seconds) and now >= grace_end(parse_time(taint.time_added), max(min(seconds), 0))
