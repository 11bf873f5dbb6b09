"""Scanning again and again: a driver that comes late, goes and returns; GPUs lost, found, replaced; health polls."""

from ctypes import byref
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from gpunode.hardware.board import load_board
from gpunode.hardware.fake import FakeMachine, Recover, Xid
from gpunode.hardware.fake.faults import DriverGone, DriverReload, FabricChange, LinkDown, RecoveryChange, RemapPending
from gpunode.hardware.rescan import Scanner, merge
from gpunode.hardware.sample import sample, sample_all
from gpunode.model.hardware import Inventory
from gpunode.model.health import GpuSample, RecoveryAction
from gpunode.slices.describe import nvlink_domains

FIRST = "0000:1b:00.0"


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine.create(load_board("hgx-h100"), "node-1", tmp_path)


@pytest.fixture
def scanner(machine: FakeMachine) -> Scanner:
    return Scanner(machine.nvml, machine.roots, "node-1")


def known(scanner: Scanner) -> Inventory:
    inventory = scanner.scan().inventory
    assert inventory is not None
    return inventory


def test_a_driver_that_is_not_there_yet_is_told_and_then_found(machine: FakeMachine, scanner: Scanner) -> None:
    machine.inject(DriverGone())
    for _ in range(2):
        early = scanner.scan()
        assert early.inventory is None
        assert "is the NVIDIA driver loaded?" in early.error
    machine.inject(DriverReload())
    assert (len(known(scanner).gpus), scanner.scan().error) == (8, "")


