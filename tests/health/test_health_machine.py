"""The state machine: what is raised, how far it reaches, and what is left alone."""

from dataclasses import replace

import pytest
from health_node import GOOD_A, GPU_A, GPU_B, MAP, NONE_A, PART_1, PART_2, SWITCH, A, B, Node, xid
from hypothesis import given
from hypothesis import strategies as st

from gpunode.health.catalogue import builtin_catalogue
from gpunode.health.devices import DeviceMap, KnownGpu, Partition, device_map
from gpunode.health.machine import HealthMachine
from gpunode.health.policy import Policy
from gpunode.health.signals import (
    FallenOffBus,
    GpuLost,
    GpuReset,
    PrepareResult,
    RecoveryActionChanged,
    Signal,
    SxidSignal,
    XidSignal,
)
from gpunode.health.state import HealthState, Instant
from gpunode.model.hardware import Gpu, Inventory, Link, MigSlice, PciAddress, device_name
from gpunode.model.health import Dimension, GpuSample, Level
from gpunode.model.health import RecoveryAction as Recovery


@pytest.mark.parametrize("code", [*range(1, 144), 151, *range(155, 177)])
def test_every_code_has_the_effect_of_its_action(code: int) -> None:
    node, entry = Node(), builtin_catalogue().of(code)
    node.feed(xid(code))
    assert node.level() is entry.level
    message = node.log[0].message
    assert message.startswith(f"XID {code} ({entry.meaning})") and len(message) <= 1024
    if entry.level is not Level.HEALTHY:
        assert node.health.of(GPU_A).findings[0].action is entry.action


def test_the_sentence_of_a_lost_gpu() -> None:
    node = Node()
    node.feed(xid(79))
    assert node.health.of(GPU_A).message == (
        "XID 79 (GPU has fallen off the bus): restart the host, then check the board; no new work is placed here"
    )


@pytest.mark.parametrize(
    ("fields", "about"),
    [
        ({}, ""),
        ({"pid": 42, "process": "python3"}, ": in python3 (pid 42)"),
        ({"pid": 42}, ": in pid 42"),
        ({"previous": 31}, ": after XID 31"),
        ({"previous": 31, "pid": 42, "process": "a\n\x1b[1mb"}, ": after XID 31, in a ?[1mb (pid 42)"),
        ({"pid": 1, "process": "x" * 5000}, f": in {'x' * 64} (pid 1)"),
    ],
)
def test_the_sentence_names_the_program_and_the_error_before(fields: dict[str, object], about: str) -> None:
    node = Node()
    node.feed(xid(45, **fields))
    meaning = builtin_catalogue().of(45).meaning
    assert node.log[0].message == f"XID 45 ({meaning}{about}): nothing to do; the GPU stays in use"


def test_a_harmless_code_after_a_fault_changes_nothing() -> None:
    node = Node()
    before = node.feed(xid(79))
    assert node.feed(xid(13), xid(43), xid(94)).of(GPU_A) == before.of(GPU_A)


def test_a_fault_reaches_only_its_scope() -> None:
    node = Node()
    node.feed(xid(95, gi=1, ci=0))
    assert [node.level(d) for d in (GPU_A, PART_1, PART_2, GPU_B)] == [
        Level.HEALTHY,
        Level.UNHEALTHY,
        Level.HEALTHY,
        Level.HEALTHY,
    ]
    node = Node()
    node.feed(xid(95))
    assert [node.level(d) for d in (GPU_A, PART_1, PART_2, GPU_B)] == [Level.UNHEALTHY] * 3 + [Level.HEALTHY]


def test_a_gpu_off_the_bus_takes_all_its_partitions_even_if_one_is_named() -> None:
    node = Node()
    node.feed(xid(79, gi=1))
    assert node.level(PART_2) is Level.UNHEALTHY


def test_partition_gets_the_worse_of_its_own_and_its_gpus() -> None:
    node = Node()
    node.feed(xid(54))
    node.feed(xid(95, gi=1))
    assert [f.code for f in node.health.of(PART_1).findings] == ["95"]
    assert [f.code for f in node.health.of(PART_2).findings] == ["54"]


