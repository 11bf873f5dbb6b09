"""Devices for claims on one node: what is chosen, what is refused, and what is written."""

import uuid
from datetime import UTC, datetime
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.allocate.pooling import build_pools

from gpunode.allocate.allocator import allocate
from gpunode.allocate.ask import Failure, FailureKind
from gpunode.allocate.cel import Selectors
from gpunode.allocate.pools import NodeDevices, devices_on
from gpunode.allocate.usage import Usage
from gpunode.model.core import Node
from gpunode.model.meta import ObjectMeta
from gpunode.model.names import MANAGED_TAINT
from gpunode.model.resource import (
    Allocation,
    Attribute,
    Capacity,
    CapacityRequests,
    CelSelector,
    ClaimConfig,
    Counter,
    CounterConsumption,
    CounterSet,
    Device,
    DeviceClaim,
    DeviceClass,
    DeviceClassSpec,
    DeviceConstraint,
    DeviceRequest,
    DeviceSelector,
    DeviceTaint,
    DeviceToleration,
    ExactRequest,
    OpaqueConfig,
    Pool,
    RequestPolicy,
    ResourceClaim,
    ResourceClaimSpec,
    ResourceSlice,
    ResourceSliceSpec,
    SubRequest,
    ValidRange,
)

D = "gpu.gpunode.dev"
NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
MANAGED = DeviceTaint(key=MANAGED_TAINT, value="true", effect="NoSchedule")
CLASSES = {
    "gpu": DeviceClass(
        metadata=ObjectMeta(name="gpu"),
        spec=DeviceClassSpec(
            selectors=(DeviceSelector(cel=CelSelector(expression=f'device.driver == "{D}"')),),
            config=(ClaimConfig(opaque=OpaqueConfig(driver=D, parameters={"from": "class"})),),
        ),
    ),
    "any": DeviceClass(metadata=ObjectMeta(name="any")),
}


def gpu(name: str, taints: tuple[DeviceTaint, ...] = (), **fields: object) -> Device:
    attributes = fields.pop("attributes", {})
    return Device(
        name=name,
        taints=(MANAGED, *taints),
        attributes={k: Attribute(string=v) for k, v in attributes.items()},  # type: ignore[attr-defined]
        **fields,  # type: ignore[arg-type]
    )


def node(*devices: Device, counters: tuple[CounterSet, ...] = ()) -> tuple[NodeDevices, Usage]:
    parts = [devices, ()] if counters else [devices]
    slices = {
        str(i): ResourceSlice(
            metadata=ObjectMeta(name=str(i)),
            spec=ResourceSliceSpec(
                driver=D,
                pool=Pool(name="n", generation=1, resource_slice_count=len(parts)),
                node_name="n",
                devices=part,
                shared_counters=() if part else counters,
            ),
        )
        for i, part in enumerate(parts)
    }
    pools = build_pools(slices, {}, frozenset({D}))
    return devices_on(Node(metadata=ObjectMeta(name="n")), pools.values()), Usage(pools)


def claim(*requests: DeviceRequest, name: str = "c", constraints: tuple[DeviceConstraint, ...] = (),
          config: tuple[ClaimConfig, ...] = ()) -> ResourceClaim:  # fmt: skip
    return ResourceClaim(
        metadata=ObjectMeta(name=name, namespace="ns", uid=f"uid-{name}"),
        spec=ResourceClaimSpec(devices=DeviceClaim(requests=requests, constraints=constraints, config=config)),
    )


def exactly(name: str = "r", count: int = 1, selector: str = "", **fields: object) -> DeviceRequest:
    selectors = (DeviceSelector(cel=CelSelector(expression=selector)),) if selector else ()
    fields.setdefault("device_class_name", "gpu")
    return DeviceRequest(name=name, exactly=ExactRequest(count=count, selectors=selectors, **fields))  # type: ignore[arg-type]


def is_(attribute: str, value: str) -> str:
    return f'device.attributes["{D}"].{attribute} == "{value}"'


