"""The bodies of the controller's writes."""

import msgspec
import pytest

from gpunode.controller import patches
from gpunode.model.core import Affinity, NodeAffinity, Pod, PodSpec, SchedulingGate
from gpunode.model.meta import Condition, ObjectMeta
from gpunode.model.names import CLAIM_FINALIZER, PLACED_CONDITION, PLACEMENT_GATE, RESTART_ANNOTATION
from gpunode.model.resource import (
    AllocatedDevices,
    Allocation,
    AllocationResult,
    NodeSelector,
    NodeSelectorRequirement,
    NodeSelectorTerm,
    ResourceClaim,
)

PIN = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def apply(document: dict, patch: list[dict]) -> dict:
    """A small RFC 6902 interpreter: enough to see what the API server would make of a patch."""
    document = msgspec.json.decode(msgspec.json.encode(document))
    for step in patch:
        *way, last = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]]
        here = document
        for part in way:
            here = here[int(part)] if isinstance(here, list) else here[part]
        if step["op"] == "test":
            found = here[int(last)] if isinstance(here, list) else here[last]
            assert found == step["value"], step
        elif step["op"] == "remove":
            del here[int(last) if isinstance(here, list) else last]
        elif isinstance(here, list):
            here.insert(len(here) if last == "-" else int(last), step["value"])
        else:
            here[last] = step["value"]
    return document


def pod(**spec: object) -> tuple[dict, Pod]:
    document = {
        "metadata": {"name": "p", "resourceVersion": "7"},
        "spec": {"schedulingGates": [{"name": "other"}, {"name": PLACEMENT_GATE}], **spec},
    }
    return document, msgspec.convert(document, Pod)


def test_release_removes_only_our_gate_and_keeps_foreign_ones() -> None:
    document, value = pod()
    result = apply(document, patches.release(value, "d1", "n1"))
    assert result["spec"]["schedulingGates"] == [{"name": "other"}]
    assert result["metadata"]["annotations"] == {"gpunode.dev/decision": "d1"}


def test_release_without_a_node_does_not_pin() -> None:
    document, value = pod()
    assert "affinity" not in apply(document, patches.release(value, "d1", None))["spec"]


def test_release_keeps_other_annotations() -> None:
    document, value = pod()
    document["metadata"]["annotations"] = {"a/b": "c"}
    value = msgspec.convert(document, Pod)
    assert apply(document, patches.release(value, "d", "n1"))["metadata"]["annotations"] == {
        "a/b": "c",
        "gpunode.dev/decision": "d",
    }


@pytest.mark.parametrize(
    "affinity",
    [
        None,
        {"podAffinity": {}},
        {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    ],
    ids=["none", "pod-affinity-only", "preferred-only"],
)
def test_pin_without_required_terms_makes_one(affinity: dict | None) -> None:
    document, value = pod(**({"affinity": affinity} if affinity is not None else {}))
    result = apply(document, patches.release(value, "d", "n1"))
    node = result["spec"]["affinity"]["nodeAffinity"]
    assert node[REQUIRED] == {"nodeSelectorTerms": [{"matchFields": [PIN]}]}
    for kind, kept in (affinity or {}).items():
        assert kind in result["spec"]["affinity"]
        if kind == "nodeAffinity":
            assert set(kept) <= set(node)


def test_pin_goes_into_every_alternative_term() -> None:
    expression = {"key": "zone", "operator": "In", "values": ["a"]}
    field = {"key": "metadata.name", "operator": "NotIn", "values": ["bad"]}
    terms = [{"matchExpressions": [expression]}, {"matchFields": [field]}]
    document, value = pod(affinity={"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}})
    result = apply(document, patches.release(value, "d", "n1"))
    assert result["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"] == [
        {"matchExpressions": [expression], "matchFields": [PIN]},
        {"matchFields": [field, PIN]},
    ]


def test_release_of_a_changed_pod_fails_its_own_test() -> None:
    document, value = pod()
    document["metadata"]["resourceVersion"] = "8"
    with pytest.raises(AssertionError):
        apply(document, patches.release(value, "d", "n1"))


def test_allocation_is_written_in_the_shape_that_scopes_the_agents_rights() -> None:
    term = NodeSelectorTerm(match_fields=(NodeSelectorRequirement(key="metadata.name", operator="In", values=("n1",)),))
    allocation = Allocation(
        devices=AllocatedDevices(results=(AllocationResult(request="r", driver="d", pool="n1", device="g"),)),
        node_selector=NodeSelector(node_selector_terms=(term,)),
        allocation_timestamp="2026-01-01T00:00:00Z",
    )
    user = Pod(metadata=ObjectMeta(name="p", uid="u"))
    body = msgspec.json.decode(msgspec.json.encode(patches.allocate("5", allocation, [user])))
    assert body == {
        "metadata": {"resourceVersion": "5"},
        "status": {
            "allocation": {
                "devices": {"results": [{"request": "r", "driver": "d", "pool": "n1", "device": "g"}]},
                "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [PIN]}]},
                "allocationTimestamp": "2026-01-01T00:00:00Z",
            },
            "reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}],
        },
    }


def test_finalizer_is_added_once_and_keeps_others() -> None:
    bare = ResourceClaim(metadata=ObjectMeta(finalizers=("x",), resource_version="3"))
    assert patches.finalizer(bare) == {"metadata": {"resourceVersion": "3", "finalizers": ["x", CLAIM_FINALIZER]}}
    assert patches.finalizer(ResourceClaim(metadata=ObjectMeta(finalizers=(CLAIM_FINALIZER,)))) is None


def test_suspend_and_resume_are_inverse() -> None:
    stop, go = patches.suspend("1", {"decision": "d"}), patches.resume("2")
    assert stop["spec"] == {"suspend": True}
    assert go["spec"] == {"suspend": False}
    assert stop["metadata"]["annotations"][RESTART_ANNOTATION] == '{"decision":"d"}'
    assert go["metadata"]["annotations"][RESTART_ANNOTATION] is None


def test_condition_changes_its_time_only_with_its_status() -> None:
    fresh = Condition(type="", status="False", reason="R", message="m")
    first = patches.condition((), fresh, "t1")
    assert first is not None
    assert first["lastTransitionTime"] == "t1"
    known = (Condition(type=PLACED_CONDITION, status="False", reason="R", message="m", last_transition_time="t1"),)
    assert patches.condition(known, fresh, "t2") is None
    other = patches.condition(known, Condition(type="", status="False", reason="R", message="n"), "t2")
    assert other is not None
    assert other["lastTransitionTime"] == "t1"
    turned = patches.condition(known, Condition(type="", status="True", reason="P", message="n"), "t3")
    assert turned is not None
    assert turned["lastTransitionTime"] == "t3"


def test_pod_decodes_without_loss_of_affinity_structure() -> None:
    _, value = pod(affinity={"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{}]}}})
    assert value.spec.affinity == Affinity(
        node_affinity=NodeAffinity(required=NodeSelector(node_selector_terms=(NodeSelectorTerm(),)))
    )
    assert isinstance(value.spec, PodSpec)
    assert value.spec.scheduling_gates[1] == SchedulingGate(name=PLACEMENT_GATE)