def test_a_signal_for_a_gpu_that_discovery_lost_still_has_a_device() -> None:
    node = Node()
    gone = PciAddress(0, 0x99, 0)
    node.feed(FallenOffBus(gone))
    assert node.level(device_name(gone)) is Level.UNHEALTHY


def test_a_demand_during_the_hold_down_starts_it_again() -> None:
    node = Node(Policy(hold_down_s=30))
    node.feed(xid(95))
    node.feed(NONE_A)
    node.feed(RecoveryActionChanged(A, Recovery.NONE, Recovery.GPU_RESET), after=20)
    node.feed(NONE_A, after=1)
    node.feed(after=29)
    assert node.level() is Level.UNHEALTHY
    node.feed(after=1)
    assert node.level() is Level.HEALTHY


def test_a_partition_that_does_not_exist_yet_has_its_gpus_faults() -> None:
    node = Node()
    node.feed(xid(79))
    assert node.level(f"{GPU_A}-mig-7g-80gb-0") is Level.UNHEALTHY
    assert node.level(f"{GPU_B}-mig-7g-80gb-0") is Level.HEALTHY


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_nvml_and_kernel_log_tell_of_one_event(order: tuple[int, int]) -> None:
    node, both = Node(), (xid(79), xid(79, text=""))
    for which in order:
        node.feed(both[which], after=0.5)
    assert node.changes() == [("79", "raised")]
    assert node.state.devices[GPU_A].entries["xid/79"].count == 1
    for which in order:
        node.feed(both[which], after=100)
    assert node.state.devices[GPU_A].entries["xid/79"].count == 2


def test_since_is_kept_however_often_a_fault_is_seen() -> None:
    node = Node()
    node.feed(xid(79))
    since = node.health.of(GPU_A).findings[0].since
    for _ in range(5):
        node.feed(xid(79), after=1000)
    assert node.health.of(GPU_A).findings[0].since == since
    assert since == "2023-11-14T22:15:01Z"


def test_a_storm_is_one_state() -> None:
    node = Node()
    node.feed(*[xid(45, pid=i % 3000, text=f"Ch {i:08x}") for i in range(20_000)], xid(79, B))
    node.feed(*[xid(45, pid=i % 3000, text=f"Ch {i:08x}") for i in range(20_000)])
    assert node.changes() == [("45", "noted"), ("79", "raised")]
    assert node.state.devices[GPU_A].notes["45"].count == 40_000
    assert node.level() is Level.HEALTHY


def test_a_harmless_code_is_told_again_after_a_while() -> None:
    node = Node(Policy(remind_s=60))
    for after in (1, 30, 30, 1):
        node.feed(xid(13), after=after)
    assert node.changes() == [("13", "noted"), ("13", "noted")]


@pytest.mark.parametrize(
    ("code", "texts", "raised"),
    [
        (13, ["(GPC 1, TPC 2, SM 0)"] * 3, True),
        (13, ["(GPC 1, TPC 2, SM 0)", "(GPC 1, TPC 3, SM 0)"] * 3, False),
        (31, ["MMU Fault"] * 3, True),
        (43, ["x"] * 5, False),
    ],
)
def test_repetition_by_different_programs_points_at_the_board(code: int, texts: list[str], raised: bool) -> None:
    node = Node()
    for pid, text in enumerate(texts):
        node.feed(xid(code, pid=pid, text=text))
    assert node.level() is (Level.DEGRADED if raised else Level.HEALTHY)


def test_one_program_repeating_itself_does_not() -> None:
    node = Node()
    node.feed(*[xid(31, pid=7)] * 50)
    assert node.level() is Level.HEALTHY