def give(here: tuple[NodeDevices, Usage], *claims: ResourceClaim) -> tuple[Allocation, ...] | Failure:
    return allocate(claims, here[0], here[1], CLASSES, Selectors(), NOW)


def chosen(answer: tuple[Allocation, ...] | Failure) -> list[list[str]]:
    assert not isinstance(answer, Failure), answer
    return [[f"{r.request}={r.device}" for r in a.devices.results] for a in answer]


def kind(answer: tuple[Allocation, ...] | Failure) -> FailureKind:
    assert isinstance(answer, Failure)
    return answer.kind


def test_counts_are_first_fit_in_slice_order_and_taken_once() -> None:
    here = node(*(gpu(f"g{i}") for i in range(4)))
    assert chosen(give(here, claim(exactly(count=3)))) == [["r=g0", "r=g1", "r=g2"]]
    assert chosen(give(here, claim(exactly()))) == [["r=g3"]]
    assert kind(give(here, claim(exactly()))) is FailureKind.NOT_ENOUGH


def test_a_failed_allocation_takes_nothing() -> None:
    here = node(gpu("g0"), gpu("g1"))
    assert kind(give(here, claim(exactly("a", 1), exactly("b", 2)))) is FailureKind.NOT_ENOUGH
    assert chosen(give(here, claim(exactly(count=2)))) == [["r=g0", "r=g1"]]


def test_all_devices_or_none() -> None:
    every = exactly(allocation_mode="All")
    assert chosen(give(node(gpu("g0"), gpu("g1")), claim(every))) == [["r=g0", "r=g1"]]
    used = node(gpu("g0"), gpu("g1"))
    give(used, claim(exactly()))
    assert kind(give(used, claim(every))) is FailureKind.NOT_ENOUGH
    bad = DeviceTaint(key="gpunode.dev/xid", value="79", effect="NoSchedule")
    assert kind(give(node(gpu("g0"), gpu("g1", (bad,))), claim(every))) is FailureKind.NOT_ENOUGH
    assert kind(give(node(), claim(every))) is FailureKind.NOT_ENOUGH
    crowd = node(*(gpu(f"g{i}") for i in range(33)))
    assert kind(give(crowd, claim(every))) is FailureKind.INVALID


def test_more_than_32_devices_are_refused_at_once() -> None:
    assert kind(give(node(gpu("g0")), claim(exactly(count=33)))) is FailureKind.INVALID


def test_unknown_class_and_failing_selector_are_permanent() -> None:
    unknown = give(node(gpu("g0")), claim(exactly(device_class_name="nope")))
    broken = give(node(gpu("g0")), claim(exactly(selector=is_("missing", "x"))))
    assert kind(unknown) is FailureKind.NO_SUCH_CLASS and kind(broken) is FailureKind.SELECTOR
    assert isinstance(unknown, Failure) and unknown.permanent and "nope" in unknown.text
    assert isinstance(broken, Failure) and broken.permanent and "missing" in broken.text


def test_backtracking_across_requests() -> None:
    here = node(gpu("h", attributes={"model": "h100"}), gpu("a", attributes={"model": "a100"}))
    anything, only_h = exactly("any"), exactly("h", selector=is_("model", "h100"))
    assert chosen(give(here, claim(anything, only_h))) == [["any=a", "h=h"]]


def test_first_available_goes_down_the_list_and_names_the_sub_request() -> None:
    alternatives = DeviceRequest(
        name="r",
        first_available=tuple(
            SubRequest(
                name=m,
                device_class_name="gpu",
                count=2,
                selectors=(DeviceSelector(cel=CelSelector(expression=is_("model", m))),),
            )
            for m in ("h100", "a100")
        ),
    )  # fmt: skip
    here = node(
        gpu("h0", attributes={"model": "h100"}), *(gpu(f"a{i}", attributes={"model": "a100"}) for i in range(2))
    )
    assert chosen(give(here, claim(alternatives))) == [["r/a100=a0", "r/a100=a1"]]


