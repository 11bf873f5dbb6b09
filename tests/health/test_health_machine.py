"""The state machine: what is raised, what stays, what ends, and what is left alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.health.catalogue import builtin_catalogue
from gpunode.health.devices import DeviceMap, KnownGpu, Partition, device_map
from gpunode.health.machine import HealthMachine
from gpunode.health.policy import Policy
from gpunode.health.signals import (
    DriverReloaded,
    FallenOffBus,
    GpuLost,
    GpuReset,
    OperatorClear,
    PrepareResult,
    RecoveryActionChanged,
    Signal,
    SxidSignal,
    XidSignal,
)
from gpunode.health.state import HealthState, Instant, Transition
from gpunode.model.hardware import Gpu, Inventory, Link, MigSlice, PciAddress, device_name
from gpunode.model.health import Action, Dimension, GpuSample, Level, NodeHealth
from gpunode.model.health import RecoveryAction as Recovery

A, B = PciAddress(0, 7, 0), PciAddress(0, 0x0F, 0)
GPU_A, GPU_B = device_name(A), device_name(B)
PART_1, PART_2 = f"{GPU_A}-mig-1", f"{GPU_A}-mig-2"
SWITCH = PciAddress(0, 0xC4, 0)
MAP = DeviceMap(
    (
        KnownGpu(GPU_A, "GPU-a", A, True, (Partition(PART_1, 1, 0), Partition(PART_2, 2, 0))),
        KnownGpu(GPU_B, "GPU-b", B, True),
    ),
    switch_ports={(SWITCH, 30): GPU_B},
)
GOOD_A = GpuSample("GPU-a", A, recovery=Recovery.NONE, ecc_uncorrected=0, remap_pending=False, remap_failed=False)
NONE_A = RecoveryActionChanged(A, Recovery.GPU_RESET, Recovery.NONE)


class Node:
    """A state with a clock: keeps tests short."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.machine = HealthMachine(policy=policy or Policy())
        self.state, self.now = HealthState(boot_id="boot-1"), 100.0
        self.log: list[Transition] = []

    def feed(self, *signals: Signal, after: float = 1.0) -> NodeHealth:
        self.now += after
        step = self.machine.step(self.state, signals, MAP, Instant(1_700_000_000 + self.now, self.now))
        self.state = step.state
        self.log += step.transitions
        return self.health

    @property
    def health(self) -> NodeHealth:
        return self.machine.project(self.state, MAP)

    def level(self, device: str = GPU_A) -> Level:
        return self.health.of(device).level

    def changes(self) -> list[tuple[str, str]]:
        return [(t.code, t.change) for t in self.log]


def xid(code: int, pci: PciAddress = A, **fields: object) -> XidSignal:
    return replace(XidSignal(pci, code, text="text"), **fields)


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


def test_a_harmless_code_after_a_fault_changes_nothing() -> None:
    node = Node()
    before = node.feed(xid(79))
    assert node.feed(xid(13), xid(43), xid(94)).of(GPU_A) == before.of(GPU_A)


def test_of_two_faults_the_other_stays_when_one_ends() -> None:
    node = Node(Policy(hold_down_s=10))
    node.feed(xid(119))
    node.feed(replace(GOOD_A, remap_failed=True))
    node.feed(GpuReset("GPU-a", True), replace(GOOD_A, remap_failed=True))
    health = node.feed(replace(GOOD_A, remap_failed=True), after=11).of(GPU_A)
    assert [(f.dimension, f.code) for f in health.findings] == [(Dimension.REMAP, "failed")]
    node.feed(xid(95), xid(120))
    node.feed(NONE_A)
    assert {k for k in node.state.devices[GPU_A].entries} == {"remap/failed", "xid/95", "xid/120"}