@pytest.mark.parametrize(
    ("change", "dimension", "level"),
    [
        ({"ecc_uncorrected": 1}, Dimension.ECC, Level.DEGRADED),
        ({"sram_threshold_exceeded": True}, Dimension.ECC, Level.UNHEALTHY),
        ({"remap_pending": True}, Dimension.REMAP, Level.DEGRADED),
        ({"retirement_pending": True}, Dimension.REMAP, Level.DEGRADED),
        ({"remap_failed": True}, Dimension.REMAP, Level.UNHEALTHY),
        ({"pages_retired": 64}, Dimension.REMAP, Level.UNHEALTHY),
        ({"fabric_state": "inProgress"}, Dimension.FABRIC, Level.DEGRADED),
        ({"fabric_faults": frozenset({"degraded-bandwidth"})}, Dimension.FABRIC, Level.DEGRADED),
        ({"fabric_faults": frozenset({"a", "route-unhealthy"})}, Dimension.FABRIC, Level.UNHEALTHY),
        ({"links_active": 17, "links_total": 18}, Dimension.LINK, Level.DEGRADED),
        ({"links_active": 0, "links_total": 18}, Dimension.LINK, Level.UNHEALTHY),
        ({"present": False}, Dimension.PRESENCE, Level.UNHEALTHY),
    ],
)
def test_what_polls_show(change: dict[str, object], dimension: Dimension, level: Level) -> None:
    good = replace(
        GOOD_A,
        sram_threshold_exceeded=False,
        retirement_pending=False,
        pages_retired=3,
        fabric_state="completed",
        links_active=18,
        links_total=18,
    )
    node = Node(Policy(hold_down_s=10))
    assert node.feed(good).of(GPU_A).level is Level.HEALTHY
    node.feed(replace(good, **change))
    assert [(f.dimension, f.level) for f in node.health.of(GPU_A).findings] == [(dimension, level)]
    assert node.level(GPU_B) is Level.HEALTHY
    node.feed(replace(good, **change), after=100)
    assert [c for _, c in node.changes()] == ["raised"]
    node.feed(good)
    assert node.level() is level
    node.feed(good, after=10)
    assert node.level() is Level.HEALTHY


def test_a_value_that_is_not_offered_any_more_ends_nothing() -> None:
    node = Node(Policy(hold_down_s=0))
    shown = replace(GOOD_A, remap_failed=True, ecc_uncorrected=1, fabric_state="completed")
    node.feed(replace(shown, fabric_faults=frozenset({"route-unhealthy"})))
    node.feed(GpuSample("GPU-a", A))
    assert len(node.feed(GpuSample("GPU-a", A), after=100).of(GPU_A).findings) == 3
    node.feed(replace(GOOD_A, fabric_state="completed"))
    assert not node.feed(replace(GOOD_A, fabric_state="completed"), after=100).of(GPU_A).findings


def test_errors_that_a_reset_cleared_while_nobody_looked_are_told() -> None:
    node = Node()
    node.feed(replace(GOOD_A, ecc_uncorrected_aggregate=4))
    node.feed(replace(GOOD_A, ecc_uncorrected=1, ecc_uncorrected_aggregate=5))
    node.feed(replace(GOOD_A, ecc_uncorrected_aggregate=5))
    assert "ecc-lifetime" not in [code for code, _ in node.changes()], "the fault itself was told"
    node.state = node.machine.rebooted(node.state, "boot-2", Instant(1_700_000_000 + node.now, 1.0)).state
    node.now = 5.0
    node.feed(replace(GOOD_A, ecc_uncorrected_aggregate=7))
    assert (node.log[-1].code, node.log[-1].change, node.log[-1].level) == ("ecc-lifetime", "noted", Level.HEALTHY)
    assert "2 uncorrected memory errors" in node.log[-1].message and "7 in the board's life" in node.log[-1].message
    node.feed(replace(GOOD_A, ecc_uncorrected_aggregate=7), after=10_000)
    assert [t.code for t in node.log].count("ecc-lifetime") == 1


def test_links_are_compared_with_equal_gpus_and_the_past() -> None:
    node = Node()
    up = GpuSample("GPU-b", B, links_active=18, links_total=18)
    node.feed(replace(up, uuid="GPU-a", pci=A, links_active=0), up)
    assert node.level() is Level.UNHEALTHY and node.level(GPU_B) is Level.HEALTHY
    bare = Node()
    bare.feed(replace(up, links_active=0), replace(up, uuid="GPU-a", pci=A, links_active=0))
    assert not bare.health.devices, "a board without bridges has no fault"


