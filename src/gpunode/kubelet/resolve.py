"""From a live claim to what the node has to do: pure functions, no I/O."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from gpunode.kubelet.checkpoint import Entry, HeldDevice, State
from gpunode.kubelet.config import ConfigError, Mps, Sharing, sharing_for
from gpunode.kubelet.errors import ClaimError, ErrorKind
from gpunode.model.injection import DeviceNodes
from gpunode.model.resource import AllocationResult, ResourceClaim

# A UID becomes part of a file name, so nothing else gets further than the request.
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
# API object names: DNS subdomains (names) and labels (namespaces).
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclass(frozen=True)
class ClaimRef:
    """Which claim the kubelet means. `checked` raises ClaimError unless all three parts can be a claim's."""

    namespace: str
    name: str
    uid: str

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    def checked(self) -> "ClaimRef":
        for field, value, form in (("uid", self.uid, _UID), ("namespace", self.namespace, _NAME),
                                   ("name", self.name, _NAME)):  # fmt: skip
            if not form.fullmatch(value):
                raise ClaimError(ErrorKind.REQUEST, f"claims[].{field} {value[:80]!r} is not a valid {field}")
        return self


@dataclass(frozen=True)
class Node:
    """Who we are: the driver's name, the pool we publish, and this boot."""

    driver: str
    pool: str
    boot_id: str


def results_of(claim: ResourceClaim, driver: str) -> tuple[AllocationResult, ...]:
    """Our driver's results of a claim's allocation; a claim may hold devices of several drivers."""
    allocation = claim.status.allocation
    return () if allocation is None else tuple(r for r in allocation.devices.results if r.driver == driver)


def check_live(ref: ClaimRef, claim: ResourceClaim) -> None:
    """Raises ClaimError unless this is the very claim the kubelet means, and it is allocated."""
    if claim.metadata.uid != ref.uid:
        raise ClaimError(
            ErrorKind.UID,
            f"claim {ref.key} was re-created: the API server has UID {claim.metadata.uid[:64]!r}, "
            f"the kubelet asks for {ref.uid}",
        )
    if claim.status.allocation is None:
        raise ClaimError(ErrorKind.NOT_ALLOCATED, f"claim {ref.key} has no allocation (status.allocation is empty)")


def resolve(ref: ClaimRef, claim: ResourceClaim, node: Node, devices: Mapping[str, DeviceNodes]) -> Entry:
    """The entry that preparing this claim leads to, before any effect on hardware.

    Raises ClaimError: another UID, no allocation, a pool of another node, a device that is not here.
    """
    check_live(ref, claim)
    merged: dict[tuple[str, str | None], HeldDevice] = {}
    for index, result in enumerate(results_of(claim, node.driver)):
        held = _held(ref, index, result, node, devices)
        if not held.admin:  # an administrator looks; how the device is shared is for its user to say
            held = replace(held, sharing=_sharing(ref, claim, node, result.request, held))
        key = (held.device, held.share_id)
        if before := merged.get(key):
            requests = tuple(dict.fromkeys(before.requests + held.requests))
            owner = held if before.admin else before
            held = replace(owner, requests=requests)
        merged[key] = held
    return Entry(
        uid=ref.uid, namespace=ref.namespace, name=ref.name, boot_id=node.boot_id,
        state=State.STARTED, devices=tuple(merged.values()),
    )  # fmt: skip


def _held(
    ref: ClaimRef, index: int, result: AllocationResult, node: Node, devices: Mapping[str, DeviceNodes]
) -> HeldDevice:
    where = f"claim {ref.key}: status.allocation.devices.results[{index}]"
    if result.pool != node.pool:
        raise ClaimError(
            ErrorKind.WRONG_NODE, f"{where}.pool is {result.pool[:80]!r}, but this node's pool is {node.pool!r}"
        )
    nodes = devices.get(result.device)
    if nodes is None:
        raise ClaimError(
            ErrorKind.UNKNOWN_DEVICE,
            f"{where}.device {result.device[:80]!r} is not on this node now (it has {len(devices)} devices)",
        )
    return HeldDevice(
        device=result.device, pool=result.pool, requests=(result.request.partition("/")[0],), nodes=nodes,
        admin=bool(result.admin_access), share_id=result.share_id, consumed=result.consumed_capacity,
    )  # fmt: skip


def _sharing(ref: ClaimRef, claim: ResourceClaim, node: Node, request: str, held: HeldDevice) -> Sharing | None:
    configs = claim.status.allocation.devices.config if claim.status.allocation else ()
    try:
        return sharing_for(configs, node.driver, request, partition=bool(held.nodes.parent))
    except ConfigError as error:
        raise ClaimError(ErrorKind.CONFIG, f"claim {ref.key}: {error}") from None


def conflict(entry: Entry, others: Iterable[Entry]) -> ClaimError | None:
    """Why `entry` cannot have its devices next to what other claims of this boot hold, or None.

    A device, or a GPU and a partition of it, belongs to one claim. Admin access never conflicts. Shares of one device
    (distinct share ids) go together unless they ask for different sharing settings, or through MPS, where one daemon
    serves the devices of a claim, for different devices.
    """
    wanted = [d for d in entry.devices if not d.admin]
    for other in others:
        if other.uid == entry.uid or other.boot_id != entry.boot_id:
            continue
        for held in (d for d in other.devices if not d.admin):
            for mine in wanted:
                if why := _clash(mine, held):
                    return ClaimError(
                        ErrorKind.HELD,
                        f"claim {entry.key}: device {mine.device} {why} claim {other.key} (UID {other.uid}) on this "
                        "node until the kubelet releases it",
                    )
                if mine.share_id and held.device == mine.device and _through_mps(entry) != _through_mps(other):
                    return ClaimError(
                        ErrorKind.HELD,
                        f"claim {entry.key}: device {mine.device} is shared through MPS by claim {other.key}, whose "
                        "daemon does not serve the same devices; ask for the shares of each GPU in claims of their own",
                    )
    return None


def _through_mps(entry: Entry) -> set[str]:
    return {d.device for d in entry.devices if not d.admin and isinstance(d.sharing, Mps)}


def _clash(mine: HeldDevice, held: HeldDevice) -> str:
    if mine.device == held.device:
        if not mine.share_id or not held.share_id or mine.share_id == held.share_id:
            return "is held by"
        return "" if mine.sharing == held.sharing else "is shared with other settings by"
    if mine.device == held.nodes.parent:
        return f"has the partition {held.device}, which is held by"
    if held.device == mine.nodes.parent:
        return f"is a partition of {held.device}, which is held by"
    return ""


def same_devices(entry: Entry, other: Entry) -> bool:
    """Whether both describe the same allocation (an unchanged claim being prepared again)."""

    def key(e: Entry) -> list[tuple[object, ...]]:
        return [(d.device, d.requests, d.admin, d.share_id, d.sharing) for d in e.devices]

    return key(entry) == key(other)