def test_a_driver_that_the_library_does_not_fit_is_told_as_such(
    machine: FakeMachine, scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(scanner)
    machine.inject(DriverGone())
    assert not scanner.scan().mismatch

    def init() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(machine.nvml, "nvmlInit", init, raising=False)
    scan = scanner.scan()
    assert scan.mismatch and "reload it or reboot the node" in scan.error


def test_driver_reload_refreshes_the_version_and_keeps_the_gpus(machine: FakeMachine, scanner: Scanner) -> None:
    before = known(scanner)
    machine.inject(DriverGone())
    away = scanner.scan()
    assert (away.inventory, len(away.lost), away.error != "") == (before, 8, True)
    machine.inject(DriverReload(version="590.44.01"))
    back = scanner.scan()
    assert back.inventory == replace(before, driver_version="590.44.01")
    assert (back.lost, back.error) == ((), "")


def test_reload_between_two_scans_goes_unnoticed_but_for_the_version(machine: FakeMachine, scanner: Scanner) -> None:
    known(scanner)
    machine.inject(DriverGone())
    machine.inject(DriverReload(version="590.44.01"))
    assert (known(scanner).driver_version, len(known(scanner).gpus)) == ("590.44.01", 8)


def test_one_session_serves_all_scans_and_a_lost_gpu_does_not_end_it(
    machine: FakeMachine, scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    init = machine.nvml.nvmlInit
    monkeypatch.setattr(machine.nvml, "nvmlInit", lambda: begun.append(init()), raising=False)
    for device in ("", "0", "1"):
        if device:
            machine.inject(Xid(device=device, code=79))
        scanner.scan()
    assert (len(begun), machine.state.initialized) == (1, 1)


def test_a_lost_gpu_stays_known_and_domains_keep_their_name(machine: FakeMachine, scanner: Scanner) -> None:
    before = known(scanner)
    domains = nvlink_domains(before)
    lowest = min(before.gpus, key=lambda g: g.uuid)
    machine.inject(Xid(device=lowest.uuid, code=79))
    scan = scanner.scan()
    assert scan.inventory is not None
    assert [g.uuid for g in scan.inventory.gpus] == [g.uuid for g in before.gpus]
    assert [g.uuid for g in scan.lost] == [lowest.uuid]
    assert nvlink_domains(scan.inventory) == domains
    machine.inject(Recover(device=lowest.uuid))
    assert scanner.scan() == replace(scan, inventory=before, lost=())


def test_a_change_of_the_mig_layout_is_found(machine: FakeMachine, scanner: Scanner) -> None:
    before = known(scanner)
    handle = machine.nvml.nvmlDeviceGetHandleByIndex(1)
    machine.nvml.nvmlDeviceSetMigMode(handle, 1)
    place = pynvml.c_nvmlGpuInstancePlacement_t(4, 4)
    instance = machine.nvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, 9, byref(place))
    assert (known(scanner).gpus[1].mig_enabled, known(scanner).gpus[1].mig) == (True, ())
    machine.nvml.nvmlGpuInstanceCreateComputeInstance(instance, 2)
    (made,) = known(scanner).gpus[1].mig
    assert (made.profile, made.placement_start, made.placement_size) == ("3g.40gb", 4, 4)
    assert [g.mig for g in known(scanner).gpus if g.uuid != before.gpus[1].uuid] == [()] * 7


def test_all_gpus_lost_are_all_reported(machine: FakeMachine, scanner: Scanner) -> None:
    known(scanner)
    for gpu in machine.state.gpus:
        machine.inject(Xid(device=gpu.uuid, code=79))
    scan = scanner.scan()
    assert (len(scan.lost), scan.error) == (8, "")


def test_a_replaced_gpu_and_a_reboot_leave_nothing_of_before(machine: FakeMachine, scanner: Scanner) -> None:
    now = known(scanner)
    other = replace(now.gpus[0], uuid="GPU-other")
    found = replace(now, gpus=(other, *now.gpus[2:]))
    merged, lost = merge(now, found)
    assert [g.uuid for g in merged.gpus][:2] == ["GPU-other", now.gpus[1].uuid]
    assert lost == (now.gpus[1],)
    assert merge(now, replace(found, boot_id="another")) == (replace(found, boot_id="another"), ())


def poll(machine: FakeMachine) -> GpuSample:
    inventory = known(Scanner(machine.nvml, machine.roots, "node-1"))
    return sample(machine.nvml, next(g for g in inventory.gpus if str(g.pci) == FIRST))


def test_a_poll_of_a_healthy_gpu(machine: FakeMachine) -> None:
    good = poll(machine)
    assert good == GpuSample(
        uuid=machine.state.gpus[0].uuid,
        pci=machine.state.gpus[0].pci,
        recovery=RecoveryAction.NONE,
        ecc_uncorrected=0,
        ecc_uncorrected_aggregate=0,
        sram_threshold_exceeded=False,
        remap_pending=False,
        remap_failed=False,
        fabric_state="completed",
        links_active=18,
        links_total=18,
    )


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (LinkDown(device=FIRST, link=3), {"links_active": 17}),
        (RemapPending(device=FIRST), {"remap_pending": True}),
        (Xid(device=FIRST, code=64), {"remap_failed": True, "recovery": RecoveryAction.GPU_RESET}),
        (
            Xid(device=FIRST, code=48),
            {"ecc_uncorrected": 1, "ecc_uncorrected_aggregate": 1, "recovery": RecoveryAction.GPU_RESET},
        ),
        (RecoveryChange(device=FIRST, action=2), {"recovery": RecoveryAction.NODE_REBOOT}),
        (
            FabricChange(device=FIRST, state=2, mask=0b01_00_00, summary=2),
            {"fabric_state": "inProgress", "fabric_faults": frozenset()},
        ),
        (
            FabricChange(device=FIRST, state=3, mask=0b01_10_01),
            {"fabric_faults": {"degraded-bandwidth", "route-unhealthy"}},
        ),
        (FabricChange(device=FIRST, state=3, mask=5 << 8), {"fabric_faults": {"incorrect-configuration"}}),
        (FabricChange(device=FIRST, state=3, mask=1 << 8, summary=3), {"fabric_faults": {"limited-capacity"}}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else "-".join(value),
)
def test_a_poll_shows_each_fault(machine: FakeMachine, fault: object, expected: dict[str, object]) -> None:
    machine.inject(fault)  # type: ignore[arg-type]
    found = poll(machine)
    assert {name: getattr(found, name) for name in expected} == expected


def test_a_lost_gpu_is_polled_as_absent_and_the_others_go_on(machine: FakeMachine, scanner: Scanner) -> None:
    inventory = known(scanner)
    machine.inject(Xid(device=FIRST, code=79))
    polls = sample_all(machine.nvml, inventory)
    assert [p.present for p in polls] == [False, *[True] * 7]
    assert "lost" in polls[0].error


def test_pages_instead_of_rows_before_ampere(tmp_path: Path) -> None:
    machine = FakeMachine.create(load_board("t4"), "node-1", tmp_path)
    machine.inject(Xid(device="0", code=48))
    (first, *_) = sample_all(machine.nvml, known(Scanner(machine.nvml, machine.roots, "node-1")))
    assert (first.remap_pending, first.pages_retired, first.retirement_pending) == (None, 1, False)
    assert (first.fabric_state, first.links_total) == ("unsupported", None)
