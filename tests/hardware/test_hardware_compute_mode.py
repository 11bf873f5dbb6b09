"""One process a GPU or many, through the fake NVML, whose compute mode is the driver's."""

from pathlib import Path

import pynvml
import pytest

from gpunode.hardware.board import load_board
from gpunode.hardware.compute_mode import ComputeModes
from gpunode.hardware.fake import FakeMachine, Recover, Xid
from gpunode.model.errors import HardwareError, NotOfferedError

GPU = "gpu-0000-1b-00-0"


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    made = FakeMachine.create(load_board("hgx-h100"), "node-1", tmp_path)
    made.nvml.nvmlInit()
    return made


def mode(machine: FakeMachine) -> int:
    nvml = machine.nvml
    return nvml.nvmlDeviceGetComputeMode(nvml.nvmlDeviceGetHandleByUUID(machine.state.find(GPU).uuid))


def test_a_gpu_is_made_exclusive_and_opened_again(machine: FakeMachine) -> None:
    modes, uuid = ComputeModes(machine.nvml), machine.state.find(GPU).uuid
    modes.exclusive(uuid)
    modes.exclusive(uuid)
    assert mode(machine) == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    assert [g.saved.compute_mode for g in machine.state.gpus].count(pynvml.NVML_COMPUTEMODE_DEFAULT) == 7
    modes.default(uuid)
    modes.default(uuid)
    assert mode(machine) == pynvml.NVML_COMPUTEMODE_DEFAULT


def test_the_mode_survives_the_agent_but_no_reset(machine: FakeMachine, tmp_path: Path) -> None:
    uuid = machine.state.find(GPU).uuid
    ComputeModes(machine.nvml).exclusive(uuid)
    again = FakeMachine.create(load_board("hgx-h100"), "node-1", tmp_path)
    again.nvml.nvmlInit()
    assert mode(again) == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    again.inject(Recover(device=GPU))
    assert mode(again) == pynvml.NVML_COMPUTEMODE_DEFAULT


def test_a_lost_gpu_cannot_be_made_exclusive_and_needs_no_opening(machine: FakeMachine) -> None:
    modes, uuid = ComputeModes(machine.nvml), machine.state.find(GPU).uuid
    machine.inject(Xid(device=GPU, code=79))
    with pytest.raises(HardwareError, match="cannot be set to EXCLUSIVE_PROCESS: GPU is lost"):
        modes.exclusive(uuid)
    modes.default(uuid)
    modes.default("GPU-unknown")


def test_a_driver_that_refuses_is_quoted(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    modes, uuid = ComputeModes(machine.nvml), machine.state.find(GPU).uuid
    modes.exclusive(uuid)

    def refuse(code: int) -> None:
        def call(*_: object) -> None:
            raise pynvml.NVMLError(code)

        monkeypatch.setattr(machine.nvml, "nvmlDeviceSetComputeMode", call)

    refuse(pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(HardwareError, match="set back to DEFAULT: Unknown Error"):
        modes.default(uuid)
    machine.state.find(GPU).saved.compute_mode = pynvml.NVML_COMPUTEMODE_DEFAULT
    refuse(pynvml.NVML_ERROR_NOT_SUPPORTED)
    with pytest.raises(NotOfferedError, match="one process at a time: Not Supported"):
        modes.exclusive(uuid)
