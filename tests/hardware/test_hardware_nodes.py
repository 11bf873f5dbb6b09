"""Device nodes that containers are given: IMEX channel 0, and who gets it."""

import os
import stat
from pathlib import Path

import pytest

from gpunode.hardware.board import load_board
from gpunode.hardware.discover import discover
from gpunode.hardware.fake import FakeMachine
from gpunode.hardware.fake.faults import FabricChange
from gpunode.hardware.nodes import device_nodes
from gpunode.kubelet.cdi import spec
from gpunode.kubelet.checkpoint import Entry, HeldDevice, State
from gpunode.model.hardware import device_name
from gpunode.model.injection import DeviceNodes

CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"


def booted(board: str, base: Path) -> FakeMachine:
    machine = FakeMachine.create(load_board(board), "node-1", base)
    machine.nvml.nvmlInit()
    return machine


def nodes(machine: FakeMachine) -> dict[str, DeviceNodes]:
    return device_nodes(discover(machine.nvml, machine.roots, "node-1"), machine.roots)


def channels(machine: FakeMachine) -> list[list[str]]:
    """Of each GPU."""
    found = nodes(machine)
    gpus = [found[gpu.name] for gpu in machine.state.gpus]
    return [[n.container_path for n in gpu.control if "imex" in n.container_path] for gpu in gpus]


def document(machine: FakeMachine, *devices: str) -> dict[str, object]:
    found = nodes(machine)
    held = tuple(HeldDevice(name, "node-1", ("gpus",), found[name]) for name in devices)
    uid = "3f2a9c1e-77b0-4d0e-9f41-7c8d2b90a511"
    return spec(Entry(uid, "ns", "claim", "boot", State.COMPLETED, held))


def test_a_claim_on_a_fabric_of_many_nodes_brings_channel_0_once(tmp_path: Path) -> None:
    machine = booted("gb200-nvl72", tmp_path)
    made = document(machine, *(device_name(gpu.pci) for gpu in machine.state.gpus[:2]))
    shared = made["containerEdits"]
    assert isinstance(shared, dict)
    wanted = {"path": CHANNEL, "hostPath": str(machine.roots.dev) + CHANNEL[4:], "permissions": "rw"}
    assert [n for n in shared["deviceNodes"] if "imex" in n["path"]] == [wanted]
    assert "imex" not in str(made["devices"])


@pytest.mark.parametrize("board", ["hgx-h100", "hgx-b200", "dgx-a100-80", "l4"])
def test_a_fabric_that_ends_at_the_node_has_no_use_for_a_channel(board: str, tmp_path: Path) -> None:
    machine = booted(board, tmp_path)
    assert not any(channels(machine))
    (machine.roots.dev / CHANNEL[5:]).parent.mkdir()
    (machine.roots.dev / CHANNEL[5:]).touch()
    assert not any(channels(machine))


def test_without_channel_0_none_is_given_and_one_made_later_is(tmp_path: Path) -> None:
    machine = booted("gb200-nvl72", tmp_path)
    inventory = discover(machine.nvml, machine.roots, "node-1")
    path = machine.roots.dev / CHANNEL[5:]
    aside = path.with_name("channel1")
    path.rename(aside)
    assert not any(channels(machine))
    aside.rename(path)
    for gpu in inventory.gpus:
        given = device_nodes(inventory, machine.roots)[device_name(gpu.pci)].control
        assert given[-1].container_path == CHANNEL


def test_other_channels_are_given_to_nobody(tmp_path: Path) -> None:
    machine = booted("gb200-nvl72", tmp_path)
    for number in (1, 2, 2047):
        (machine.roots.dev / CHANNEL[5:]).with_name(f"channel{number}").touch()
    assert channels(machine) == [[CHANNEL]] * 4


def test_a_gpu_that_has_not_joined_its_fabric_or_is_divided_gets_none(tmp_path: Path) -> None:
    machine = booted("gb200-nvl72", tmp_path)
    machine.inject(FabricChange(device="0", state=2))
    machine.nvml.nvmlDeviceSetMigMode(machine.nvml.nvmlDeviceGetHandleByIndex(1), 1)
    assert channels(machine) == [[], [], [CHANNEL], [CHANNEL]]


@pytest.mark.skipif(os.geteuid() != 0, reason="makes device nodes")
@pytest.mark.parametrize("number", [(511, 0), (509, 1), (509, 4323)])
def test_another_device_of_that_name_is_not_the_channel(number: tuple[int, int], tmp_path: Path) -> None:
    """Seen in the field: channel0 made with the major number of nvidia-caps is a management capability."""
    machine = booted("gb200-nvl72", tmp_path)
    path = machine.roots.dev / CHANNEL[5:]
    path.unlink()
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(*number))
    except PermissionError:
        pytest.skip("no device nodes here")
    assert not any(channels(machine))