def test_match_attribute_takes_the_tightest_group_that_suffices() -> None:
    domains = {"g0": "x", "g1": "x", "g2": "x", "g3": "y", "g4": "y", "g5": "z"}
    here = node(*(gpu(n, attributes={"link": v}) for n, v in domains.items()))
    same = DeviceConstraint(match_attribute=f"{D}/link")
    assert chosen(give(here, claim(exactly(count=2), constraints=(same,)))) == [["r=g3", "r=g4"]]
    assert chosen(give(here, claim(exactly(count=3), constraints=(same,)))) == [["r=g0", "r=g1", "r=g2"]]
    failed = give(here, claim(exactly(count=2), constraints=(same,)))
    assert isinstance(failed, Failure) and "best has 1 free" in failed.text


def test_match_attribute_over_two_requests_pairs_devices() -> None:
    """D.3 case 12: counts are right, but the pairs on one PCIe root are used up."""
    names = {"g0": ("gpu", "p0"), "g1": ("gpu", "p1"), "nic0": ("nic", "p1")}
    here = node(*(gpu(n, attributes={"type": t, "root": r}) for n, (t, r) in names.items()))
    pair = claim(
        exactly("gpu", selector=is_("type", "gpu")),
        exactly("nic", selector=is_("type", "nic")),
        constraints=(DeviceConstraint(match_attribute=f"{D}/root"),),
    )
    assert chosen(give(here, pair)) == [["gpu=g1", "nic=nic0"]]
    assert kind(give(here, pair)) is FailureKind.NOT_ENOUGH


def test_a_device_without_the_attribute_cannot_meet_a_constraint() -> None:
    here = node(gpu("g0"), gpu("g1", attributes={"link": "x"}))
    same = (DeviceConstraint(match_attribute=f"{D}/link"),)
    assert chosen(give(here, claim(exactly(), constraints=same))) == [["r=g1"]]


def test_distinct_attribute() -> None:
    here = node(*(gpu(n, attributes={"numa": v}) for n, v in {"g0": "0", "g1": "0", "g2": "1"}.items()))
    apart = (DeviceConstraint(distinct_attribute=f"{D}/numa"),)
    assert chosen(give(here, claim(exactly(count=2), constraints=apart))) == [["r=g0", "r=g2"]]


def test_taints_need_tolerations_except_the_managed_one() -> None:
    bad = DeviceTaint(key="gpunode.dev/ecc", value="dbe", effect="NoExecute")
    note = DeviceTaint(key="gpunode.dev/link", value="x", effect="None")
    here = node(gpu("g0", (bad,)), gpu("g1", (note,)))
    assert chosen(give(here, claim(exactly()))) == [["r=g1"]]
    tolerant = exactly(tolerations=(DeviceToleration(key="gpunode.dev/ecc", operator="Exists"),))
    answer = give(here, claim(tolerant))
    assert chosen(answer) == [["r=g0"]]
    assert not isinstance(answer, Failure)
    assert answer[0].devices.results[0].tolerations == tolerant.exactly.tolerations  # type: ignore[union-attr]


def test_a_device_without_the_managed_taint_is_not_ours() -> None:
    assert kind(give(node(Device(name="g0")), claim(exactly()))) is FailureKind.NOT_ENOUGH


def test_admin_access_shares_devices_in_use_and_takes_none() -> None:
    here = node(gpu("g0"))
    give(here, claim(exactly()))
    answer = give(here, claim(exactly(admin_access=True)))
    assert chosen(answer) == [["r=g0"]] and not isinstance(answer, Failure)
    assert answer[0].devices.results[0].admin_access is True
    assert kind(give(here, claim(exactly()))) is FailureKind.NOT_ENOUGH


def partition(name: str, slices: int) -> Device:
    taken = CounterConsumption(counter_set="gpu0", counters={"slices": Counter(value=str(slices))})
    return gpu(name, consumes_counters=(taken,))


