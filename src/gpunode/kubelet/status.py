"""What a claim's status.devices says about each device, for the person debugging a pod. Pure."""

from collections.abc import Mapping
from typing import Any

from gpunode.kubelet.cdi import device_id
from gpunode.kubelet.checkpoint import Entry, HeldDevice, State
from gpunode.kubelet.config import Mps, TimeSlicing
from gpunode.kubelet.health import MESSAGE_LIMIT, DeviceReport


def device_statuses(
    entry: Entry, driver: str, health: Mapping[str, DeviceReport], now: str, before: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """AllocatedDeviceStatus objects (resource.k8s.io/v1) for all devices of a prepared claim.

    now: RFC 3339. before: condition times by (device, share, type) joined with "/", to keep the time of a condition
    whose status did not change; see `condition_times`. Limits (8 conditions, 10 KiB of data) are kept by far.
    """
    return [_status(entry, held, driver, health.get(held.device), now, before or {}) for held in entry.devices]


def condition_times(statuses: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """(status, lastTransitionTime) of each condition in status.devices as it is now, for `before`."""
    return {
        _key(s["device"], s.get("shareID"), c["type"]): (c["status"], c.get("lastTransitionTime", ""))
        for s in statuses
        for c in s.get("conditions", ())
    }


def _key(device: str, share: str | None, kind: str) -> str:
    return f"{device}/{share or ''}/{kind}"


def _status(
    entry: Entry, held: HeldDevice, driver: str, report: DeviceReport | None, now: str, before: Mapping[str, Any]
) -> dict[str, Any]:
    prepared = entry.state is State.COMPLETED
    conditions = [
        _condition("Prepared", prepared, "Prepared" if prepared else "InProgress",
                   f"CDI device {device_id(entry.uid, held)}" if prepared else "preparation was interrupted"),
    ]  # fmt: skip
    if report is not None:
        reason = {True: "Healthy", False: "Unhealthy", None: "Unknown"}[report.healthy]
        conditions.append(_condition("Healthy", report.healthy, reason, report.message[:MESSAGE_LIMIT]))
    for condition in conditions:
        old = before.get(_key(held.device, held.share_id, condition["type"]))
        condition["lastTransitionTime"] = old[1] if old and old[0] == condition["status"] and old[1] else now
    return {
        "driver": driver,
        "pool": held.pool,
        "device": held.device,
        **({"shareID": held.share_id} if held.share_id else {}),
        "conditions": conditions,
        "data": _data(held),
    }


def _condition(kind: str, status: bool | None, reason: str, message: str) -> dict[str, str]:
    text = {True: "True", False: "False", None: "Unknown"}[status]
    return {"type": kind, "status": text, "reason": reason, "message": message}


def _data(held: HeldDevice) -> dict[str, Any]:
    data: dict[str, Any] = {
        "uuid": held.nodes.uuid,
        "pciBusID": held.nodes.pci,
        "product": held.nodes.product,
        "deviceNodes": [node.container_path for node in held.nodes.nodes],
        "sharing": _sharing(held),
    }
    if held.admin:
        data["adminAccess"] = True
    if held.consumed:
        data["consumedCapacity"] = held.consumed
    return {name: value for name, value in data.items() if value}


def _sharing(held: HeldDevice) -> str:
    """One phrase; says where a share is a promise and not a limit."""
    match held.sharing:
        case TimeSlicing(interval):
            how = f"time slicing, interval {interval}"
        case Mps(threads, memory):
            limits = [f"{threads} % of threads" if threads else "", f"{memory} bytes of memory" if memory else ""]
            told = " and ".join(limit for limit in limits if limit)
            how = f"MPS, each process at most {told}" if told else "MPS"
        case None:
            how = ""
    if held.share_id and not (isinstance(held.sharing, Mps) and held.sharing.pinned_memory_bytes):
        limit = "MPS with a pinnedDeviceMemoryLimit would, for each process"
        how += ("; " if how else "") + f"share is accounting only: nothing on the GPU enforces it ({limit})"
    return how
