"""From inventory and health to slices: attributes, taints, generation, names."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.health.devices import DeviceMap
from gpunode.health.machine import HealthMachine
from gpunode.health.policy import Policy
from gpunode.health.state import DeviceState, Entry, HealthState
from gpunode.model.grace import parse_grace
from gpunode.model.hardware import Fabric, Gpu, Inventory, Link, MigSlice, PciAddress
from gpunode.model.health import Action, DeviceHealth, Dimension, Finding, Level, NodeHealth
from gpunode.model.resource import DeviceTaint, ResourceSlice
from gpunode.slices.changes import changes
from gpunode.slices.describe import nvlink_domains, version_attribute
from gpunode.slices.layout import parse_modes, slice_name
from gpunode.slices.linter import lint
from gpunode.slices.planner import SliceConfig, plan

CONFIG = SliceConfig(driver="gpu.gpunode.dev", node="node-1")
SINCE = "2026-01-02T03:04:05Z"


def gpu(bus: int, **changed: object) -> Gpu:
    made = Gpu(
        uuid=f"GPU-{bus:08x}-0000-4000-8000-000000000000",
        pci=PciAddress(0, bus, 0),
        minor=bus,
        product="NVIDIA H100 80GB HBM3",
        memory_bytes=85520809984,
        pcie_root="pci0000:00",
        numa_node=1,
        brand="Nvidia",
        architecture="Hopper",
        compute_capability=(9, 0),
        multiprocessors=132,
        links=(Link(0, True, "switch", 4), Link(1, False, "", 4)),
    )
    return replace(made, **changed)  # type: ignore[arg-type]


def node(*gpus: Gpu) -> Inventory:
    return Inventory("node-1", "boot", "580.95.05", "13.0", gpus)


def sick(
    device: str, dimension: Dimension = Dimension.XID, code: str = "79", level: Level = Level.UNHEALTHY
) -> NodeHealth:
    finding = Finding(dimension, level, code, Action.RESTART_HOST, "broken", SINCE)
    return NodeHealth({device: DeviceHealth(device, (finding,))})


def served(slices: tuple[ResourceSlice, ...]) -> tuple[ResourceSlice, ...]:
    """As they come back from the API: through JSON."""
    return tuple(msgspec.json.decode(msgspec.json.encode(s), type=ResourceSlice) for s in slices)


def test_a_gpu_is_described_by_the_names_claims_use() -> None:
    (only,) = plan(node(gpu(7)), NodeHealth(), CONFIG)
    (device,) = only.spec.devices
    assert device.name == "gpu-0000-07-00-0"
    assert {name: a.value for name, a in device.attributes.items()} == {
        "type": "gpu",
        "uuid": "GPU-00000007-0000-4000-8000-000000000000",
        "productName": "NVIDIA H100 80GB HBM3",
        "model": "H100 80GB HBM3",
        "brand": "Nvidia",
        "architecture": "Hopper",
        "cudaComputeCapability": "9.0.0",
        "driverVersion": "580.95.5",
        "cudaDriverVersion": "13.0.0",
        "nvlinkDomain": "n-000000070000",
        "nvlinkLinksActive": 1,
        "nvlinkLinksTotal": 2,
        "fabricState": "unsupported",
        "migEnabled": False,
        "resource.kubernetes.io/pciBusID": "0000:07:00.0",
        "resource.kubernetes.io/pcieRoot": "pci0000:00",
        "resource.kubernetes.io/numaNode": 1,
    }
    assert {n: c.value for n, c in device.capacity.items()} == {"memory": "81559Mi", "multiprocessors": "132"}
    assert (only.metadata.name, only.spec.node_name, only.spec.pool.name) == (
        "node-1-gpu.gpunode.dev-0",
        "node-1",
        "node-1",
    )


def test_a_node_without_gpus_has_an_empty_valid_pool() -> None:
    (only,) = plan(node(), NodeHealth(), CONFIG)
    assert (only.spec.devices, only.spec.pool.resource_slice_count) == ((), 1)
    assert lint([only]) == ()


@pytest.mark.parametrize(
    ("text", "version"),
    [("580.95.05", "580.95.5"), ("13.0", "13.0.0"), ("9", "9.0.0"), ("", None), ("1.2.3.4", None), ("r580", None)],
)
def test_versions_are_semver_or_left_out(text: str, version: str | None) -> None:
    found = version_attribute(text)
    assert (found.version if found else None) == version


def test_hostile_names_cost_an_attribute_and_not_the_device() -> None:
    (only,) = plan(node(gpu(7, product="x" * 500 + "\x00\n", brand="\x1b\x07", numa_node=None)), NodeHealth(), CONFIG)
    attributes = only.spec.devices[0].attributes
    assert attributes["productName"].string == "x" * 64
    assert "brand" not in attributes
    assert "resource.kubernetes.io/numaNode" not in attributes
    assert lint([only]) == ()


@pytest.mark.parametrize("effect", ["None", "NoSchedule", "NoExecute"])
def test_every_finding_is_a_taint_of_the_effect_that_health_gives_it(effect: str) -> None:
    inventory = node(gpu(7), gpu(8))
    for level in (Level.DEGRADED, Level.UNHEALTHY):
        (finding,) = sick("gpu-0000-07-00-0", level=level).of("gpu-0000-07-00-0").findings
        health = NodeHealth({"gpu-0000-07-00-0": DeviceHealth("", (replace(finding, effect=effect),))})
        (only,) = plan(inventory, health, CONFIG)
        (taint,) = only.spec.devices[0].taints
        assert (taint.key, taint.value, taint.effect, taint.time_added) == ("gpunode.dev/xid", "79", effect, SINCE)
        assert only.spec.devices[1].taints == ()
        assert lint([only]) == ()


def test_taint_time_is_kept_while_the_taint_stays() -> None:
    inventory, config = node(gpu(7)), replace(CONFIG, managed_taint=True)
    first = plan(inventory, NodeHealth(), config)
    (taint,) = first[0].spec.devices[0].taints
    assert (taint.key, taint.effect, taint.time_added) == ("gpunode.dev/managed", "NoSchedule", None)
    defaulted = tuple(
        msgspec.json.decode(
            msgspec.json.encode(s).replace(b'"effect":', b'"timeAdded":"2026-05-05T05:05:05Z","effect":'),
            type=ResourceSlice,
        )
        for s in first
    )
    again = plan(inventory, NodeHealth(), config, defaulted)
    assert not changes(again, defaulted)
    both = plan(inventory, sick("gpu-0000-07-00-0"), config, defaulted)
    assert [(t.key, t.time_added) for t in both[0].spec.devices[0].taints] == [
        ("gpunode.dev/xid", SINCE),
        ("gpunode.dev/managed", "2026-05-05T05:05:05Z"),
    ]
    other = plan(inventory, sick("gpu-0000-07-00-0", code="95"), config, served(both))
    assert other[0].spec.devices[0].taints[0].value == "95"


def graced(grace: int | None, code: str = "94", since: str = SINCE, effect: str = "NoSchedule") -> NodeHealth:
    (finding,) = sick("gpu-0000-07-00-0", code=code).of("gpu-0000-07-00-0").findings
    made = replace(finding, grace=grace, since=since, effect=effect)
    return NodeHealth({"gpu-0000-07-00-0": DeviceHealth("gpu-0000-07-00-0", (made,))})


def taints(slices: tuple[ResourceSlice, ...], device: int = 0) -> list[tuple[str, str, str, str | None]]:
    return [(t.key, t.value, t.effect, t.time_added) for t in slices[0].spec.devices[device].taints]


@pytest.mark.parametrize(("grace", "value"), [(600, "600s"), (None, "forever"), (30 * 86400, "2592000s")])
def test_a_grace_is_a_taint_that_keeps_nobody_away(grace: int | None, value: str) -> None:
    made = plan(node(gpu(7), gpu(8)), graced(grace), CONFIG)
    assert taints(made) == [
        ("gpunode.dev/xid", "94", "NoSchedule", SINCE),
        ("grace.gpunode.dev/xid", value, "None", SINCE),
    ]
    assert taints(made, 1) == [] and lint(made) == ()
    assert not changes(plan(node(gpu(7), gpu(8)), graced(grace), CONFIG, served(made)), served(made))
    wiped = plan(node(gpu(7), gpu(8)), graced(grace), CONFIG)
    assert wiped == made, "what the kubelet wiped comes back with its time"


def test_no_grace_is_told_where_there_is_none() -> None:
    for health in (graced(0), graced(600, effect="None"), graced(600, effect="NoExecute")):
        assert [key for key, *_ in taints(plan(node(gpu(7)), health, CONFIG))] == ["gpunode.dev/xid"]


def test_the_time_of_a_grace_is_that_of_its_fault() -> None:
    """Also where another fault with the same grace takes its place, and where the state was lost."""
    first = served(plan(node(gpu(7)), graced(600), CONFIG))
    later = "2026-01-02T04:00:00Z"
    other = plan(node(gpu(7)), graced(600, "95", later), CONFIG, first)
    assert {time for *_, time in taints(other)} == {later}
    same = plan(node(gpu(7)), graced(600, "94", later), CONFIG, first)
    assert {time for *_, time in taints(same)} == {SINCE}
    longer = plan(node(gpu(7)), graced(900), CONFIG, first)
    assert taints(longer)[1] == ("grace.gpunode.dev/xid", "900s", "None", SINCE), (
        "a new policy counts from the fault on"
    )


@pytest.mark.parametrize("managed", [False, True])
def test_everything_at_once_is_not_more_taints_than_a_device_may_have(managed: bool) -> None:
    """A vanished, held partition that has a fault of its own in every dimension, as its GPU has."""
    name = "gpu-0000-07-00-0-mig-1g-10gb-0"
    findings = [Finding(d, Level.UNHEALTHY, "x", Action.INSPECT, "broken", SINCE, grace=600) for d in Dimension]
    milder = [replace(f, effect="None", grace=0) for f in findings]
    health = NodeHealth({
        name: DeviceHealth(name, tuple(findings)),
        "gpu-0000-07-00-0": DeviceHealth("gpu-0000-07-00-0", tuple(milder)),
    })  # fmt: skip
    (whole,) = served(plan(node(gpu(7)), NodeHealth(), CONFIG))
    (device,) = whole.spec.devices
    vanished = msgspec.structs.replace(device, name=name)
    before = (msgspec.structs.replace(whole, spec=msgspec.structs.replace(whole.spec, devices=(vanished,))),)
    config = replace(CONFIG, managed_taint=managed)
    made = plan(node(), health, config, before, in_use=frozenset({name}), held=frozenset({name}))
    assert lint(made) == ()
    keys = [key for key, *_ in taints(made)]
    assert len(keys) == len(set(keys)) == 15 + managed
    assert {f"{prefix}gpunode.dev/{d}" for d in Dimension for prefix in ("", "grace.")} < set(keys)
    assert "gpunode.dev/held" in keys and "gpunode.dev/retained" not in keys
    fewer = NodeHealth({name: DeviceHealth(name, tuple(findings[:6]))})
    made = plan(node(), fewer, config, before, in_use=frozenset({name}), held=frozenset({name}))
    assert "gpunode.dev/retained" in [key for key, *_ in taints(made)] and lint(made) == ()


def test_of_a_partitions_and_its_gpus_faults_the_more_urgent_one_is_told() -> None:
    name = "gpu-0000-07-00-0-mig-1g-10gb-0"
    (whole,) = served(plan(node(gpu(7)), NodeHealth(), CONFIG))
    (device,) = whole.spec.devices
    part = msgspec.structs.replace(device, name=name)
    before = (msgspec.structs.replace(whole, spec=msgspec.structs.replace(whole.spec, devices=(part,))),)
    at_once = graced(0, "79", "2026-01-02T04:00:00Z").devices
    mild = {name: graced(None).of("gpu-0000-07-00-0")}
    made = plan(node(), NodeHealth({**at_once, **mild}), CONFIG, before, in_use=frozenset({name}))
    assert taints(made)[0][:2] == ("gpunode.dev/xid", "79")
    assert not any(key.startswith("grace.") for key, *_ in taints(made))


def test_a_taint_rewrites_one_slice_and_keeps_the_generation() -> None:
    inventory = node(*(gpu(bus) for bus in range(1, 101)))
    first = served(plan(inventory, NodeHealth(), CONFIG))
    assert [len(s.spec.devices) for s in first] == [64, 36]
    second = plan(inventory, sick("gpu-0000-60-00-0"), CONFIG, first)
    todo = changes(second, first)
    assert ([s.metadata.name for s in todo.update], todo.create, todo.delete) == (["node-1-gpu.gpunode.dev-1"], (), ())
    assert {s.spec.pool.generation for s in second} == {1}


def test_several_writes_need_a_new_generation() -> None:
    first = served(plan(node(*(gpu(bus) for bus in range(1, 101))), NodeHealth(), CONFIG))
    smaller = plan(node(*(gpu(bus) for bus in range(2, 101))), NodeHealth(), CONFIG, first)
    assert {s.spec.pool.generation for s in smaller} == {2}
    restored = plan(node(*(gpu(bus) for bus in range(1, 101))), NodeHealth(), CONFIG, first[:1])
    assert {s.spec.pool.generation for s in restored} == {1}, "one slice missing is one write"
    assert [s.metadata.name for s in changes(restored, first[:1]).create] == ["node-1-gpu.gpunode.dev-1"]


def test_others_slices_are_none_of_our_business() -> None:
    foreign = plan(node(gpu(7)), NodeHealth(), SliceConfig("other.example.com", "node-1"))
    (only,) = plan(node(), NodeHealth(), CONFIG, foreign, in_use=frozenset({"gpu-0000-07-00-0"}))
    assert only.spec.devices == ()


def test_a_vanished_device_stays_while_allocated_or_known_as_lost() -> None:
    before = served(plan(node(gpu(7), gpu(8)), NodeHealth(), CONFIG))
    gone = node(gpu(8))
    assert [d.name for d in plan(gone, NodeHealth(), CONFIG, before)[0].spec.devices] == ["gpu-0000-08-00-0"]
    kept = plan(gone, NodeHealth(), CONFIG, before, in_use=frozenset({"gpu-0000-07-00-0", "gpu-0000-99-00-0"}))
    assert [(d.name, [t.key for t in d.taints]) for d in kept[0].spec.devices] == [
        ("gpu-0000-07-00-0", ["gpunode.dev/retained"]),
        ("gpu-0000-08-00-0", []),
    ]
    assert kept[0].spec.devices[0].attributes == before[0].spec.devices[0].attributes
    lost = plan(gone, sick("gpu-0000-07-00-0", Dimension.PRESENCE, "lost"), CONFIG, before)
    assert [(d.name, len(d.taints)) for d in lost[0].spec.devices] == [("gpu-0000-07-00-0", 2), ("gpu-0000-08-00-0", 0)]


def test_names_fit_and_stay_apart() -> None:
    long = [replace(CONFIG, node="n" * 252 + end) for end in "ab"]
    names = [slice_name(c, "10") for c in long]
    assert len({*names}) == 2
    assert max(map(len, names)) <= 253
    assert all(lint(plan(replace(node(), node=c.node), NodeHealth(), c)) == () for c in long)


def test_modes_for_all_and_for_single_gpus() -> None:
    assert parse_modes([]) == ("static", {})
    assert parse_modes(["shared", "gpu-0000-07-00-0=dynamic", "none"]) == ("none", {"gpu-0000-07-00-0": "dynamic"})
    for bad in ("", "mps", "gpu-0000-07-00-0=", "gpu0=dynamic", "=static"):
        with pytest.raises(ValueError, match="is not MODE or DEVICE=MODE"):
            parse_modes([bad])


def test_one_gpu_may_have_a_mode_of_its_own() -> None:
    config = replace(CONFIG, modes={"gpu-0000-08-00-0": "shared"})
    (only,) = plan(node(gpu(7), gpu(8)), NodeHealth(), config)
    assert [d.allow_multiple_allocations for d in only.spec.devices] == [False, True]


class TestNvlinkDomain:
    """Design D7."""

    def test_fabric_names_it_across_nodes(self) -> None:
        up = Fabric("completed", "00000000-1111-4222-8333-444444444444", 4026)
        assert set(nvlink_domains(node(gpu(7, fabric=up))).values()) == {"00000000-1111-4222-8333-444444444444.4026"}

    def test_all_zero_fabric_uuid_is_this_node(self) -> None:
        a, b = gpu(7, fabric=Fabric("completed")), gpu(8, fabric=Fabric("completed"))
        linked = [replace(a, nvlink_peers=frozenset({b.uuid})), replace(b, nvlink_peers=frozenset({a.uuid}))]
        assert set(nvlink_domains(node(*linked)).values()) == {"n-000000070000"}

    def test_pairs_are_domains_of_their_own_and_so_is_an_unlinked_gpu(self) -> None:
        a, b, c = gpu(1), gpu(2), gpu(3)
        a = replace(a, nvlink_peers=frozenset({b.uuid}))
        found = nvlink_domains(node(a, b, c))
        assert found == {a.uuid: "n-000000010000", b.uuid: "n-000000010000", c.uuid: "n-000000030000"}

    @pytest.mark.parametrize("state", ["notStarted", "inProgress"])
    def test_no_domain_while_the_fabric_comes_up(self, state: str) -> None:
        inventory = node(gpu(7, fabric=Fabric(state)))
        assert nvlink_domains(inventory) == {}
        assert "nvlinkDomain" not in plan(inventory, NodeHealth(), CONFIG)[0].spec.devices[0].attributes


FOUND = st.lists(
    st.builds(
        Finding,
        st.sampled_from([Dimension.XID, Dimension.ECC]),
        st.sampled_from([Level.DEGRADED, Level.UNHEALTHY]),
        st.sampled_from(["1", "2", "3", "4"]),
        st.just(Action.INSPECT),
        st.just("text"),
        st.sampled_from(["2026-11-29T12:00:00Z", "2026-11-29T12:00:10Z", "2026-11-29T12:01:00Z"]),
    ),
    max_size=5,
    unique_by=lambda finding: (finding.dimension, finding.code),
)
POLICIES = st.builds(
    Policy,
    effects=st.dictionaries(
        st.sampled_from(["xid/1", "xid/2", "xid", "ecc/3", "unhealthy", "degraded"]),
        st.sampled_from(["None", "NoSchedule", "NoExecute"]),
    ),
    gang_grace_s=st.dictionaries(
        st.sampled_from(["xid/1", "xid/3", "xid", "ecc/3", "unhealthy", "degraded"]),
        st.sampled_from([0, 20, 600, "forever"]),
    ),
)


def _leave(effect: str, since: str, grace: int | None) -> datetime | None:
    """When a gang has to go for one fault; None: never."""
    began = datetime.fromisoformat(since)
    if effect == "None" or grace is None:
        return None
    return began + timedelta(seconds=grace) if effect == "NoSchedule" and grace else datetime.min.replace(tzinfo=UTC)


def _told_to_leave(found: tuple[DeviceTaint, ...]) -> list[datetime]:
    graces = {t.key.partition("/")[2]: parse_grace(t.value) for t in found if t.key.startswith("grace.")}
    harmful = [t for t in found if not t.key.startswith("grace.")]
    ends = [_leave(t.effect, t.time_added or "", graces.get(t.key.partition("/")[2], 0)) for t in harmful]
    return [end for end in ends if end is not None]


@given(own=FOUND, of_gpu=FOUND, other=FOUND, policies=st.lists(POLICIES, min_size=1, max_size=3))
def test_taints_are_as_hard_as_the_hardest_fault_and_never_those_of_another(
    own: list[Finding], of_gpu: list[Finding], other: list[Finding], policies: list[Policy]
) -> None:
    """Whatever policies follow each other over restarts; the level is that of the worst fault besides."""
    partition, a, b = "gpu-0000-07-00-0-mig-1g-10gb-0", "gpu-0000-07-00-0", "gpu-0000-0f-00-0"
    saved = HealthState(
        devices={
            name: DeviceState(entries={f"{f.dimension}/{f.code}": Entry(f, 0.0) for f in found})
            for name, found in {partition: own, a: of_gpu, b: other}.items()
        }
    )
    mig = MigSlice("MIG-1", "1g.10gb", 0, 1, 1, 0, 10 << 30)
    before: dict[tuple[str, str, str, str], str | None] = {}
    slices: tuple[ResourceSlice, ...] = ()
    for policy in policies:
        health = HealthMachine(policy=policy).project(saved, DeviceMap())
        hardware = node(replace(gpu(0x07), mig_enabled=True, mig=(mig,)), gpu(0x0F))
        slices = plan(hardware, health, CONFIG, served(slices))
        known: dict[tuple[str, str, str, str], str | None] = {}
        for device in (d for s in slices for d in s.spec.devices):
            faults = {partition: [*own, *of_gpu], a: of_gpu, b: other}[device.name]
            about = [(f, (f.dimension, f.code, f.level, "host" if f.dimension == "xid" else "")) for f in faults]
            effects = [policy.effect(*key) for _, key in about]
            tainted = [t for t in device.taints if not t.key.startswith("grace.")]
            assert {t.key for t in tainted} == {f"gpunode.dev/{f.dimension}" for f in faults}
            assert {t.effect for t in tainted} <= set(effects)
            assert max((RANK[t.effect] for t in tainted), default=0) == max((RANK[e] for e in effects), default=0)
            ends = [_leave(policy.effect(*key), f.since, policy.gang_grace(*key)) for f, key in about]
            first = min((end for end in ends if end is not None), default=None)
            assert min(_told_to_leave(device.taints), default=None) == first
            assert health.of(device.name).level == max((f.level for f in faults), key=str, default=Level.HEALTHY)
            known |= {(device.name, t.key, t.value, t.effect): t.time_added for t in device.taints}
        assert all(
            known[taint] == since for taint, since in before.items() if taint in known and "grace" not in taint[1]
        )
        before = known


RANK = {"None": 0, "NoSchedule": 1, "NoExecute": 2}