def test_partitions_share_counters() -> None:
    total = (CounterSet(name="gpu0", counters={"slices": Counter(value="7")}),)
    here = node(
        partition("whole", 7), partition("half-a", 4), partition("half-b", 3), partition("third", 2), counters=total
    )
    assert chosen(give(here, claim(exactly(count=2)))) == [["r=half-a", "r=half-b"]]  # the whole GPU would use it up
    assert kind(give(here, claim(exactly()))) is FailureKind.NOT_ENOUGH


def shared(memory: str = "40Gi", **policy: object) -> Device:
    request_policy = RequestPolicy(**policy) if policy else None  # type: ignore[arg-type]
    return gpu(
        "g0", allow_multiple_allocations=True,
        capacity={"memory": Capacity(value=memory, request_policy=request_policy)},
    )  # fmt: skip


def wants(memory: str | None) -> DeviceRequest:
    return exactly(capacity=CapacityRequests(requests={"memory": memory}) if memory else None)


@pytest.mark.parametrize(
    ("policy", "asked", "consumed"),
    [
        ({}, "10Gi", "10Gi"),
        ({}, None, "40Gi"),
        ({"default": "5Gi"}, None, "5Gi"),
        ({"default": "5Gi", "valid_values": ("5Gi", "10Gi", "20Gi")}, "6Gi", "10Gi"),
        ({"default": "5Gi", "valid_values": ("5Gi", "10Gi")}, "11Gi", None),
        ({"default": "4Gi", "valid_range": ValidRange(min="4Gi", step="2Gi", max="20Gi")}, "5Gi", "6Gi"),
        ({"default": "4Gi", "valid_range": ValidRange(min="4Gi", step="2Gi", max="20Gi")}, "1Gi", "4Gi"),
        ({"default": "4Gi", "valid_range": ValidRange(min="4Gi", max="20Gi")}, "21Gi", None),
        ({}, "41Gi", None),
    ],
)
def test_request_policy(policy: dict[str, object], asked: str | None, consumed: str | None) -> None:
    answer = give(node(shared(**policy)), claim(wants(asked)))
    if consumed is None:
        assert kind(answer) is FailureKind.NOT_ENOUGH
        return
    assert not isinstance(answer, Failure)
    result = answer[0].devices.results[0]
    assert result.consumed_capacity == {"memory": consumed}
    assert str(uuid.UUID(result.share_id)) == result.share_id


def test_shares_add_up_to_the_capacity_and_have_their_own_ids() -> None:
    here = node(shared())
    answers = [give(here, claim(wants("15Gi"), name=f"c{i}")) for i in range(3)]
    ids = {a[0].devices.results[0].share_id for a in answers[:2] if not isinstance(a, Failure)}
    assert len(ids) == 2 and kind(answers[2]) is FailureKind.NOT_ENOUGH
    again = give(node(shared()), claim(wants("15Gi"), name="c0"))
    assert not isinstance(again, Failure) and again[0].devices.results[0].share_id in ids  # from inputs only


def test_a_shared_device_consumes_its_counters_once() -> None:
    taken = CounterConsumption(counter_set="s", counters={"n": Counter(value="1")})
    total = (CounterSet(name="s", counters={"n": Counter(value="2")}),)
    many = gpu(
        "many", allow_multiple_allocations=True, consumes_counters=(taken,),
        capacity={"memory": Capacity(value="40Gi")},
    )  # fmt: skip
    here = node(many, gpu("other", consumes_counters=(taken,)), counters=total)
    for index in range(2):
        assert chosen(give(here, claim(wants("20Gi"), name=f"c{index}"))) == [["r=many"]]
    assert chosen(give(here, claim(exactly()))) == [["r=other"]]


def test_capacity_of_a_whole_device_is_a_minimum() -> None:
    small, large = (gpu(n, capacity={"memory": Capacity(value=v)}) for n, v in (("s", "40Gi"), ("l", "80Gi")))
    answer = give(node(small, large), claim(wants("60Gi")))
    assert chosen(answer) == [["r=l"]] and not isinstance(answer, Failure)
    assert answer[0].devices.results[0].share_id is None