def test_bridges_may_join_only_some_gpus_and_mig_switches_links_off() -> None:
    up = GpuSample("GPU-b", B, links_active=12, links_total=12)
    down = GpuSample("GPU-a", A, links_active=0, links_total=12)
    bridged = DeviceMap(tuple(replace(gpu, switched=False) for gpu in MAP.gpus))
    mig = DeviceMap(tuple(replace(gpu, mig=True) for gpu in MAP.gpus))
    machine = HealthMachine()
    for devices, batches in ((bridged, [[up, down]]), (mig, [[up, replace(down, links_active=12)], [up, down]])):
        state = HealthState()
        for uptime, batch in enumerate(batches):
            state = machine.step(state, batch, devices, Instant(1e9, uptime)).state
        assert not machine.project(state, devices).devices


def test_nonsense_does_not_fill_the_state() -> None:
    node = Node()
    node.feed(*[xid(code) for code in range(1000, 2000)], xid(79))
    assert len(node.state.devices[GPU_A].entries) == 257
    assert node.level() is Level.UNHEALTHY
    node.feed(*[xid(79, PciAddress(domain, 7, 0)) for domain in range(1, 5000)])
    assert len(node.state.devices) == 2048


def test_throttling_and_leftovers_are_told_not_held_against_the_gpu() -> None:
    node = Node()
    node.feed(replace(GOOD_A, throttle=frozenset({"hw-thermal"}), leftover_pids=(7, 8)))
    assert node.level() is Level.HEALTHY
    assert {t.code for t in node.log} == {"throttle-hw-thermal", "leftover-processes"}


def test_switch_faults() -> None:
    node = Node()
    node.feed(SxidSignal(SWITCH, 0, 20034, True, 30))
    assert (node.level(GPU_A), node.level(GPU_B)) == (Level.HEALTHY, Level.UNHEALTHY)
    node.feed(SxidSignal(SWITCH, 0, 12020, True))
    assert node.level(GPU_A) is Level.UNHEALTHY
    node = Node()
    node.feed(SxidSignal(SWITCH, 0, 11004, False, 30))
    assert node.level(GPU_B) is Level.HEALTHY
    assert node.changes() == [("sxid-11004", "noted")]


def test_device_map_of_an_inventory() -> None:
    mig = MigSlice("MIG-1", "1g.10gb", 4, 1, 9, 0, 1 << 30)
    gpu = Gpu("GPU-a", A, 0, "H100", 1 << 36, links=(Link(0, True, "switch"),), mig=(mig,))
    devices = device_map(Inventory("node", "boot", gpus=(gpu,)))
    name = "gpu-0000-07-00-0-mig-1g-10gb-4"
    assert devices.gpus == (KnownGpu(GPU_A, "GPU-a", A, True, (Partition(name, 9, 0),), loose=True),)
    assert devices.device_at(A, 9, None) == devices.device_at(A, 9, 7) == name
    assert devices.device_at(A, 3, 0) == GPU_A
    assert devices.behind_switch(SWITCH, 3) == (GPU_A,)
    assert device_map(Inventory("n", "b", gpus=(replace(gpu, links=()),))).behind_switch(SWITCH, 3) == (GPU_A,)


SIGNALS = st.one_of(
    st.builds(
        XidSignal,
        st.sampled_from([A, B]),
        st.integers(0, 200),
        st.sampled_from([None, 1, 2, 9]),
        st.sampled_from([None, 0]),
        st.sampled_from([None, 1, 2]),
        st.just("p"),
        st.sampled_from(["", "t", "(GPC 1, TPC 1"]),
    ),
    st.builds(RecoveryActionChanged, st.sampled_from([A, B]), st.sampled_from(Recovery), st.sampled_from(Recovery)),
    st.builds(GpuReset, st.sampled_from(["GPU-a", "GPU-b", "GPU-c"]), st.booleans()),
    st.builds(FallenOffBus, st.just(A)),
    st.builds(PrepareResult, st.sampled_from([GPU_A, PART_1]), st.sampled_from(["", "error"])),
    st.builds(
        GpuSample,
        st.sampled_from(["GPU-a", "GPU-x"]),
        st.just(A),
        present=st.booleans(),
        recovery=st.sampled_from(Recovery),
        ecc_uncorrected=st.sampled_from([None, 0, 1]),
        remap_failed=st.sampled_from([None, False, True]),
    ),
)


