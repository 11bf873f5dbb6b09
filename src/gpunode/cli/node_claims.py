"""`gpunode claims --node`: the claims that have devices of a node, as the API server knows them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from gpunode.cli.connect import chosen, run
from gpunode.cli.output import fail
from gpunode.model.meta import ApiStruct, Condition, ObjectMeta
from gpunode.model.resource import Allocation, AllocationResult, ConsumerReference

_NONE = "-"


class DeviceStatus(ApiStruct, frozen=True, kw_only=True):
    """What a driver says of one allocated device (AllocatedDeviceStatus). data: whatever the driver tells."""

    driver: str
    pool: str
    device: str
    share_id: str | None = None
    conditions: tuple[Condition, ...] = ()
    data: Any = None


class ClaimStatus(ApiStruct, frozen=True):
    allocation: Allocation | None = None
    reserved_for: tuple[ConsumerReference, ...] = ()
    devices: tuple[DeviceStatus, ...] = ()


class Claim(ApiStruct, frozen=True):
    """A claim as far as this command shows it."""

    metadata: ObjectMeta = ObjectMeta()
    status: ClaimStatus = ClaimStatus()


def read(kubeconfig: Path | None, node: str) -> list[Claim]:
    """All claims there are. Ends the program where the cluster refuses, or has no such node."""
    from gpunode.kube.client import Api
    from gpunode.kube.errors import ApiError
    from gpunode.kube.kinds import CLAIMS, NODES

    async def ask() -> list[Claim] | None:
        async with await Api.connect(chosen(kubeconfig), "gpunode-cli") as api:
            try:
                await api.get(NODES.path(name=node), NODES.type)
            except ApiError as error:
                if error.not_found:
                    return None
                raise
            return (await api.list(CLAIMS.path(), Claim))[0]

    found = run(ask)
    if found is None:
        fail(f"there is no node {node}: `kubectl get nodes` lists them")
    return found


def plain(claims: Iterable[Claim], node: str, driver: str) -> list[dict[str, Any]]:
    """Claims with devices of that node and driver, ordered by name; without what is empty."""
    found = []
    for claim in sorted(claims, key=lambda c: c.metadata.key):
        results = _results(claim, node, driver)
        if results:
            meta = claim.metadata
            pods = [ref.name for ref in claim.status.reserved_for if ref.resource == "pods"]
            devices = [_device(result, claim.status.devices) for result in results]
            one = {"namespace": meta.namespace, "name": meta.name, "uid": meta.uid, "pods": pods, "devices": devices}
            found.append(_filled(one))
    return found


def _results(claim: Claim, node: str, driver: str) -> list[AllocationResult]:
    allocation = claim.status.allocation
    results = allocation.devices.results if allocation is not None else ()
    return [result for result in results if (result.driver, result.pool) == (driver, node)]


def _device(result: AllocationResult, statuses: Sequence[DeviceStatus]) -> dict[str, Any]:
    """conditions: none while the node has not prepared the claim."""
    key = (result.driver, result.pool, result.device, result.share_id)
    status = next((s for s in statuses if (s.driver, s.pool, s.device, s.share_id) == key), None)
    conditions = status.conditions if status is not None else ()
    return _filled(
        {
            "device": result.device,
            "request": result.request,
            "adminAccess": bool(result.admin_access),
            "shareID": result.share_id,
            "consumedCapacity": dict(result.consumed_capacity),
            "conditions": [
                _filled({"type": c.type, "status": c.status, "reason": c.reason, "message": c.message})
                for c in conditions
            ],
            "data": status.data if status is not None else None,
        }
    )


def _filled(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


def table(claims: Iterable[dict[str, Any]]) -> Table:
    """One line a device, of what `plain` returned."""
    made = Table("CLAIM", "PODS", "DEVICE", "REQUEST", "UUID", "PREPARED", "HEALTHY", box=None, pad_edge=False)
    for claim in claims:
        first = (f"{claim['namespace']}/{claim['name']}", ", ".join(claim.get("pods", ())) or _NONE)
        for device in claim["devices"]:
            data = device.get("data")
            uuid = data.get("uuid") if isinstance(data, dict) else None
            shown = (device["device"], device["request"], str(uuid or _NONE))
            made.add_row(*map(escape, (*first, *shown, _said(device, "Prepared"), _said(device, "Healthy"))))
            first = ("", "")
    return made


def _said(device: dict[str, Any], kind: str) -> str:
    """A condition in a word, and why where it is not True."""
    found = next((c for c in device.get("conditions", ()) if c["type"] == kind), None)
    if found is None:
        return _NONE
    words = {"True": "yes", "False": "no"}.get(found["status"], "unknown")
    return words if words == "yes" or "message" not in found else f"{words}: {found['message']}"
