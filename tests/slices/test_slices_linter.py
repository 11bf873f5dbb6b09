"""Each rule of the API server, by the smallest slice that breaks it."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpunode.model.meta import ObjectMeta
from gpunode.model.resource import (
    Attribute,
    Capacity,
    Counter,
    CounterConsumption,
    CounterSet,
    Device,
    DeviceTaint,
    Pool,
    RequestPolicy,
    ResourceSlice,
    ResourceSliceSpec,
    ValidRange,
)
from gpunode.slices.linter import drop_bad, lint

TAINT = DeviceTaint(key="gpunode.dev/xid", effect="NoSchedule")


def made(*devices: Device, name: str = "s-0", **spec: Any) -> ResourceSlice:
    fields: dict[str, Any] = {"node_name": "n", "pool": Pool(name="n", generation=1, resource_slice_count=1)}
    return ResourceSlice(
        metadata=ObjectMeta(name=name),
        spec=ResourceSliceSpec(driver="gpu.gpunode.dev", devices=devices, **(fields | spec)),
    )


def device(name: str = "gpu-0", **fields: Any) -> Device:
    return Device(name=name, **fields)


def counters(count: int) -> dict[str, Counter]:
    return {f"c{i}": Counter(value="1") for i in range(count)}


def ranged(low: str, high: str, step: str) -> RequestPolicy:
    return RequestPolicy(default=low, valid_range=ValidRange(min=low, max=high, step=step))


BAD_DEVICES = {
    "name": (device("GPU_0"), "not a DNS label"),
    "no value": (device(attributes={"a": Attribute()}), "has 0 values"),
    "two values": (device(attributes={"a": Attribute(int_=1, string="x")}), "has 2 values"),
    "long text": (device(attributes={"a": Attribute(string="x" * 65)}), "65 bytes, the limit is 64"),
    "version": (device(attributes={"a": Attribute(version="580.95.05")}), "not a semantic version"),
    "int": (device(attributes={"a": Attribute(int_=2**63)}), "64 bits"),
    "attribute name": (device(attributes={"a-b": Attribute(int_=1)}), "not [domain/]identifier"),
    "attribute domain": (device(attributes={"A_B/c": Attribute(int_=1)}), "not [domain/]identifier"),
    "long name": (device(attributes={"a" * 33: Attribute(int_=1)}), "not [domain/]identifier"),
    "too many": (device(attributes={f"a{i}": Attribute(int_=1) for i in range(33)}), "33 attributes and capacities"),
    "capacity": (device(capacity={"memory": Capacity(value="80 GB")}), "not a Kubernetes quantity"),
    "policy": (
        device(capacity={"memory": Capacity(value="1", request_policy=RequestPolicy(default="1"))}),
        "does not allow multiple allocations",
    ),
    "condition name": (
        device(binding_conditions=("-",), binding_failure_conditions=("F",)),
        "binding condition '-' is not a label name",
    ),
    "condition twice": (device(binding_conditions=("A",), binding_failure_conditions=("A",)), "appears twice"),
    "no room for a step": (
        device(
            allow_multiple_allocations=True,
            capacity={"m": Capacity(value="1Gi", request_policy=ranged("1Gi", "1Gi", "1Gi"))},
        ),
        "one step must be within 1Gi",
    ),
    "list and range": (
        device(
            allow_multiple_allocations=True,
            capacity={
                "m": Capacity(
                    value="4Gi",
                    request_policy=RequestPolicy(
                        default="1Gi", valid_values=("1Gi",), valid_range=ValidRange(min="1Gi", max="2Gi")
                    ),
                )
            },
        ),
        "both a list and a range",
    ),
    "two bytes a letter": (device(attributes={"a": Attribute(string="ä" * 33)}), "66 bytes, the limit is 64"),
    "range": (
        device(
            allow_multiple_allocations=True,
            capacity={"m": Capacity(value="4Gi", request_policy=ranged("1Gi", "8Gi", "1Gi"))},
        ),
        "min <= default <= max <= 4Gi",
    ),
    "step": (
        device(
            allow_multiple_allocations=True,
            capacity={"m": Capacity(value="4Gi", request_policy=ranged("1Gi", "3500Mi", "1Gi"))},
        ),
        "whole steps",
    ),
    "list": (
        device(
            allow_multiple_allocations=True,
            capacity={
                "m": Capacity(value="4Gi", request_policy=RequestPolicy(default="1Gi", valid_values=("2Gi", "1Gi")))
            },
        ),
        "listed values must ascend",
    ),
    "taints": (device(taints=(TAINT,) * 17), "17 taints"),
    "taint key": (device(taints=(replace(TAINT, key="a b"),)), "not a label name"),
    "taint value": (device(taints=(replace(TAINT, value="-x"),)), "not a label value"),
    "effect": (device(taints=(replace(TAINT, effect="Never"),)), "is none of None, NoSchedule, NoExecute"),
    "three sets": (
        device(consumes_counters=tuple(CounterConsumption(counter_set=n, counters=counters(1)) for n in "abc")),
        "consumes from 3 counter sets",
    ),
    "empty use": (device(consumes_counters=(CounterConsumption(counter_set="a"),)), "consumes 0 counters"),
    "conditions": (device(binding_conditions=("A",)), "together or not at all"),
}

BAD_SLICES = {
    "slice name": (made(name="S 0"), "not a DNS subdomain"),
    "pool name": (made(pool=Pool(name="a//b", generation=1, resource_slice_count=1)), "pool name"),
    "generation": (made(pool=Pool(name="n", generation=-1, resource_slice_count=1)), "negative"),
    "count": (made(pool=Pool(name="n", generation=1, resource_slice_count=0)), "not positive"),
    "node name": (made(node_name="Node_1"), "node name"),
    "set twice": (
        made(shared_counters=(CounterSet(name="a", counters=counters(1)),) * 2),
        "counter set a appears twice",
    ),
    "no node": (made(node_name=None), "exactly one of"),
    "two ways": (made(all_nodes=True), "exactly one of"),
    "129 devices": (made(*(device(f"g{i}") for i in range(129))), "129 devices, the limit is 128"),
    "65 with a taint": (
        made(device("t", taints=(TAINT,)), *(device(f"g{i}") for i in range(64))),
        "65 devices, the limit with taints or counters is 64",
    ),
    "mixed": (made(device(), shared_counters=(CounterSet(name="a", counters=counters(1)),)), "slices of their own"),
    "9 sets": (
        made(shared_counters=tuple(CounterSet(name=f"s{i}", counters=counters(1)) for i in range(9))),
        "9 counter sets",
    ),
    "empty set": (made(shared_counters=(CounterSet(name="a"),)), "has 0 counters"),
    "33 counters": (made(shared_counters=(CounterSet(name="a", counters=counters(33)),)), "has 33 counters"),
}


@pytest.mark.parametrize(("bad", "expected"), BAD_DEVICES.values(), ids=BAD_DEVICES)
def test_a_bad_device_is_named_and_dropped_alone(bad: Device, expected: str) -> None:
    slices = [made(device("good"), bad)]
    assert [p.device for p in lint(slices) if expected in p.text] == [bad.name]
    kept, problems = drop_bad(slices)
    assert [d.name for d in kept[0].spec.devices] == ["good"]
    assert any(expected in str(p) for p in problems)
    assert lint(kept) == ()


@pytest.mark.parametrize(("bad", "expected"), BAD_SLICES.values(), ids=BAD_SLICES)
def test_a_bad_slice_is_named(bad: ResourceSlice, expected: str) -> None:
    problems = [p for p in lint([bad]) if expected in p.text]
    assert [(p.slice, p.device) for p in problems] == [(bad.metadata.name, "")]


def test_names_are_unique_in_the_pool() -> None:
    slices = [made(device("a"), name="s-0"), made(device("a"), name="s-1")]
    assert [(p.slice, p.device) for p in lint(slices)] == [("s-1", "a")]
    kept, _ = drop_bad(slices)
    assert [len(s.spec.devices) for s in kept] == [1, 0]


def test_consumed_counters_must_exist_in_the_pool() -> None:
    use = device(consumes_counters=(CounterConsumption(counter_set="set", counters=counters(2)),))
    have = made(name="s-c", shared_counters=(CounterSet(name="set", counters=counters(1)),))
    assert "consumes ['c1'] of counter set set" in lint([have, made(use)])[0].text
    whole = made(name="s-c", shared_counters=(CounterSet(name="set", counters=counters(2)),))
    assert lint([whole, made(use)]) == ()


def test_a_full_valid_device_has_no_problem() -> None:
    good = device(
        attributes={"a": Attribute(bool_=False), "example.com/b": Attribute(version="1.2.3-rc.1+x")},
        capacity={
            "memory": Capacity(value="80Gi", request_policy=RequestPolicy(default="1Gi", valid_values=("1Gi", "2Gi")))
        },
        taints=(TAINT, replace(TAINT, key="plain", value="79")),
        allow_multiple_allocations=True,
    )
    assert lint([made(good)]) == ()