@given(st.lists(st.tuples(st.lists(SIGNALS, max_size=5), st.floats(0, 1000)), max_size=12))
def test_whatever_happens(batches: list[tuple[list[Signal], float]]) -> None:
    """A level only falls with a "cleared" or "changed"; the log tells exactly what stands; B hears nothing of A."""
    node, heard_of_b = Node(), False
    for signals, after in batches:
        before = {(d, k) for d, s in node.state.devices.items() for k in s.entries}
        seen = len(node.log)
        node.feed(*signals, after=after)
        for t in node.log[seen:]:
            key = (t.device, f"{t.dimension}/{t.code}")
            if t.change == "raised":
                assert key not in before
                before.add(key)
            elif t.change == "cleared":
                before.remove(key)
        assert before == {(d, k) for d, s in node.state.devices.items() for k in s.entries}
        for device in node.health.devices.values():
            assert len(device.message) <= 1024 and device.message
            assert len({f.dimension for f in device.findings}) == len(device.findings)
        heard_of_b |= any(getattr(s, "pci", None) == B or getattr(s, "uuid", "") == "GPU-b" for s in signals)
        assert heard_of_b or GPU_B not in node.health.devices


def test_only_the_latest_notes_are_kept() -> None:
    node = Node()
    codes = [code for code in range(1, 177) if builtin_catalogue().of(code).level is Level.HEALTHY]
    for code in codes:
        node.feed(xid(code))
    assert list(node.state.devices[GPU_A].notes) == [str(code) for code in codes[-64:]]


def test_the_history_keeps_the_latest() -> None:
    node = Node(Policy(remind_s=0))
    for pid in range(600):
        node.feed(xid(43, pid=pid))
    assert len(node.state.history) == 500
    assert node.state.history == tuple(node.log[-500:])


def test_a_partition_that_cannot_be_made_has_its_gpus_faults_besides() -> None:
    node = Node(Policy(prepare_failures=1))
    made_in_vain = f"{GPU_A}-mig-3g-40gb-0"
    node.feed(PrepareResult(made_in_vain, "error"))
    node.feed(xid(79))
    assert [f.code for f in node.health.of(made_in_vain).findings] == ["79", "failed"]


def test_a_poll_tells_the_numbers_of_now_at_the_worst_level() -> None:
    node = Node()
    links = replace(GOOD_A, links_total=18)
    node.feed(replace(links, links_active=18))
    node.feed(replace(links, links_active=17))
    node.feed(replace(links, links_active=9, ecc_uncorrected=1))
    node.feed(replace(links, links_active=9, ecc_uncorrected=500))
    said = [f.message.partition("):")[0] for f in node.health.of(GPU_A).findings]
    assert said == [
        "ECC fault (500 uncorrected memory errors since the last reset",
        "NVLink fault (9 of 18 NVLinks are up",
    ]
    node.feed(replace(links, links_active=0))
    node.feed(replace(links, links_active=17))
    assert node.level() is Level.UNHEALTHY  # until all are up
    assert node.changes() == [("down", "raised"), ("uncorrected", "raised"), ("down", "changed")]


def test_a_flood_of_switch_errors_does_not_fill_the_state() -> None:
    """Any five digits may follow SXid, and a state of more than 16 MiB could not be read again."""
    node = Node()
    node.feed(*(SxidSignal(SWITCH, 0, code, True, None, "x" * 400) for code in range(10_000, 12_000)))
    assert len(node.state.devices[GPU_A].entries) == 256
    node.feed(xid(79), GpuLost(A, "lost"))
    assert {"xid/79", "presence/lost"} <= node.state.devices[GPU_A].entries.keys()
