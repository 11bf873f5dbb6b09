"""Bodies of the controller's writes, as pure functions from what was read to the patch that is sent.

Objects are only partly decoded here, so nothing is ever written whole: every write is a patch that carries the
resourceVersion it was decided on.
"""

from typing import Any

import msgspec

from gpunode.model.core import Pod
from gpunode.model.meta import Condition
from gpunode.model.names import (
    CLAIM_FINALIZER,
    DECISION_ANNOTATION,
    MANAGED_TAINT,
    PLACED_CONDITION,
    PLACEMENT_GATE,
    RESTART_ANNOTATION,
)
from gpunode.model.resource import Allocation, ResourceClaim

Json = dict[str, Any]
_MESSAGE_LIMIT = 32768


def finalizer(claim: ResourceClaim) -> Json | None:
    """Merge patch that adds the finalizer of allocated claims, or None where it is there already.

    A /status write cannot change metadata, so this is a write of its own (k8s.io/kubernetes, resourceclaim strategy).
    """
    if CLAIM_FINALIZER in claim.metadata.finalizers:
        return None
    return {
        "metadata": {
            "resourceVersion": claim.metadata.resource_version,
            "finalizers": [*claim.metadata.finalizers, CLAIM_FINALIZER],
        }
    }


def allocate(version: str, allocation: Allocation, consumers: list[Pod]) -> Json:
    """Merge patch for a claim's status: the allocation, reserved for the pods that will use it.

    Reserving in the same write spares kube-scheduler its own (which it could not make: an allocation is immutable).
    """
    return {
        "metadata": {"resourceVersion": version},
        "status": {
            "allocation": msgspec.to_builtins(allocation),
            "reservedFor": [
                {"resource": "pods", "name": pod.metadata.name, "uid": pod.metadata.uid} for pod in consumers
            ],
        },
    }


def deallocate(version: str) -> Json:
    """Merge patch that takes an allocation back, with its reservations, in one write."""
    return {"metadata": {"resourceVersion": version}, "status": {"allocation": None, "reservedFor": None}}


def release(pod: Pod, decision: str, node: str | None) -> list[Json]:
    """JSON Patch that removes our gate, pins the pod to `node` (if given) and records the decision.

    The pin is required node affinity on metadata.name, added to every term that is there already (terms are
    alternatives), because only additions are allowed while a pod is gated.
    """
    patch: list[Json] = [{"op": "test", "path": "/metadata/resourceVersion", "value": pod.metadata.resource_version}]
    index = next(i for i, gate in enumerate(pod.spec.scheduling_gates) if gate.name == PLACEMENT_GATE)
    patch.append({"op": "test", "path": f"/spec/schedulingGates/{index}/name", "value": PLACEMENT_GATE})
    patch.append({"op": "remove", "path": f"/spec/schedulingGates/{index}"})
    if node is not None:
        patch += _pin(pod, node)
    if pod.metadata.annotations:
        path = "/metadata/annotations/" + DECISION_ANNOTATION.replace("/", "~1")
        patch.append({"op": "add", "path": path, "value": decision})
    else:
        patch.append({"op": "add", "path": "/metadata/annotations", "value": {DECISION_ANNOTATION: decision}})
    return patch


def _pin(pod: Pod, node: str) -> list[Json]:
    requirement = {"key": "metadata.name", "operator": "In", "values": [node]}
    required = {"nodeSelectorTerms": [{"matchFields": [requirement]}]}
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    affinity = pod.spec.affinity
    if affinity is None:
        return [{"op": "add", "path": "/spec/affinity", "value": {"nodeAffinity": {key: required}}}]
    if affinity.node_affinity is None:
        return [{"op": "add", "path": "/spec/affinity/nodeAffinity", "value": {key: required}}]
    if affinity.node_affinity.required is None:
        return [{"op": "add", "path": f"/spec/affinity/nodeAffinity/{key}", "value": required}]
    patch: list[Json] = []
    for index, term in enumerate(affinity.node_affinity.required.node_selector_terms):
        path = f"/spec/affinity/nodeAffinity/{key}/nodeSelectorTerms/{index}/matchFields"
        if term.match_fields:
            patch.append({"op": "add", "path": path + "/-", "value": requirement})
        else:
            patch.append({"op": "add", "path": path, "value": [requirement]})
    return patch


def suspend(version: str, intent: Json) -> Json:
    """Merge patch that suspends a Job and records why, so that a restart after a crash can finish the job."""
    return {
        "metadata": {
            "resourceVersion": version,
            "annotations": {RESTART_ANNOTATION: msgspec.json.encode(intent).decode()},
        },
        "spec": {"suspend": True},
    }


def resume(version: str) -> Json:
    """Merge patch that ends a restart: the Job runs again and the record of the intent goes."""
    return {
        "metadata": {"resourceVersion": version, "annotations": {RESTART_ANNOTATION: None}},
        "spec": {"suspend": False},
    }


def condition(current: tuple[Condition, ...], fresh: Condition, now: str) -> Json | None:
    """The Placed condition for a server-side apply, or None where it says the same already."""
    old = next((c for c in current if c.type == PLACED_CONDITION), None)
    if old is not None and (old.status, old.reason, old.message) == (fresh.status, fresh.reason, fresh.message):
        return None
    changed = now if old is None or old.status != fresh.status else old.last_transition_time
    return {
        "type": PLACED_CONDITION,
        "status": fresh.status,
        "reason": fresh.reason,
        "message": fresh.message[:_MESSAGE_LIMIT],
        "lastTransitionTime": changed or now,
    }


def taint_rule(api_version: str, driver: str) -> Json:
    """The DeviceTaintRule that keeps kube-scheduler off every device of a driver."""
    return {
        "apiVersion": api_version,
        "kind": "DeviceTaintRule",
        "metadata": {"name": f"gpunode-managed-{driver}"},
        "spec": {
            "deviceSelector": {"driver": driver},
            "taint": {"key": MANAGED_TAINT, "value": "true", "effect": "NoSchedule"},
        },
    }
