"""The state machine: what ends a fault, what does not, and how long it takes."""

from dataclasses import replace

import pytest
from health_node import GOOD_A, GPU_A, GPU_B, MAP, NONE_A, PART_1, PART_2, SWITCH, A, B, Node, xid

from gpunode.health.devices import DeviceMap
from gpunode.health.machine import HealthMachine
from gpunode.health.policy import Policy
from gpunode.health.signals import (
    DriverReloaded,
    GpuLost,
    GpuReset,
    OperatorClear,
    PrepareResult,
    RecoveryActionChanged,
    Signal,
    SxidSignal,
)
from gpunode.health.state import HealthState, Instant
from gpunode.model.health import Action, Dimension, GpuSample, Level
from gpunode.model.health import RecoveryAction as Recovery


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


def test_a_reset_between_two_equal_faults_of_one_batch_stays_between_them() -> None:
    node = Node(Policy(hold_down_s=10))
    node.feed(xid(95), GpuReset("GPU-a", True), xid(95))
    node.feed(after=100)
    assert node.level() is Level.UNHEALTHY
    assert node.state.devices[GPU_A].entries["xid/95"].count == 2


def test_the_sentence_of_recovery_survives_colons_in_the_reason() -> None:
    node = Node()
    node.feed(GpuLost(A, "NVML: GPU is lost"))
    node.feed(OperatorClear(GPU_A, "admin"))
    assert node.log[-1].message == (
        "GPU loss (the driver cannot reach it: NVML: GPU is lost) is over: cleared by admin"
    )


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


def test_a_demand_takes_back_only_the_recovery_of_what_it_speaks_about() -> None:
    node = Node(Policy(hold_down_s=30))
    node.feed(xid(95), xid(119))
    node.feed(GpuReset("GPU-a", True))
    node.feed(RecoveryActionChanged(A, Recovery.NONE, Recovery.GPU_RESET), after=10)
    entries = node.state.devices[GPU_A].entries
    assert entries["xid/95"].recovering is None
    assert entries["xid/119"].recovering is not None
    node.feed(NONE_A, after=1)
    node.feed(after=29)
    assert set(node.state.devices[GPU_A].entries) == {"xid/95", "xid/154"}


def test_the_operators_word_does_not_count_as_flapping() -> None:
    node = Node(Policy(hold_down_s=10))
    node.feed(xid(95))
    node.feed(OperatorClear(GPU_A, "admin", Dimension.XID))
    node.feed(xid(95))
    node.feed(NONE_A)
    node.feed(after=10)
    assert node.level() is Level.HEALTHY


def test_a_preparation_that_succeeds_after_all_ends_the_fault_at_once() -> None:
    node = Node(Policy(prepare_failures=1))
    node.feed(PrepareResult(GPU_A, "error"), PrepareResult(PART_1, "error"))
    node.feed(PrepareResult(GPU_A))
    assert (node.level(), node.level(PART_1)) == (Level.HEALTHY, Level.UNHEALTHY)


def test_a_poll_of_the_moment_before_a_demand_does_not_pass_for_its_fulfilment() -> None:
    node = Node(Policy(hold_down_s=30))
    node.feed(GOOD_A, xid(119))
    node.feed(RecoveryActionChanged(A, Recovery.NONE, Recovery.GPU_RESET))
    node.feed(GOOD_A, after=0.01)
    demanding = replace(GOOD_A, recovery=Recovery.GPU_RESET)
    for _ in range(6):
        node.feed(demanding, after=10)
    node.feed(GOOD_A, after=10)
    assert set(node.state.devices[GPU_A].entries) == {"xid/119", "xid/154"}
    node.feed(GOOD_A, after=30)
    assert node.level() is Level.HEALTHY
    assert "what the driver asked for was done, and nothing spoke against it for 30 s" in node.log[-2].message


def test_a_reset_ends_the_faults_of_a_gpu_that_no_inventory_has() -> None:
    """It was lost when the agent started; the reset that brings it back is told before it is found."""
    node = Node(Policy(hold_down_s=10))
    node.feed(GOOD_A)
    node.feed(xid(119))
    without = DeviceMap(MAP.gpus[1:])
    step = node.machine.step(node.state, [GpuReset("GPU-a", True)], without, Instant(0, node.now + 1))
    node.state = step.state
    node.feed(GOOD_A, after=5)
    node.feed(GOOD_A, after=10)
    assert node.level() is Level.HEALTHY


def test_a_replaced_board_takes_the_faults_of_its_partitions_along() -> None:
    node = Node(Policy(prepare_failures=1))
    node.feed(GOOD_A)
    node.feed(xid(119, gi=1), PrepareResult(PART_2, "error"))
    assert (node.level(PART_1), node.level(PART_2)) == (Level.UNHEALTHY, Level.UNHEALTHY)
    node.feed(replace(GOOD_A, uuid="GPU-new"))
    assert node.health.devices == {}
    assert node.changes()[2:] == [("119", "cleared"), ("failed", "cleared")]


def test_a_boot_that_cannot_be_read_proves_no_reboot() -> None:
    node = Node()
    node.feed(xid(79))
    step = node.machine.rebooted(node.state, "", Instant(0, 5.0))
    assert (step.state, step.transitions) == (node.state, ())