def test_two_codes_of_one_dimension_end_on_their_own() -> None:
    node = Node(Policy(hold_down_s=10))
    node.feed(xid(119))
    node.feed(xid(95))
    assert node.health.of(GPU_A).findings[0].code == "119"
    node.feed(RecoveryActionChanged(A, Recovery.NONE, Recovery.NONE))
    assert node.feed(after=11).of(GPU_A).findings[0].code == "119"
    assert node.changes() == [("119", "raised"), ("95", "raised"), ("95", "cleared")]


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


@pytest.mark.parametrize(
    ("verdict", "level", "action"),
    [
        (Recovery.GPU_RESET, Level.UNHEALTHY, Action.RESET_GPU),
        (Recovery.NODE_REBOOT, Level.UNHEALTHY, Action.RESTART_HOST),
        (Recovery.DRAIN_P2P, Level.UNHEALTHY, Action.DRAIN),
        (Recovery.DRAIN_AND_RESET, Level.UNHEALTHY, Action.RESET_GPU),
        (Recovery.RECOVER_IMEX, Level.DEGRADED, Action.INSPECT),
        (Recovery.BUS_RESET, Level.UNHEALTHY, Action.RESTART_HOST),
        (Recovery.SYSTEM_REBOOT, Level.UNHEALTHY, Action.RESTART_HOST),
        (Recovery.NONE, Level.HEALTHY, None),
        (Recovery.UNKNOWN, Level.HEALTHY, None),
    ],
)
def test_the_drivers_verdict(verdict: Recovery, level: Level, action: Action | None) -> None:
    node = Node()
    node.feed(RecoveryActionChanged(A, Recovery.NONE, verdict))
    assert node.level() is level
    assert [f.action for f in node.health.of(GPU_A).findings] == ([action] if action else [])


def test_a_new_verdict_replaces_the_old_one() -> None:
    node = Node()
    node.feed(RecoveryActionChanged(A, Recovery.NONE, Recovery.NODE_REBOOT))
    node.feed(RecoveryActionChanged(A, Recovery.NODE_REBOOT, Recovery.GPU_RESET))
    assert node.health.of(GPU_A).findings[0].action is Action.RESET_GPU
    assert node.changes() == [("154", "raised"), ("154", "changed")]


def test_verdict_none_ends_what_it_speaks_about_after_the_hold_down() -> None:
    node = Node(Policy(hold_down_s=30))
    node.feed(xid(95))
    node.feed(RecoveryActionChanged(A, Recovery.NONE, Recovery.GPU_RESET))
    node.feed(GOOD_A)
    assert node.level() is Level.UNHEALTHY
    node.feed(GOOD_A, after=29)
    assert node.level() is Level.UNHEALTHY
    node.feed(GOOD_A, after=1)
    assert node.level() is Level.HEALTHY
    assert node.log[-1].message.endswith(
        " is over: the driver asks for nothing any more, and nothing spoke against it for 30 s"
    )


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


def test_a_verdict_does_not_end_codes_it_does_not_speak_about() -> None:
    node = Node(Policy(hold_down_s=0))
    node.feed(xid(119))
    node.feed(RecoveryActionChanged(A, Recovery.NONE, Recovery.NONE))
    node.feed(after=1000)
    assert node.level() is Level.UNHEALTHY
    node.feed(RecoveryActionChanged(A, Recovery.NONE, Recovery.GPU_RESET))
    node.feed(NONE_A)
    assert node.feed(after=1).of(GPU_A).level is Level.HEALTHY, "the demand was met, so the GPU was reset"


def test_reset() -> None:
    node = Node(Policy(hold_down_s=10))
    node.feed(xid(119), xid(79), GpuLost(A, "lost"), xid(119, B), xid(95, gi=1), replace(GOOD_A, remap_failed=True))
    node.feed(GpuReset("GPU-a", True))
    node.feed(replace(GOOD_A, remap_failed=True), after=10)
    assert [f.code for f in node.health.of(PART_1).findings] == ["failed"], "a reset does not mend memory"
    assert node.level(GPU_B) is Level.UNHEALTHY


