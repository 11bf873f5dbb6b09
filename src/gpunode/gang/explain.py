"""Why one gang is where it is, from the same decision that the controller would take."""

from datetime import datetime

from gpunode.gang.decide import decide
from gpunode.gang.settled import placed_reason
from gpunode.model.core import Pod
from gpunode.model.gang import Config, Evict, Place, Reason, ReasonCode, Release, Report, Snapshot
from gpunode.model.wording import some


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
            text = f"fits now: {'1 pod goes' if count == 1 else f'{count} pods go'} to {some(nodes, more='more nodes')}"
            return Reason(ReasonCode.PLACED, text, {"pods": count, "nodes": len(nodes)})
        if isinstance(action, Release) and action.gang == gang_key:
            text = (
                f"{len(action.claims)} allocations of an interrupted placement are taken back, then it is placed anew"
            )
            return Reason(ReasonCode.WAITING_FOR_RELEASE, text, {"claims": len(action.claims)})
    return _settled(snapshot, gang_key)


def _settled(snapshot: Snapshot, gang_key: str) -> Reason:
    kind, _, key = gang_key.partition("/")
    pods = [p for p in snapshot.pods.values() if (p.metadata.key if kind == "pod" else _group_of(p)) == key]
    live = [pod for pod in pods if not pod.finished and not pod.terminating]
    if pods and not live and all(pod.finished for pod in pods):
        succeeded = sum(pod.status.phase == "Succeeded" for pod in pods)
        subject = "its 1 pod has" if len(pods) == 1 else f"all {len(pods)} pods have"
        text = f"{subject} run to the end, {succeeded} with success"
        return Reason(ReasonCode.PLACED, text, {"pods": len(pods), "succeeded": succeeded})
    return placed_reason(live, snapshot)


def _group_of(pod: Pod) -> str:
    group = pod.spec.scheduling_group
    return f"{pod.metadata.namespace}/{group.pod_group_name}" if group is not None else ""
