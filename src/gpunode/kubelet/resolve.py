"""From a live claim to what the node has to do: pure functions, no I/O."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpunode.kubelet.checkpoint import Entry, HeldDevice, State
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
            f"claim {ref.key} was re-created: the API server has UID {claim.metadata.uid}, "
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
        key = (held.device, held.share_id)
        if before := merged.get(key):
            held = HeldDevice(
                device=held.device, pool=held.pool, nodes=held.nodes, share_id=held.share_id, consumed=held.consumed,
                requests=tuple(dict.fromkeys(before.requests + held.requests)), admin=before.admin and held.admin,
            )  # fmt: skip
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


def conflict(entry: Entry, others: Iterable[Entry]) -> ClaimError | None:
    """A device of `entry` that another entry of this boot holds exclusively, or that `entry` wants exclusively.

    Admin access never conflicts; shares conflict only with a holder that has no share.
    """
    wanted = {d.device: d for d in entry.devices if not d.admin}
    for other in others:
        if other.uid == entry.uid or other.boot_id != entry.boot_id:
            continue
        for held in other.devices:
            mine = wanted.get(held.device)
            if mine is None or held.admin or (mine.share_id and held.share_id and mine.share_id != held.share_id):
                continue
            return ClaimError(
                ErrorKind.HELD,
                f"claim {entry.key}: device {held.device} is held by claim {other.key} (UID {other.uid}) on this node "
                "until the kubelet releases it",
            )
    return None


def same_devices(entry: Entry, other: Entry) -> bool:
    """Whether both describe the same allocation (an unchanged claim being prepared again)."""

    def key(e: Entry) -> list[tuple[str, tuple[str, ...], bool, str | None]]:
        return [(d.device, d.requests, d.admin, d.share_id) for d in e.devices]

    return key(entry) == key(other)