def test_a_lost_gpu_that_was_reset_has_to_answer() -> None:
    node = Node(Policy(hold_down_s=10))
    node.feed(GOOD_A)
    node.feed(xid(79), GpuSample("GPU-a", A, present=False))
    node.feed(GpuReset("GPU-a", True))
    node.feed(GpuSample("GPU-a", A, present=False), after=10)
    assert node.level() is Level.UNHEALTHY
    node.feed(GOOD_A)
    node.feed(GOOD_A, after=10)
    assert node.level() is Level.HEALTHY


@pytest.mark.parametrize("end", [GpuReset("GPU-a", True), NONE_A, DriverReloaded("580.1")])
def test_what_ends_a_gpus_faults_ends_those_of_its_partitions(end: Signal) -> None:
    node = Node(Policy(hold_down_s=10))
    node.feed(xid(95, gi=1), xid(95, gi=2, ci=0), xid(95, B))
    node.feed(end)
    node.feed(after=10)
    assert (node.level(PART_1), node.level(PART_2)) == (Level.HEALTHY, Level.HEALTHY)
    assert node.level(GPU_B) is (Level.HEALTHY if isinstance(end, DriverReloaded) else Level.UNHEALTHY)


def test_a_partition_that_does_not_exist_yet_has_its_gpus_faults() -> None:
    node = Node()
    node.feed(xid(79))
    assert node.level(f"{GPU_A}-mig-7g-80gb-0") is Level.UNHEALTHY
    assert node.level(f"{GPU_B}-mig-7g-80gb-0") is Level.HEALTHY


def test_failed_reset() -> None:
    node = Node()
    node.feed(GpuReset("GPU-a", False), GpuReset("GPU-unknown", False))
    assert node.health.of(GPU_A).findings[0].action is Action.RESTART_HOST
    assert list(node.health.devices) == [GPU_A, PART_1, PART_2]


def test_driver_reload_ends_what_a_reset_ends() -> None:
    node = Node(Policy(hold_down_s=10))
    node.feed(xid(119), xid(119, B), SxidSignal(SWITCH, 0, 20034, True), replace(GOOD_A, remap_failed=True))
    node.feed(DriverReloaded("580.95.05"), replace(GOOD_A, remap_failed=True))
    node.feed(after=10)
    assert {k for d in node.state.devices.values() for k in d.entries} == {"remap/failed"}


def test_uncorrected_errors_back_at_zero_mean_a_reset() -> None:
    node = Node(Policy(hold_down_s=10))
    node.feed(xid(48), replace(GOOD_A, ecc_uncorrected=2, recovery=Recovery.UNKNOWN))
    node.feed(replace(GOOD_A, recovery=Recovery.UNKNOWN))
    node.feed(replace(GOOD_A, recovery=Recovery.UNKNOWN), after=10)
    assert node.level() is Level.HEALTHY


def test_a_gpu_that_does_not_answer_does_not_come_back() -> None:
    node = Node(Policy(hold_down_s=10))
    node.feed(GOOD_A)
    node.feed(xid(119))
    node.feed(GpuReset("GPU-a", True), replace(GOOD_A, error="NVML: unknown error"))
    node.feed(after=100)
    assert node.level() is Level.UNHEALTHY
    node.feed(GOOD_A)
    assert node.level() is Level.HEALTHY


def test_lost_and_found() -> None:
    node = Node(Policy(hold_down_s=10))
    node.feed(GOOD_A)
    node.feed(GpuLost(A, "GPU is lost"))
    assert [(f.dimension, f.code) for f in node.health.of(PART_1).findings] == [(Dimension.PRESENCE, "lost")]
    assert node.level(GPU_B) is Level.HEALTHY
    node.feed(GpuSample("GPU-a", A, present=False, error="GPU is lost"), after=60)
    assert node.level() is Level.UNHEALTHY
    node.feed(GOOD_A)
    node.feed(GOOD_A, after=10)
    assert node.level() is Level.HEALTHY


