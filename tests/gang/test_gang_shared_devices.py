"""Partitions with counters and shareable devices: the board's memory must not mix up their states."""

from msgspec.structs import replace
from scenario import CONFIG, DRIVER, NOW, Scenario, allocated, devices, places, scenario

from gpunode.gang.decide import Decider, decide
from gpunode.model.gang import Place
from gpunode.model.resource import (
    Attribute,
    Capacity,
    CapacityRequests,
    Counter,
    CounterConsumption,
    CounterSet,
    Device,
    ResourceClaimStatus,
)


def partitions(world: Scenario, node: str) -> None:
    """Replace a node's devices by one GPU of 7 slices: a whole, two of 3 and seven of 1."""

    def part(name: str, size: int) -> Device:
        taken = CounterConsumption(counter_set="gpu-0", counters={"slices": Counter(value=str(size))})
        return Device(name=name, attributes={"profile": Attribute(string=f"{size}g")}, consumes_counters=(taken,))

    slice_ = world.slices[f"{node}-s"]
    pool = replace(slice_.spec.pool, resource_slice_count=2)
    parts = (part("whole", 7), part("half-0", 3), part("half-1", 3), *(part(f"one-{i}", 1) for i in range(7)))
    world.slices[f"{node}-s"] = replace(slice_, spec=replace(slice_.spec, pool=pool, devices=parts))
    counters = (CounterSet(name="gpu-0", counters={"slices": Counter(value="7")}),)
    world.slices[f"{node}-c"] = replace(
        slice_,
        metadata=replace(slice_.metadata, name=f"{node}-c"),
        spec=replace(slice_.spec, pool=pool, devices=(), shared_counters=counters),
    )


def profile(size: str) -> str:
    return f'device.attributes["{DRIVER}"].profile=="{size}"'


def test_a_gang_of_partitions_fills_gpus_by_their_counters() -> None:
    gang = f"gang g pods=1,1,1,1 prio=1 cel={profile('3g')}"
    world = scenario(f"node n1\nnode n2\n{gang}\npod p gpus=1 cel={profile('7g')}")
    for node in ("n1", "n2"):
        partitions(world, node)
    actions = decide(world.snapshot(), NOW, CONFIG)
    assert sorted(places(actions)["g"]) == ["n1", "n1", "n2", "n2"]
    assert "p" not in places(actions)  # the whole GPU is no longer whole


def test_counters_held_by_running_pods_count() -> None:
    world = scenario(f"node n1\nnode n2\npod old gpus=1 on=n1\ngang g pods=1,1 cel={profile('7g')}")
    for node in ("n1", "n2"):
        partitions(world, node)
    claim = world.claims["default/old-gpu"]
    status = ResourceClaimStatus(allocation=allocated("n1", ["one-3"]), reserved_for=claim.status.reserved_for)
    world.claims["default/old-gpu"] = replace(claim, status=status)
    assert places(decide(world.snapshot(), NOW, CONFIG)) == {}
    del world.pods["default/old"], world.claims["default/old-gpu"]
    assert places(decide(world.snapshot(), NOW, CONFIG)) == {"g": ["n1", "n2"]}


def shareable(world: Scenario, node: str) -> None:
    slice_ = world.slices[f"{node}-s"]
    device = Device(name="gpu-0", allow_multiple_allocations=True, capacity={"memory": Capacity(value="40Gi")})
    world.slices[f"{node}-s"] = replace(slice_, spec=replace(slice_.spec, devices=(device,)))


def wants(world: Scenario, pod: str, memory: str) -> None:
    claim = world.claims[f"default/{pod}-gpu"]
    (request,) = claim.spec.devices.requests
    assert request.exactly is not None
    exact = replace(request.exactly, capacity=CapacityRequests(requests={"memory": memory}))
    spec = replace(claim.spec, devices=replace(claim.spec.devices, requests=(replace(request, exactly=exact),)))
    world.claims[f"default/{pod}-gpu"] = replace(claim, spec=spec)


def test_shares_of_equal_looking_nodes_are_told_apart() -> None:
    """Each node holds two shares of 15Gi and no third, whatever was remembered of its twin."""
    world = scenario("node n1\nnode n2\ngang g pods=1,1,1,1 prio=1\npod p gpus=1")
    for node in ("n1", "n2"):
        shareable(world, node)
    for pod in ("g-0", "g-1", "g-2", "g-3", "p"):
        wants(world, pod, "15Gi")
    decider = Decider()
    for _ in range(2):
        actions = decider.decide(world.snapshot(), NOW, CONFIG)
        assert sorted(places(actions)["g"]) == ["n1", "n1", "n2", "n2"]
        assert "p" not in places(actions)
    shares = [
        r.share_id
        for a in actions
        if isinstance(a, Place)
        for assignment in a.assignments
        for c in assignment.claims
        for r in c.allocation.devices.results
    ]
    assert len(set(shares)) == 4


def test_a_lone_gpu_is_taken_from_the_broken_group() -> None:
    """NVLink groups of four: one GPU of the first is held, so the next single one comes from there, not from a
    whole group; and four come from the whole one."""
    world = scenario("node n1 link=4\npod old gpus=1 on=n1\npod a gpus=4 prio=1\npod b gpus=1")
    assert devices(decide(world.snapshot(), NOW, CONFIG)) == [
        *(f"n1/gpu-{i}" for i in (4, 5, 6, 7)), "n1/gpu-1",
    ]  # fmt: skip
