"""Who holds which device, in the words that sentences use."""

from gpunode.allocate.pools import DeviceId, result_id
from gpunode.model.core import Pod
from gpunode.model.gang import Snapshot
from gpunode.model.resource import ResourceClaim


def holder_of(pod: Pod) -> str:
    """How a pod is called in a sentence: its group if it has one, else itself."""
    group = pod.spec.scheduling_group
    name = group.pod_group_name if group is not None and group.pod_group_name else pod.metadata.name
    return f"{pod.metadata.namespace}/{name}"


def holders(snapshot: Snapshot) -> dict[DeviceId, tuple[str, bool]]:
    """Who holds each allocated device, and whether the holder is terminating."""
    table: dict[DeviceId, tuple[str, bool]] = {}
    for claim in snapshot.claims.values():
        if claim.status.allocation is None:
            continue
        names = [r.name for r in claim.status.reserved_for if r.resource == "pods"]
        names += [o.name for o in claim.metadata.owner_references if o.kind == "Pod"]
        pods = [p for n in names if (p := snapshot.pods.get(f"{claim.metadata.namespace}/{n}")) is not None]
        label = holder_of(pods[0]) if pods else f"claim {claim.metadata.key}"
        for result in claim.status.allocation.devices.results:
            if not result.admin_access:
                table[result_id(result)] = (label, bool(pods) and all(p.terminating for p in pods))
    return table


def departing(snapshot: Snapshot) -> tuple[tuple[Pod, ...], tuple[ResourceClaim, ...]]:
    """Pods that are terminating, and the allocated claims that only they still use."""
    pods = {p.metadata.uid: p for p in snapshot.pods.values() if p.terminating}
    claims = [
        claim
        for claim in snapshot.claims.values()
        if claim.status.allocation is not None
        and claim.status.reserved_for
        and all(consumer.uid in pods for consumer in claim.status.reserved_for)
    ]
    return tuple(pods.values()), tuple(claims)