def test_a_poll_that_fails_once_says_nothing_about_the_gpu() -> None:
    failed = GpuSample("GPU-a", A, present=False, error="Driver Not Loaded")
    node = Node()
    node.feed(GOOD_A)
    node.feed(failed)
    node.feed(GOOD_A)
    node.feed(failed)
    assert node.level() is Level.HEALTHY
    node.feed(failed)
    assert node.level() is Level.UNHEALTHY


def test_a_gpu_that_discovery_no_longer_finds_is_lost_until_it_is_back() -> None:
    node = Node(Policy(hold_down_s=10))
    node.feed(GOOD_A, GpuSample("GPU-b", B))

    def feed(devices: DeviceMap, *signals: Signal) -> None:
        node.now += 10
        node.state = node.machine.step(node.state, signals, devices, Instant(1e9, node.now)).state

    feed(DeviceMap())
    assert node.level(GPU_B) is Level.HEALTHY, "no GPU at all: the driver is gone"
    feed(DeviceMap(MAP.gpus[:1]), GOOD_A)
    assert (node.level(GPU_A), node.level(GPU_B)) == (Level.HEALTHY, Level.UNHEALTHY)
    feed(MAP, GpuSample("GPU-b", B))
    feed(MAP, GpuSample("GPU-b", B))
    assert node.level(GPU_B) is Level.HEALTHY


def test_a_gpu_taken_out_for_good_is_forgotten_by_the_operators_word() -> None:
    node = Node()
    node.feed(GpuSample("GPU-b", B, remap_failed=True))
    step = node.machine.step(node.state, [OperatorClear(GPU_B, "admin")], DeviceMap(MAP.gpus[:1]), Instant(1e9, 200))
    assert GPU_B not in step.state.devices


def test_a_replaced_board_starts_clean() -> None:
    node = Node()
    node.feed(GOOD_A)
    node.feed(xid(79), replace(GOOD_A, remap_failed=True))
    node.feed(replace(GOOD_A, uuid="GPU-new"))
    assert node.level() is Level.HEALTHY
    assert node.state.devices[GPU_A].uuid == "GPU-new"


def test_the_operators_word() -> None:
    node = Node()
    node.feed(xid(79), replace(GOOD_A, remap_failed=True))
    node.feed(OperatorClear(GPU_A, "admin", Dimension.XID))
    assert [f.dimension for f in node.health.of(GPU_A).findings] == [Dimension.REMAP]
    node.feed(OperatorClear(GPU_A, "admin"))
    assert node.level() is Level.HEALTHY
    assert node.log[-1].message.endswith("cleared by admin")


def test_reboot() -> None:
    node = Node()
    node.feed(xid(79), xid(119, B), replace(GOOD_A, remap_failed=True))
    same = node.machine.rebooted(node.state, "boot-1", Instant(0, 1))
    assert same.state is node.state and not same.transitions
    step = node.machine.rebooted(node.state, "boot-2", Instant(0, 5))
    health = node.machine.project(step.state, MAP)
    assert {f.code for d in health.devices.values() for f in d.findings} == {"failed"}
    assert step.state.boot_id == "boot-2"
    assert {t.change for t in step.transitions} == {"cleared"}


def test_first_boot_id_is_only_noted() -> None:
    machine = HealthMachine()
    before = machine.step(HealthState(), [xid(79)], MAP, Instant(0, 1)).state
    step = machine.rebooted(before, "boot-1", Instant(0, 2))
    assert step.state.devices == before.devices and step.state.boot_id == "boot-1"