def test_what_is_written_is_what_the_in_tree_allocator_writes() -> None:
    own = ClaimConfig(requests=("b",), opaque=OpaqueConfig(driver=D, parameters={"from": "claim"}))
    other = ClaimConfig(requests=("unused",), opaque=OpaqueConfig(driver=D))
    answer = give(node(gpu("g0"), gpu("g1")), claim(exactly("a"), exactly("b"), config=(own, other)))
    assert not isinstance(answer, Failure)
    allocation = answer[0]
    written = [(c.source, c.requests) for c in allocation.devices.config]
    assert written == [("FromClass", ()), ("FromClaim", ("b",))], "a class once; no names where all requests are meant"
    assert allocation.allocation_timestamp == "2026-11-29T12:00:00Z"
    assert allocation.node_selector is not None
    (term,) = allocation.node_selector.node_selector_terms
    assert term.match_expressions == ()
    assert [(f.key, f.operator, f.values) for f in term.match_fields] == [("metadata.name", "In", ("n",))]


def test_the_search_gives_up_after_a_count_of_trials() -> None:
    """Devices that all differ, and a last request whose only device shares no value with any: bounded work."""
    pairs = [gpu(f"g{i}", attributes={"u": str(i), "type": "gpu"}) for i in range(32)]
    here = node(*pairs, gpu("nic", attributes={"u": "none", "type": "nic"}))
    is_gpu, is_nic = is_("type", "gpu"), is_("type", "nic")
    apart = DeviceConstraint(distinct_attribute=f"{D}/u", requests=("w",))
    same = DeviceConstraint(match_attribute=f"{D}/u", requests=("x", "y"))
    asked = claim(exactly("w", 8, is_gpu), exactly("x", 1, is_gpu), exactly("y", 1, is_nic), constraints=(apart, same))
    assert kind(give(here, asked)) is FailureKind.SEARCH_LIMIT


def test_a_request_that_nothing_can_serve_ends_the_search_before_it_begins() -> None:
    here = node(*(gpu(f"g{i}", attributes={"u": str(i)}) for i in range(32)))
    failed = give(here, claim(exactly("w", 8), exactly("y", 1, is_("u", "none"))))
    assert isinstance(failed, Failure) and (failed.request, failed.text) == (
        "y", "needs 1 devices, 0 of 0 matching are free",
    )  # fmt: skip


@st.composite
def _instance(draw: st.DrawFn) -> tuple[list[tuple[str, str]], list[tuple[int, str]], bool]:
    devices = draw(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz")), min_size=1, max_size=6))
    requests = draw(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["a", "b", ""])), min_size=1, max_size=3))
    return devices, requests, draw(st.booleans())


@given(_instance())
@settings(max_examples=150, deadline=None)
def test_finds_devices_exactly_when_some_choice_exists(
    instance: tuple[list[tuple[str, str]], list[tuple[int, str]], bool],
) -> None:
    """Against brute force: model selectors, counts, and one matchAttribute over all requests."""
    devices, requests, constrained = instance

    def possible(number: int, left: frozenset[int], link: str | None) -> bool:
        if number == len(requests):
            return True
        count, model = requests[number]
        options = [i for i in left if not model or devices[i][0] == model]
        for subset in combinations(options, count):
            links = {devices[i][1] for i in subset} | ({link} if link else set())
            if constrained and len(links) > 1:
                continue
            if possible(number + 1, left - set(subset), next(iter(links)) if constrained else None):
                return True
        return False

    here = node(*(gpu(f"g{i}", attributes={"model": m, "link": v}) for i, (m, v) in enumerate(devices)))
    asked = claim(
        *(exactly(f"r{i}", n, is_("model", m) if m else "") for i, (n, m) in enumerate(requests)),
        constraints=(DeviceConstraint(match_attribute=f"{D}/link"),) if constrained else (),
    )
    answer = give(here, asked)
    assert (not isinstance(answer, Failure)) == possible(0, frozenset(range(len(devices))), None)
    if not isinstance(answer, Failure):
        used = [r.device for r in answer[0].devices.results]
        assert len(used) == len(set(used)) == sum(n for n, _ in requests)
