"""Whole gangs or nothing: text scenarios, the small cases on which greedy orders fail, and a brute-force oracle."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenario import CONFIG, NOW, Scenario, allocated, devices, places, reasons, run, scenario

from gpunode.allocate.ask import Failure
from gpunode.gang.board import MAX_GANG_TRIALS, Board
from gpunode.gang.decide import decide
from gpunode.gang.derived import Derived
from gpunode.gang.explain import explain
from gpunode.gang.gangs import find_gangs
from gpunode.gang.place import NoPlace, Placed, bundle, place_units
from gpunode.model.core import PodResourceClaim
from gpunode.model.gang import Place, Release


@pytest.mark.parametrize(
    ("nodes", "pods"),
    [
        ("8,7", "1,8"),
        ("7,5", "2,4,4"),
        ("8,7", "7,6,2"),
        ("8,8", "4,4,8"),  # X11: kube-scheduler leaves this one pending
        ("8,8,8", "8,8,8"),
        ("3,3,3", "1,1,1,2,2,2"),
        ("6,5,5", "5,5,6"),
    ],
)
def test_small_cases_that_defeat_one_greedy_order_or_another(nodes: str, pods: str) -> None:
    text = "\n".join(f"node n{i} gpus={g}" for i, g in enumerate(nodes.split(",")))
    actions = run(f"{text}\ngang g pods={pods}")
    assert len(places(actions)["g"]) == len(pods.split(","))
    assert len(devices(actions)) == len(set(devices(actions))) == sum(map(int, pods.split(",")))


def test_sizes_are_taken_in_decreasing_order_also_where_no_exact_search_helps() -> None:
    """71 nodes: each 7 must take a 4 and a 2, each 5 a 4, the 8 an 8; the small pods have the lower ranks."""
    nodes = "\n".join(f"node n{i} gpus={size}" for i, size in enumerate([7] * 35 + [5] * 35 + [8]))
    pods = ",".join(["2"] * 35 + ["4"] * 70 + ["8"])
    assert len(places(run(f"{nodes}\ngang g pods={pods}"))["g"]) == 106


@pytest.mark.parametrize(
    ("nodes", "pods"),
    [
        # (GPU, CPU): the two GPU pods must not share a node
        ([(4, 4), (4, 4)], [(2, 1), (2, 1), (1, 3), (1, 2)]),
        # no greedy order solves these; equal pods have to share a node
        ([(6, 7), (6, 6)], [(1, 3), (1, 2), (1, 2), (1, 3), (1, 3)]),
        ([(4, 8), (5, 3)], [(2, 1), (2, 1), (1, 2), (1, 2), (1, 2), (1, 2)]),
        ([(9, 4), (9, 6), (8, 9)], [(4, 3), (1, 4), (4, 3), (4, 3), (1, 4)]),
    ],
)
def test_two_dimensions_need_the_exact_search(nodes: list[tuple[int, int]], pods: list[tuple[int, int]]) -> None:
    actions = decide(two_dimensions(nodes, pods).snapshot(), NOW, CONFIG)
    assert len(places(actions)["g"]) == len(pods)


def two_dimensions(nodes: list[tuple[int, int]], pods: list[tuple[int, int]]) -> Scenario:
    """Nodes and the pods of one gang by (GPU, CPU)."""
    lines = [f"node n{i} gpus={g} cpu={c}" for i, (g, c) in enumerate(nodes)]
    world = scenario("\n".join([*lines, f"gang g pods={','.join(str(g) for g, _ in pods)}"]))
    for index, (gpus, cpu) in enumerate(pods):
        key = f"default/g-{index}"
        world.pods[key] = scenario(f"pod g-{index} gpus={gpus} cpu={cpu} group=g").pods[key]
    return world


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # a gang goes to the smallest node that holds all of it
        ("node n1 gpus=8\nnode n2 gpus=4\ngang g pods=1,1,1,1", ["n2"] * 4),
        # else to the fewest nodes, and the rest to the smallest that holds the rest; ranks stay together
        ("node n1 gpus=2\nnode n2 gpus=8\nnode n3 gpus=4\ngang g pods=2,2,2,2,2", ["n2"] * 4 + ["n1"]),
        # occupied nodes are filled before empty ones are opened
        ("node n1\nnode n2\ngang old pods=6 bound=n2\ngang g pods=2", ["n2"]),
        # one rack, the tighter one
        ("node a1 rack=a\nnode a2 rack=a\nnode b1 rack=b\nnode b2 rack=b\ngang old pods=8 bound=b1\n"
         "gang g pods=8,8 topology=rack", ["a1", "a2"]),
        ("node a1 rack=a gpus=8\nnode b1 rack=b gpus=4\nnode c1 gpus=2\ngang g pods=1,1 topology=rack", ["b1", "b1"]),
    ],
)  # fmt: skip
def test_where_a_gang_goes(text: str, expected: list[str]) -> None:
    assert places(run(text))["g"] == expected


@pytest.mark.parametrize(
    "text",
    [
        "node n1\nnode n2\ngang g pods=8,8,8",
        "node n1\nnode n2 cordoned\ngang g pods=8,8",
        "node n1\nnode n2 notready\ngang g pods=8,8",
        "node n1\nnode n2 incomplete\ngang g pods=8,8",
        "node n1\nnode n2\ntaint n2/gpu-0 xid=79\ngang g pods=8,8",
        "node a rack=a\nnode b rack=b\ngang g pods=8,8 topology=rack",
        "node a\nnode b\ngang g pods=1,1 topology=rack",
        "node n1 link=4\ngang g pods=6 same=nvlinkDomain",
        "node n1 cpu=4\ngang g pods=1,1 cpu=3",
        "norule\nnode n1\ngang g pods=8",
        "node n1\ngang g pods=1,1 min=3",
        "node n1\ngang g pods=1,1 noclaim",
        "node n1\ngang g pods=1,1 foreign",
        "node n1\nnode n2\ngang g pods=1 class=nope",
        "node n1\ngang old pods=8 bound=n1\npod p gpus=8",
    ],
)
def test_nothing_is_placed_and_one_reason_is_given(text: str) -> None:
    actions = run(text)
    assert places(actions) == {}
    assert len(reasons(actions)) == 1


def test_two_gangs_never_split_what_only_one_can_have() -> None:
    actions = run("node n1 gpus=6\ngang a pods=1,1,1,1\ngang b pods=1,1,1,1")
    assert set(places(actions)) == {"a"} and set(reasons(actions)) == {"b"}


def test_a_smaller_gang_passes_one_that_cannot_fit() -> None:
    actions = run("node n1\ngang big pods=8,8 prio=10\ngang small pods=4")
    assert set(places(actions)) == {"small"} and set(reasons(actions)) == {"big"}


def test_priority_then_age_then_name() -> None:
    actions = run(
        """
        node n1
        gang b pods=8 at=2026-11-29T00:00:01Z
        gang a pods=8 at=2026-11-29T00:00:02Z
        gang c pods=8 at=2026-11-29T00:00:03Z prio=1
        """
    )
    assert set(places(actions)) == {"c"}
    assert [a.gang for a in actions][-2:] == ["podgroup/default/b", "podgroup/default/a"]


def test_homogeneous_under_first_available() -> None:
    """X16: two h100 are free, but only a100 can serve all four members."""
    actions = run("node n1 gpus=2 model=h100\nnode n2 gpus=4 model=a100\ngang g pods=1,1,1,1 alt=h100,a100")
    assert places(actions)["g"] == ["n2"] * 4
    preferred = run("node n1 gpus=4 model=h100\nnode n2 gpus=4 model=a100\ngang g pods=1,1,1,1 alt=h100,a100")
    assert places(preferred)["g"] == ["n1"] * 4


def test_members_beyond_min_count_use_the_alternative_of_the_others() -> None:
    actions = run("node n1 gpus=3 model=h100\nnode n2 gpus=2 model=a100\ngang g pods=1,1,1,1 min=3 alt=h100,a100")
    (place,) = [a for a in actions if isinstance(a, Place)]
    assert [a.node for a in place.assignments] == ["n1"] * 3
    assert place.stragglers == ("default/g-3",)


def test_stragglers_only_lose_their_gate_and_ranks_come_first() -> None:
    actions = run("node n1\nnode n2\ngang g pods=8,8,8,8 min=2")
    (place,) = [a for a in actions if isinstance(a, Place)]
    assert [a.pod for a in place.assignments] == ["default/g-0", "default/g-1"]
    assert place.stragglers == ("default/g-2", "default/g-3")
    assert reasons(actions)["g"].startswith("Placed: runs with 2 pods (minCount 2)")


def test_a_straggler_is_placed_once_there_is_room() -> None:
    actions = run("node n1\nnode n2\ngang g pods=8 min=1 bound=n1\npod g-1 gpus=8 group=g ungated")
    (place,) = [a for a in actions if isinstance(a, Place)]
    assert [(a.pod, a.node) for a in place.assignments] == [("default/g-1", "n2")]


def test_a_rank_is_the_completion_index_not_the_name() -> None:
    world = scenario("node n1\ngang g pods=" + ",".join(["1"] * 8))
    for key, pod in list(world.pods.items()):
        index = str(7 - int(pod.metadata.name[-1]))
        labels = {"batch.kubernetes.io/job-completion-index": index}
        world.pods[key] = _with_meta(pod, labels=labels)
    (place,) = [a for a in decide(world.snapshot(), NOW, CONFIG) if isinstance(a, Place)]
    assert [a.pod for a in place.assignments] == [f"default/g-{i}" for i in range(7, -1, -1)]
    assert [a.claims[0].allocation.devices.results[0].device for a in place.assignments] == [
        f"gpu-{i}" for i in range(8)
    ]


def _with_meta(pod, **fields):  # type: ignore[no-untyped-def]
    from msgspec.structs import replace

    return replace(pod, metadata=replace(pod.metadata, **fields))


def test_members_that_share_a_claim_go_to_one_node() -> None:
    """D.3 case 10: the node must have room for both pods, not only for the first."""
    from msgspec.structs import replace

    world = scenario("node n1 cpu=3\nnode n2 cpu=8\ngang g pods=8,8 cpu=2")
    del world.claims["default/g-1-gpu"]
    for key, pod in list(world.pods.items()):
        reference = PodResourceClaim(name="gpu", resource_claim_name="g-0-gpu")
        world.pods[key] = replace(pod, spec=replace(pod.spec, resource_claims=(reference,)))
    (place,) = [a for a in decide(world.snapshot(), NOW, CONFIG) if isinstance(a, Place)]
    assert [a.node for a in place.assignments] == ["n2", "n2"]
    first, second = (a.claims for a in place.assignments)
    assert first == second and len(first) == 1


def test_after_a_crash_allocated_claims_are_kept_and_the_gang_is_completed_around_them() -> None:
    from msgspec.structs import replace

    world = scenario("node n1\nnode n2\nnode n3\ngang g pods=8,8,8")
    claim = world.claims["default/g-1-gpu"]
    status = replace(claim.status, allocation=allocated("n1", [f"gpu-{i}" for i in range(8)]))
    world.claims["default/g-1-gpu"] = replace(claim, status=status)
    (place,) = [a for a in decide(world.snapshot(), NOW, CONFIG) if isinstance(a, Place)]
    kept = {a.pod: (a.node, len(a.claims)) for a in place.assignments}
    assert kept == {"default/g-0": ("n2", 1), "default/g-1": ("n1", 0), "default/g-2": ("n3", 1)}


def _half_allocated(text: str) -> Scenario:
    """Gang g of two; a crash left the claim of its second pod allocated on n1."""
    from msgspec.structs import replace

    world = scenario(text)
    claim = world.claims["default/g-1-gpu"]
    status = replace(claim.status, allocation=allocated("n1", [f"gpu-{i}" for i in range(8)]))
    world.claims["default/g-1-gpu"] = replace(claim, status=status)
    return world


@pytest.mark.parametrize(
    "text",
    [
        "node n1\ngang g pods=8,8",  # no room for the other member
        "node n1 cordoned\nnode n2\nnode n3\ngang g pods=8,8",  # the pod can no longer go there
        "node n1\nnode n2\nnode n3\ntaint n1/gpu-0 xid=79\ngang g pods=8,8",  # nor use the device
    ],
)
def test_what_a_crash_left_is_taken_back_where_the_gang_cannot_be_completed_around_it(text: str) -> None:
    actions = decide(_half_allocated(text).snapshot(), NOW, CONFIG)
    assert Release("podgroup/default/g", ("default/g-1-gpu",)) in actions
    assert places(actions) == {}


def test_a_gang_whose_allocations_are_taken_back_is_explained() -> None:
    world = _half_allocated("node n1\nnode n2\nnode n3\ntaint n1/gpu-0 xid=79\ngang g pods=8,8")
    reason = explain(world.snapshot(), "podgroup/default/g", NOW, CONFIG)
    assert reason.text == "1 allocations of an interrupted placement are taken back, then it is placed anew"


def test_nothing_is_taken_back_from_pods_without_our_gate() -> None:
    from msgspec.structs import replace

    world = _half_allocated("node n1\ngang g pods=8,8")
    pod = world.pods["default/g-1"]
    world.pods["default/g-1"] = replace(pod, spec=replace(pod.spec, scheduling_gates=()))
    actions = decide(world.snapshot(), NOW, CONFIG)
    assert not [a for a in actions if isinstance(a, Release)]


def test_devices_of_terminating_pods_are_still_in_use() -> None:
    actions = run("node n1\npod old gpus=8 on=n1 terminating\ngang g pods=8")
    assert places(actions) == {}
    assert reasons(actions)["g"].startswith("WaitingForRelease")


def test_the_room_of_a_released_pod_is_taken_before_it_is_bound() -> None:
    from msgspec.structs import replace

    world = scenario("node n1 cpu=4 gpus=8\npod first gpus=1 cpu=3 on=n1\npod second gpus=1 cpu=3")
    pod = world.pods["default/first"]
    world.pods["default/first"] = replace(pod, spec=replace(pod.spec, node_name=""))
    assert places(decide(world.snapshot(), NOW, CONFIG)) == {}


def test_a_spent_budget_proves_nothing_and_leaves_no_trace() -> None:
    snapshot = scenario("node n1\nnode n2\ngang g pods=4,4,8").snapshot()
    derived = Derived()
    view = derived.begin(snapshot, CONFIG)
    board = Board(snapshot, derived, view)
    (state,) = find_gangs(snapshot, derived.owners(snapshot, view, CONFIG))
    units = bundle(board, state.waiting)
    assert not isinstance(units, Failure)
    board.budget = 12  # one search of 8 devices and part of the next
    answer = place_units(board, units, (board.nodes,), {})
    assert isinstance(answer, NoPlace) and not answer.proved
    board.budget = MAX_GANG_TRIALS
    assert isinstance(place_units(board, units, (board.nodes,), {}), Placed)


@st.composite
def _tight(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    nodes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=3))
    pods = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=5))
    return nodes, pods


@given(_tight())
@settings(max_examples=120, deadline=None)
def test_places_exactly_when_some_arrangement_exists(
    instance: tuple[list[tuple[int, int]], list[tuple[int, int]]],
) -> None:
    """Against brute force over all assignments of pods (GPU, CPU) to nodes."""
    nodes, pods = instance
    feasible = any(
        all(
            sum(p[d] for p, at in zip(pods, where, strict=True) if at == n) <= nodes[n][d]
            for n in range(len(nodes))
            for d in (0, 1)
        )
        for where in product(range(len(nodes)), repeat=len(pods))
    )
    actions = decide(two_dimensions(nodes, pods).snapshot(), NOW, CONFIG)
    assert bool(places(actions)) == feasible
    assert len(places(actions)) + len(reasons(actions)) == 1