def test_flapping_doubles_the_hold_down() -> None:
    node = Node(Policy(hold_down_s=10, hold_down_max_s=35))
    for hold in (10, 20, 35, 35):
        node.feed(xid(95))
        node.feed(NONE_A)
        node.feed(after=hold - 1)
        assert node.level() is Level.UNHEALTHY, hold
        node.feed(after=1)
        assert node.level() is Level.HEALTHY, hold
    node.feed(after=100_000)
    node.feed(xid(95))
    node.feed(NONE_A)
    node.feed(after=10)
    assert node.level() is Level.HEALTHY, "flapping is forgotten after the window"


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


def test_preparation_that_fails_again_and_again_takes_the_device_out_for_a_while() -> None:
    node = Node(Policy(prepare_failures=3, prepare_retry_s=600, hold_down_s=10))
    node.feed(PrepareResult(GPU_A, "no device node"), PrepareResult(GPU_A, "no device node"))
    node.feed(PrepareResult(GPU_A))
    node.feed(*[PrepareResult(GPU_A, "no device node")] * 2)
    assert node.level() is Level.HEALTHY
    node.feed(PrepareResult(GPU_A, "no device node\nsecond line"))
    assert node.level() is Level.UNHEALTHY
    assert "no device node second line" in node.health.of(GPU_A).message
    node.feed(GOOD_A, after=60)
    node.feed(GOOD_A, after=60)
    assert node.level() is Level.UNHEALTHY
    node.feed(GOOD_A, after=500)
    node.feed(GOOD_A, after=10)
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
    node.feed(replace(GOOD_A, remap_failed=True, ecc_uncorrected=1))
    node.feed(GpuSample("GPU-a", A))
    assert len(node.feed(GpuSample("GPU-a", A), after=100).of(GPU_A).findings) == 2


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


def test_a_reset_between_two_equal_faults_of_one_batch_stays_between_them() -> None:
    node = Node(Policy(hold_down_s=10))
    node.feed(xid(95), GpuReset("GPU-a", True), xid(95))
    node.feed(after=100)
    assert node.level() is Level.UNHEALTHY
    assert node.state.devices[GPU_A].entries["xid/95"].count == 2


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


def test_the_sentence_of_recovery_survives_colons_in_the_reason() -> None:
    node = Node()
    node.feed(GpuLost(A, "NVML: GPU is lost"))
    node.feed(OperatorClear(GPU_A, "admin"))
    assert node.log[-1].message == (
        "GPU lost (the driver cannot reach it: NVML: GPU is lost) is over: cleared by admin"
    )


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


def test_power_smoothing_engaged_again_ends_its_disengagement() -> None:
    node = Node()
    node.feed(xid(163))
    assert node.level() is Level.DEGRADED
    node.feed(xid(162))
    assert node.level() is Level.HEALTHY


def test_a_wrong_clock_changes_only_texts() -> None:
    machine = HealthMachine(policy=Policy(hold_down_s=10))
    state = HealthState()
    for wall, uptime, signals in ((1e18, 1, [xid(95)]), (-1e18, 2, [NONE_A]), (0, 13, [])):
        step = machine.step(state, signals, MAP, Instant(wall, uptime))
        state = step.state
    assert not machine.project(state, MAP).devices


def test_uptime_that_goes_back_restarts_the_hold_down() -> None:
    node = Node(Policy(hold_down_s=10))
    node.feed(xid(95))
    node.feed(NONE_A)
    node.feed(after=-50)
    node.feed(after=9)
    assert node.level() is Level.UNHEALTHY
    node.feed(after=1)
    assert node.level() is Level.HEALTHY


def test_device_map_of_an_inventory() -> None:
    mig = MigSlice("MIG-1", "1g.10gb", 4, 1, 9, 0, 1 << 30)
    gpu = Gpu("GPU-a", A, 0, "H100", 1 << 36, links=(Link(0, True, "switch"),), mig=(mig,))
    devices = device_map(Inventory("node", "boot", gpus=(gpu,)))
    name = "gpu-0000-07-00-0-mig-1g-10gb-4"
    assert devices.gpus == (KnownGpu(GPU_A, "GPU-a", A, True, (Partition(name, 9, 0),)),)
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
