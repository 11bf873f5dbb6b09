"""Making and removing MIG instances, also after a kill between any two steps."""

import os
from pathlib import Path

import pynvml
import pytest

from gpunode.hardware.board import load_board
from gpunode.hardware.discover import discover
from gpunode.hardware.fake import FakeMachine, Xid
from gpunode.hardware.mig import profiles
from gpunode.hardware.nodes import device_nodes
from gpunode.hardware.partitions import MigPartitioner
from gpunode.model.errors import HardwareError, InUseError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="making MIG capability nodes needs root")
WHOLE = "gpu-0000-1b-00-0"
TWO = f"{WHOLE}-mig-2g-20gb-2"
THREE = f"{WHOLE}-mig-3g-40gb-4"


class Killed(Exception):
    pass


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    made = FakeMachine.create(load_board("hgx-h100"), "node-1", tmp_path)
    made.nvml.nvmlInit()
    return made


def partitioner(machine: FakeMachine) -> MigPartitioner:
    gpus = discover(machine.nvml, machine.roots, "node-1").gpus
    return MigPartitioner(machine.nvml, machine.roots, lambda: gpus)


def test_create_gives_the_nodes_of_the_instance_and_remove_takes_them_away(machine: FakeMachine) -> None:
    made = partitioner(machine)
    two, three = made.create(TWO), made.create(THREE)
    assert two.uuid != three.uuid
    assert (two.parent, two.pci) == (WHOLE, "0000:1b:00.0")
    assert [n.container_path for n in two.nodes] == [
        "/dev/nvidia0",
        "/dev/nvidia-caps/nvidia-cap12",
        "/dev/nvidia-caps/nvidia-cap13",
    ]
    assert all(Path(n.host_path).is_char_device() for n in (*two.nodes, *three.nodes))
    assert set(two.env) == {"GPUNODE_GPU_0000_1B_00_0_MIG_2G_20GB_2"}
    assert made.existing() == {TWO, THREE}
    inventory = discover(machine.nvml, machine.roots, "node-1")
    assert [(m.profile, m.placement_start, m.uuid) for m in inventory.gpus[0].mig] == [
        ("2g.20gb", 2, two.uuid),
        ("3g.40gb", 4, three.uuid),
    ]
    assert device_nodes(inventory, machine.roots)[TWO] == two
    made.remove(TWO)
    made.remove(TWO)
    assert made.existing() == {THREE}


def test_create_again_adopts_what_is_there(machine: FakeMachine) -> None:
    made = partitioner(machine)
    assert made.create(TWO) == made.create(TWO) == partitioner(machine).create(TWO)


def test_overlap_is_refused_in_the_drivers_words(machine: FakeMachine) -> None:
    made = partitioner(machine)
    made.create(TWO)
    with pytest.raises(HardwareError, match=f"{WHOLE}-mig-4g-40gb-0 cannot be made: Insufficient Resources"):
        made.create(f"{WHOLE}-mig-4g-40gb-0")
    assert made.existing() == {TWO}


def test_a_partition_in_use_stays(machine: FakeMachine) -> None:
    made = partitioner(machine)
    uuid = made.create(TWO).uuid
    machine.state.busy.add(uuid)
    with pytest.raises(InUseError, match="In Use"):
        made.remove(TWO)
    machine.state.busy.clear()
    made.remove(TWO)
    assert made.existing() == frozenset()


