"""Slices become pools by the rules of the in-tree allocator."""

import pytest
from tests.allocate.pooling import build_pools

from gpunode.allocate.pools import DeviceId, devices_on
from gpunode.model.core import Node
from gpunode.model.meta import ObjectMeta
from gpunode.model.names import MANAGED_TAINT
from gpunode.model.resource import (
    Counter,
    CounterConsumption,
    CounterSet,
    Device,
    DeviceTaint,
    DeviceTaintRule,
    DeviceTaintRuleSpec,
    DeviceTaintSelector,
    NodeSelector,
    NodeSelectorRequirement,
    NodeSelectorTerm,
    Pool,
    ResourceSlice,
    ResourceSliceSpec,
)

DRIVERS = frozenset({"d"})


def slice_(name: str, *devices: Device, generation: int = 1, count: int = 1, pool: str = "n1", **spec: object):  # type: ignore[no-untyped-def]
    spec.setdefault("node_name", "n1")
    return ResourceSlice(
        metadata=ObjectMeta(name=name),
        spec=ResourceSliceSpec(
            driver="d",
            pool=Pool(name=pool, generation=generation, resource_slice_count=count),
            devices=devices,
            **spec,  # type: ignore[arg-type]
        ),
    )


def build(*slices: ResourceSlice, rules: tuple[DeviceTaintRule, ...] = ()):  # type: ignore[no-untyped-def]
    return build_pools({s.metadata.name: s for s in slices}, {str(i): r for i, r in enumerate(rules)}, DRIVERS)


def gpu(name: str, **fields: object) -> Device:
    return Device(name=name, **fields)  # type: ignore[arg-type]


def names(pool) -> list[str]:  # type: ignore[no-untyped-def]
    return [d.id.device for d in pool.devices]


def test_only_the_highest_generation_counts_and_slices_go_by_name() -> None:
    pool = build(
        slice_("b", gpu("g2"), generation=2, count=2),
        slice_("a", gpu("g1"), generation=2, count=2),
        slice_("0", gpu("old"), generation=1),
    )["d", "n1"]
    assert (names(pool), pool.generation, pool.complete, pool.local) == (["g1", "g2"], 2, True, "n1")


def test_a_newer_generation_with_missing_slices_is_incomplete() -> None:
    pool = build(slice_("a", gpu("g1")), slice_("b", gpu("g1"), generation=2, count=2))["d", "n1"]
    assert not pool.complete


@pytest.mark.parametrize(
    ("slices", "problem"),
    [
        ((slice_("a", gpu("g1"), count=2), slice_("b", gpu("g1"), count=2)), "duplicate device g1"),
        (
            (slice_("a", count=2, shared_counters=(CounterSet(name="s"),)),
             slice_("b", count=2, shared_counters=(CounterSet(name="s"),))),
            "duplicate counter set s",
        ),
        (
            (slice_("a", gpu("g1", consumes_counters=(
                CounterConsumption(counter_set="s", counters={"m": Counter(value="1")}),))),),
            "unknown counter s/m",
        ),
    ],
)  # fmt: skip
def test_invalid_pool(slices: tuple[ResourceSlice, ...], problem: str) -> None:
    pool = build(*slices)["d", "n1"]
    assert problem in pool.invalid
    here = devices_on(Node(metadata=ObjectMeta(name="n1")), [pool])
    assert here.devices == () and problem in here.invalid[0]


def test_other_drivers_are_left_out() -> None:
    assert build_pools({"a": slice_("a", gpu("g"))}, {}, frozenset({"other"})) == {}


def rule(**selector: str | None) -> DeviceTaintRule:
    return DeviceTaintRule(
        spec=DeviceTaintRuleSpec(
            taint=DeviceTaint(key=MANAGED_TAINT, effect="NoSchedule"),
            device_selector=DeviceTaintSelector(**selector) if "absent" not in selector else None,
        )
    )


@pytest.mark.parametrize(
    ("selector", "managed"),
    [
        ({"driver": "d"}, {"g1", "g2"}),
        ({"driver": "d", "pool": "n1", "device": "g2"}, {"g2"}),
        ({"pool": "n2"}, set()),
        ({"driver": "other"}, set()),
        ({}, {"g1", "g2"}),
        ({"absent": None}, set()),  # no selector matches nothing
    ],
)
def test_taint_rules_select_devices(selector: dict[str, str | None], managed: set[str]) -> None:
    pool = build(slice_("a", gpu("g1"), gpu("g2")), rules=(rule(**selector),))["d", "n1"]
    assert {d.id.device for d in pool.devices if d.managed} == managed


def test_slice_taints_count_too() -> None:
    taint = DeviceTaint(key=MANAGED_TAINT, effect="NoSchedule")
    informational = DeviceTaint(key=MANAGED_TAINT, effect="None")
    pool = build(slice_("a", gpu("g1", taints=(taint,)), gpu("g2", taints=(informational,))))["d", "n1"]
    assert [d.managed for d in pool.devices] == [True, False]


def test_devices_reach_nodes_by_name_selector_or_each_on_its_own() -> None:
    zone = NodeSelector(
        node_selector_terms=(
            NodeSelectorTerm(match_expressions=(NodeSelectorRequirement(key="zone", operator="In", values=("z",)),)),
        )
    )
    pools = build(
        slice_("a", gpu("local")),
        slice_("b", gpu("zonal"), pool="z", node_name=None, node_selector=zone),
        slice_("c", gpu("everywhere"), pool="all", node_name=None, all_nodes=True),
        slice_("d", gpu("n1-only", node_name="n1"), gpu("n2-only", node_name="n2"), pool="each", node_name=None,
               per_device_node_selection=True),
    )  # fmt: skip
    one = devices_on(Node(metadata=ObjectMeta(name="n1", labels={"zone": "z"})), pools.values())
    two = devices_on(Node(metadata=ObjectMeta(name="n2")), pools.values())
    assert {d.id.device for d in one.devices} == {"local", "zonal", "everywhere", "n1-only"}
    assert {d.id.device for d in two.devices} == {"everywhere", "n2-only"}
    assert one.devices[0].id == DeviceId("d", "all", "everywhere")  # pools in order of name


def test_an_incomplete_pool_gives_nothing_and_is_named() -> None:
    pools = build(slice_("a", gpu("g"), count=3))
    here = devices_on(Node(metadata=ObjectMeta(name="n1")), pools.values())
    assert here.devices == () and here.incomplete == ("d/n1",)


def test_devices_with_binding_conditions_come_last() -> None:
    pools = build(slice_("a", gpu("slow", binding_conditions=("ready",)), gpu("fast")))
    here = devices_on(Node(metadata=ObjectMeta(name="n1")), pools.values())
    assert [d.id.device for d in here.devices] == ["fast", "slow"]
