"""The fake machine: what discovery finds on it, and that faults are told on every channel the driver uses."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from gpunode.hardware import events
from gpunode.hardware.board import load_board
from gpunode.hardware.discover import discover
from gpunode.hardware.fake import FakeMachine, Recover, Xid
from gpunode.hardware.fake.faults import DriverGone, DriverReload, LinkDown, Lost, SwitchError, parse_fault
from gpunode.hardware.sysfs import parse_pci
from gpunode.model.kmsg import parse_record

FIRST = "gpu-0000-07-00-0"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[FakeMachine]:
    made = FakeMachine.create(load_board("dgx-a100-80"), "node-1", tmp_path)
    made.nvml.nvmlInit()
    yield made


def log_lines(machine: FakeMachine) -> list[str]:
    records = [parse_record(line) for line in machine.roots.kmsg.read_text().splitlines()]
    assert all(records), "every line of the fake's log is a record"
    assert [r.seq for r in records if r] == list(range(len(records)))
    return [r.text for r in records if r]


def test_discovery_finds_the_board(machine: FakeMachine) -> None:
    inventory = discover(machine.nvml, machine.roots, "node-1")
    first = inventory.gpus[0]
    assert [str(g.pci) for g in inventory.gpus] == [g.pci for g in machine.state.board.gpus]
    assert (first.product, first.brand, first.architecture) == ("NVIDIA A100-SXM4-80GB", "Nvidia", "Ampere")
    assert (first.memory_bytes, first.multiprocessors, first.compute_capability) == (80 * 2**30, 108, (8, 0))
    assert (first.numa_node, first.pcie_root) == (3, "pci0000:00")
    assert len(first.links) == 12
    assert {(link.active, link.peer) for link in first.links} == {(True, "switch")}
    assert first.nvlink_peers == {g.uuid for g in inventory.gpus[1:]}
    assert first.fabric.state == "unsupported"
    assert (inventory.driver_version, inventory.cuda_version) == ("580.95.05", "13.0")
    assert inventory.boot_id == machine.state.saved.boot_id
    assert [(n.rdma, n.numa_node) for n in inventory.nics][:2] == [("mlx5_0", 3), ("mlx5_1", 3)]


def test_uuids_depend_on_the_node_and_not_on_the_run(tmp_path: Path) -> None:
    board = load_board("dgx-a100-80")
    a, again, b = (FakeMachine.create(board, n, tmp_path / d) for n, d in (("a", "1"), ("a", "2"), ("b", "3")))
    assert [g.uuid for g in a.state.gpus] == [g.uuid for g in again.state.gpus]
    assert not {g.uuid for g in a.state.gpus} & {g.uuid for g in b.state.gpus}


@pytest.mark.parametrize(
    "missing",
    [
        "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceGetNumGpuCores",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetP2PStatus",
        "nvmlDeviceGetSerial",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetArchitecture",
        "nvmlSystemGetCudaDriverVersion_v2",
    ],
)
def test_a_function_an_older_driver_lacks_costs_one_fact_and_no_gpu(machine: FakeMachine, missing: str) -> None:
    machine.state.missing.add(missing)
    assert len(discover(machine.nvml, machine.roots, "node-1").gpus) == 8


def test_truncated_sysfs_costs_placement_facts_and_no_gpu(machine: FakeMachine) -> None:
    for link in (machine.roots.sys / "bus/pci/devices").iterdir():
        (link / "numa_node").write_text("")
        link.unlink()
    inventory = discover(machine.nvml, machine.roots, "node-1")
    assert {(g.numa_node, g.pcie_root) for g in inventory.gpus} == {(None, "")}
    assert len(inventory.gpus) == 8


@pytest.mark.parametrize("text", ["", "0000:07:00", "0000:07:00.8", "07:00.0", "x", "000007:00:00.0\n", "٠000:07:00.0"])
def test_what_is_no_pci_address_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="not a PCI address"):
        parse_pci(text)


def test_odd_entries_of_sysfs_are_passed_over(machine: FakeMachine) -> None:
    devices = machine.roots.sys / "bus/pci/devices"
    for name, kind in (("not-an-address", "0x020000"), ("0000:aa:00.0", "0x020000"), ("0000:ab:00.0", "0x0106")):
        (devices / name).mkdir()
        (devices / name / "class").write_text(kind + "\n")
    (devices / "0000:aa:00.0" / "physfn").mkdir()
    (devices / "0000:ac:00.0").symlink_to("nowhere")
    assert len(discover(machine.nvml, machine.roots, "node-1").nics) == len(machine.state.board.nics)


def test_xid_79_is_told_by_event_and_log_and_the_gpu_is_lost(machine: FakeMachine) -> None:
    machine.inject(Xid(device=FIRST, code=79))
    assert log_lines(machine)[-2:] == [
        "NVRM: Xid (PCI:0000:07:00): 79, GPU has fallen off the bus.",
        "NVRM: GPU 0000:07:00.0: GPU has fallen off the bus.",
    ]
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        machine.nvml.nvmlDeviceGetHandleByIndex(0)
    assert str(discover(machine.nvml, machine.roots, "node-1").gpus[0].pci) == "0000:0f:00.0"
    machine.inject(Recover(device=FIRST))
    assert len(discover(machine.nvml, machine.roots, "node-1").gpus) == 8


def test_mig_and_process_stand_where_the_driver_puts_them(machine: FakeMachine) -> None:
    machine.inject(Xid(device="0000:07:00.0", code=13, gi=3, ci=0, pid=4711, text="Graphics Exception"))
    expected = "NVRM: Xid (PCI:0000:07:00 GPU-I:03 GPU-CI:00): 13, pid=4711, name=python3, Graphics Exception"
    assert log_lines(machine)[-1] == expected


def test_reset_class_xid_changes_the_drivers_verdict_and_recovery_takes_it_back(machine: FakeMachine) -> None:
    handle = machine.nvml.nvmlDeviceGetHandleByIndex(0)
    field = pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
    machine.inject(Xid(device=FIRST, code=119))
    assert machine.nvml.nvmlDeviceGetFieldValues(handle, [field])[0].value.uiVal == 1
    assert "154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)" in log_lines(machine)[-1]
    machine.inject(Recover(device=FIRST))
    assert machine.nvml.nvmlDeviceGetFieldValues(handle, [field])[0].value.uiVal == 0
    assert log_lines(machine)[-1] == f"GPU reset executed: {machine.state.gpus[0].uuid}, success: true"


def test_the_boards_own_count_of_memory_errors_outlives_a_reset(machine: FakeMachine) -> None:
    handle = machine.nvml.nvmlDeviceGetHandleByIndex(0)
    machine.inject(Xid(device=FIRST, code=48), Recover(device=FIRST))
    uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    assert machine.nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, pynvml.NVML_VOLATILE_ECC) == 0
    assert machine.nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, pynvml.NVML_AGGREGATE_ECC) == 1


def test_hostile_text_cannot_pass_for_another_record(machine: FakeMachine) -> None:
    machine.inject(Xid(device=FIRST, code=13, text="x\n3,99,0,-;NVRM: Xid (PCI:0000:0f:00): 79, forged"))
    assert log_lines(machine)[-1].startswith("NVRM: Xid (PCI:0000:07:00): 13, x\n3,99")


def test_restart_keeps_faults_and_log_and_reboot_ends_them(machine: FakeMachine, tmp_path: Path) -> None:
    machine.inject(Lost(device=FIRST))
    machine.inject(LinkDown(device="1", link=4))
    board = machine.state.board
    again = FakeMachine.create(board, "node-1", tmp_path)
    again.nvml.nvmlInit()
    found = discover(again.nvml, again.roots, "node-1")
    assert len(found.gpus) == 7
    assert [link.index for link in found.gpus[0].links if not link.active] == [4]
    assert found.boot_id == machine.state.saved.boot_id
    before = len(log_lines(again))
    rebooted = FakeMachine.create(board, "node-1", tmp_path, boot_id="2b1e6f2e-5d7f-4a57-9a39-111111111111")
    rebooted.nvml.nvmlInit()
    assert len(discover(rebooted.nvml, rebooted.roots, "node-1").gpus) == 8
    assert len(log_lines(rebooted)) == 1 <= before


def test_restart_leaves_device_nodes_that_containers_use(machine: FakeMachine, tmp_path: Path) -> None:
    node = machine.roots.dev / "nvidia-caps" / "nvidia-cap1"
    node.parent.mkdir()
    node.touch()
    before = (machine.roots.dev / "nvidia0").stat().st_ino
    FakeMachine.create(machine.state.board, "node-1", tmp_path)
    assert node.exists()
    assert (machine.roots.dev / "nvidia0").stat().st_ino == before
    FakeMachine.create(load_board("hgx-h100"), "node-1", tmp_path)
    assert not node.exists(), "another board is another machine"


def test_driver_reload_voids_handles_and_changes_the_version(machine: FakeMachine) -> None:
    handle = machine.nvml.nvmlDeviceGetHandleByIndex(0)
    machine.inject(DriverGone())
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        machine.nvml.nvmlDeviceGetUUID(handle)
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        machine.nvml.nvmlInit()
    machine.inject(DriverReload(version="590.10"))
    machine.nvml.nvmlInit()
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        machine.nvml.nvmlDeviceGetUUID(handle)
    assert discover(machine.nvml, machine.roots, "node-1").driver_version == "590.10"


def test_unknown_device_is_refused_with_what_there_is(machine: FakeMachine) -> None:
    with pytest.raises(LookupError, match=r"no GPU 'gpu-9' on node-1; there are: gpu-0000-07-00-0"):
        machine.inject(Xid(device="gpu-9", code=79))


def test_faults_are_read_strictly() -> None:
    assert parse_fault('{"kind": "xid", "device": "gpu-0", "code": 79}') == Xid(device="gpu-0", code=79)
    for bad in ('{"kind": "xid", "device": "g", "code": 0}', '{"kind": "boom"}', "[]", '{"kind":"lost","device":1}'):
        with pytest.raises(ValueError, match="not a fault"):
            parse_fault(bad)


async def test_event_watch_tells_xids_and_loss_once_and_goes_on(machine: FakeMachine) -> None:
    async with events.watch(machine.nvml) as stream:
        await _watching(machine, set(range(8)))
        machine.inject(Xid(device=FIRST, code=13, gi=2, ci=0))
        machine.inject(Xid(device=FIRST, code=79))
        seen = [await asyncio.wait_for(anext(stream), 5) for _ in range(3)]
        assert [(e.kind, e.code, e.gi, e.ci) for e in seen] == [
            ("xid", 13, 2, 0),
            ("xid", 79, None, None),
            ("lost", 0, None, None),
        ]
        assert {(str(e.pci), e.uuid) for e in seen} == {("0000:07:00.0", machine.state.gpus[0].uuid)}
        await _watching(machine, set(range(1, 8)))
        machine.inject(Xid(device="3", code=31))
        assert (await asyncio.wait_for(anext(stream), 5)).code == 31


async def test_event_watch_survives_a_driver_reload(machine: FakeMachine) -> None:
    async with events.watch(machine.nvml) as stream:
        await _watching(machine, set(range(8)))
        machine.inject(DriverGone())
        machine.inject(DriverReload())
        machine.nvml.nvmlInit()
        await _watching(machine, set(range(8)))
        machine.inject(Xid(device="2", code=94))
        assert (await asyncio.wait_for(anext(stream), 5)).code == 94


async def test_a_gpu_that_was_lost_from_the_start_is_watched_once_it_is_back(machine: FakeMachine) -> None:
    machine.inject(Lost(device=FIRST))
    async with events.watch(machine.nvml) as stream:
        await _watching(machine, set(range(1, 8)))
        machine.inject(Recover(device=FIRST))
        await _watching(machine, set(range(8)))
        machine.inject(Xid(device=FIRST, code=13))
        assert (await asyncio.wait_for(anext(stream), 5)).code == 13


async def _watching(machine: FakeMachine, gpus: set[int]) -> None:
    async with asyncio.timeout(10):
        while not any(set(e.masks) == gpus for e in list(machine.state.event_sets.values())):
            await asyncio.sleep(0.01)


def links_down(machine: FakeMachine) -> dict[int, list[int]]:
    gpus = discover(machine.nvml, machine.roots, "node-1").gpus
    down = {n: [link.index for link in gpu.links if not link.active] for n, gpu in enumerate(gpus)}
    return {n: links for n, links in down.items() if links}


def test_a_fatal_port_of_a_switch_takes_one_link_and_is_told_by_switch_and_gpu(machine: FakeMachine) -> None:
    machine.inject(SwitchError(switch="0000:c5:00.0", code=20034, port=7))
    assert log_lines(machine)[1:3] == [
        "nvidia-nvswitch1: SXid (PCI:0000:c5:00.0): 20034, Fatal, Link 07 LTSSM Fault Up",
        "NVRM: Xid (PCI:0000:4e:00): 74, NVLink: fatal error detected on link 3(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)",
    ]
    assert links_down(machine) == {3: [3]}


def test_a_fatal_error_of_a_whole_switch_takes_all_links_to_it(machine: FakeMachine) -> None:
    machine.inject(SwitchError(switch="5", code=12020))
    assert log_lines(machine)[1].startswith("nvidia-nvswitch5: SXid (PCI:0000:c9:00.0): 12020, Fatal, Crossbar")
    assert links_down(machine) == {n: [10, 11] for n in range(8)}


def test_a_switch_error_that_is_not_fatal_or_of_a_port_nobody_is_at_is_only_a_line(machine: FakeMachine) -> None:
    machine.inject(SwitchError(switch="0", code=12028, fatal=False, port=0, text="one\ntwo"))
    machine.inject(SwitchError(switch="0", code=20034, port=35))
    assert log_lines(machine)[1:] == [
        "nvidia-nvswitch0: SXid (PCI:0000:c4:00.0): 12028, Non-fatal, Link 00 one\ntwo",
        "nvidia-nvswitch0: SXid (PCI:0000:c4:00.0): 20034, Fatal, Link 35 LTSSM Fault Up",
    ]
    assert links_down(machine) == {}


def test_a_switch_that_is_not_there_is_named(machine: FakeMachine, tmp_path: Path) -> None:
    with pytest.raises(LookupError, match=r"no NVSwitch '6' on node-1; there are: 0000:c4:00.0, "):
        machine.inject(SwitchError(switch="6", code=12020))
    other = FakeMachine.create(load_board("l4"), "node-2", tmp_path / "other")
    with pytest.raises(LookupError, match="there are: none"):
        other.inject(SwitchError(switch="0", code=12020))
