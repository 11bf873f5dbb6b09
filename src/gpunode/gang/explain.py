"""Why one gang is where it is, from the same decision that the controller would take."""

from datetime import datetime

from gpunode.gang.board import location
from gpunode.gang.decide import decide
from gpunode.model.gang import Config, Evict, Place, Reason, ReasonCode, Report, Snapshot


def explain(snapshot: Snapshot, gang_key: str, now: datetime, config: Config) -> Reason:
    """The current reason of a gang (`podgroup/<namespace>/<name>` or `pod/<namespace>/<name>`)."""
    actions = decide(snapshot, now, config)
    for action in actions:
        if isinstance(action, Report | Evict) and action.gang == gang_key:
            return action.reason
    for action in actions:
        if isinstance(action, Place) and action.gang == gang_key:
            nodes = sorted({a.node for a in action.assignments})
            count = len(action.assignments)
            text = f"fits now: {'1 pod goes' if count == 1 else f'{count} pods go'} to {', '.join(nodes[:4])}"
            text += f" and {len(nodes) - 4} more nodes" if len(nodes) > 4 else ""
            return Reason(ReasonCode.PLACED, text, {"pods": count, "nodes": len(nodes)})
    return _settled(snapshot, gang_key)


def _settled(snapshot: Snapshot, gang_key: str) -> Reason:
    kind, _, key = gang_key.partition("/")
    pods = [
        p for p in snapshot.pods.values()
        if not p.finished and not p.terminating
        and (p.metadata.key == key if kind == "pod" else _in_group(p.metadata.namespace, p.spec.scheduling_group, key))
    ]  # fmt: skip
    if not pods:
        return Reason(ReasonCode.WAITING_FOR_MEMBERS, "has no live pods", {"pods": 0})
    nodes = sorted({n for p in pods if (n := location(p, snapshot))})
    bound = sum(1 for p in pods if p.spec.node_name)
    if not nodes:
        text = f"its {len(pods)} pods use no managed devices and carry no placement gate: kube-scheduler places them"
        return Reason(ReasonCode.PLACED, text, {"pods": len(pods)})
    subject = "its 1 pod has its place" if len(pods) == 1 else f"all {len(pods)} pods have their place"
    text = f"{subject}, {bound} bound, on {', '.join(nodes[:4])}"
    text += f" and {len(nodes) - 4} more nodes" if len(nodes) > 4 else ""
    return Reason(ReasonCode.PLACED, text, {"pods": len(pods), "bound": bound, "nodes": len(nodes)})


def _in_group(namespace: str, group: object, key: str) -> bool:
    return group is not None and f"{namespace}/{getattr(group, 'pod_group_name', None)}" == key