@pytest.mark.parametrize(
    "step",
    [
        "nvmlDeviceSetMigMode",
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlGpuInstanceCreateComputeInstance",
        "nvmlDeviceGetMigDeviceHandleByIndex",
    ],
)
@pytest.mark.parametrize("after", [False, True])
def test_killed_while_creating(machine: FakeMachine, step: str, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(machine.nvml, step)

    def killed(*args: object) -> None:
        if after:
            original(*args)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(machine.nvml, step, killed, raising=False)
        with pytest.raises(Killed):
            partitioner(machine).create(TWO)
    again = partitioner(machine)
    assert again.create(TWO).uuid
    assert again.existing() == {TWO}
    again.remove(TWO)
    assert machine.state.gpus[0].saved.instances == []


def test_killed_while_removing(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    partitioner(machine).create(TWO)
    with monkeypatch.context() as patch:
        patch.setattr(machine.nvml, "nvmlGpuInstanceDestroy", lambda _: (_ for _ in ()).throw(Killed), raising=False)
        with pytest.raises(Killed):
            partitioner(machine).remove(TWO)
    assert partitioner(machine).existing() == {TWO}, "half removed is still there"
    partitioner(machine).remove(TWO)
    assert partitioner(machine).existing() == frozenset()


def test_no_compute_instance_no_gpu_instance(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)

    monkeypatch.setattr(machine.nvml, "nvmlGpuInstanceCreateComputeInstance", fails, raising=False)
    with pytest.raises(HardwareError):
        partitioner(machine).create(TWO)
    assert partitioner(machine).existing() == frozenset()


def test_the_whole_gpu_needs_mig_mode_off(machine: FakeMachine) -> None:
    made = partitioner(machine)
    made.create(TWO)
    with pytest.raises(InUseError):
        made.create(WHOLE)
    made.remove(TWO)
    assert made.create(WHOLE).uuid == machine.state.gpus[0].uuid
    assert machine.nvml.nvmlDeviceGetMigMode(machine.nvml.nvmlDeviceGetHandleByIndex(0)) == [0, 0]
    made.remove(WHOLE)


def test_ampere_says_that_it_needs_a_reset(tmp_path: Path) -> None:
    machine = FakeMachine.create(load_board("dgx-a100-80"), "node-1", tmp_path)
    machine.nvml.nvmlInit()
    with pytest.raises(HardwareError, match="MIG mode of gpu-0000-07-00-0 goes on only when the GPU is reset"):
        partitioner(machine).create("gpu-0000-07-00-0-mig-1g-10gb-0")


def test_a_lost_gpu_does_not_stop_the_others(machine: FakeMachine) -> None:
    made = partitioner(machine)
    other = "gpu-0000-43-00-0-mig-1g-10gb-6"
    made.create(TWO)
    made.create(other)
    machine.inject(Xid(device=WHOLE, code=79))
    assert made.existing() == {other}
    made.remove(TWO)
    with pytest.raises(HardwareError, match="GPU is lost"):
        made.create(TWO)
    with pytest.raises(HardwareError, match="not a partition that can be made on this node"):
        made.create("gpu-9999")


@pytest.mark.parametrize("board", ["hgx-h100", "hgx-h200", "hgx-b200", "gb200-nvl72"])
def test_placements_are_known_also_while_mig_mode_is_off(board: str, tmp_path: Path) -> None:
    """The fake's driver, like a real one, lists placements only in MIG mode; then they come from the board."""
    machine = FakeMachine.create(load_board(board), "node-1", tmp_path)
    machine.nvml.nvmlInit()
    handle = machine.nvml.nvmlDeviceGetHandleByIndex(0)
    off = profiles(machine.nvml, handle)
    machine.nvml.nvmlDeviceSetMigMode(handle, 1)
    assert profiles(machine.nvml, handle) == off
    listed = {p.name: (p.starts, p.size, p.id, p.slices) for p in machine.state.board.mig_profiles}
    assert {p.name: (p.starts, p.size, p.id, p.slices) for p in off} == listed


def test_an_instance_without_its_capabilities_is_left_out_and_told(
    machine: FakeMachine, caplog: pytest.LogCaptureFixture
) -> None:
    made = partitioner(machine)
    made.create(TWO)
    made.create(THREE)
    inventory = discover(machine.nvml, machine.roots, "node-1")
    gi = inventory.gpus[0].mig[0].gpu_instance
    (machine.roots.proc / f"driver/nvidia/capabilities/gpu0/mig/gi{gi}/access").write_text("nonsense")
    found = device_nodes(inventory, machine.roots)
    assert (TWO in found, THREE in found) == (False, True)
    assert f"{TWO} cannot be given to containers" in caplog.text
    (machine.roots.proc / "devices").write_text("Character devices:\n195 nvidia\n")
    for node in (machine.roots.dev / "nvidia-caps").iterdir():
        node.unlink()
    assert THREE not in device_nodes(inventory, machine.roots)
    assert "lists no nvidia-caps" in caplog.text


def test_nodes_of_dynamic_gpus_are_known_only_by_name(machine: FakeMachine) -> None:
    inventory = discover(machine.nvml, machine.roots, "node-1")
    found = device_nodes(inventory, machine.roots, frozenset({WHOLE}))
    mine = {name: nodes for name, nodes in found.items() if name.startswith(WHOLE)}
    assert len(mine) == 26
    assert all(nodes.dynamic for nodes in mine.values())
    assert {nodes.parent for name, nodes in mine.items() if name != WHOLE} == {WHOLE}
    whole = found["gpu-0000-43-00-0"]
    assert [n.container_path for n in whole.nodes] == ["/dev/nvidia1"]
    assert {n.container_path for n in whole.control} == {
        "/dev/nvidiactl",
        "/dev/nvidia-modeset",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
    }
