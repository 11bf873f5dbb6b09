"""Time slicing through nvidia-smi, which is a script here."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from kubelet_fakes import GPUS, FakeApi, all_devices, claim, gpu_config, make_engine, ref

from gpunode.kubelet.config import Interval, Mps, TimeSlicing
from gpunode.kubelet.timeslice import TimeSlices, run_command
from gpunode.model.errors import HardwareError


class Tool:
    """Remembers the time slice of each UUID, as the driver does until the next reboot."""

    def __init__(self) -> None:
        self.slices: dict[str, int] = {}
        self.fail = False

    def __call__(self, command: Sequence[str]) -> None:
        name, policy, flag, uuid, setting = command
        assert (name, policy, flag) == ("nvidia-smi", "compute-policy", "-i")
        if self.fail:
            raise HardwareError("Unknown Error")
        self.slices[uuid] = int(setting.removeprefix("--set-timeslice="))


async def test_a_claim_sets_the_slice_and_its_release_sets_it_back(tmp_path: Path) -> None:
    tool = Tool()
    sharing = TimeSlices(tmp_path / "slices", tool)
    one = claim(1, GPUS[0], GPUS[1], config=[gpu_config(timeSlicing={"interval": "Long"})])
    engine = make_engine(tmp_path, FakeApi(one), sharing=sharing)
    await engine.prepare([ref(one)])
    assert tool.slices == {"GPU-0": 3, "GPU-1": 3}
    assert sharing.active() == {GPUS[0], GPUS[1]}
    await engine.unprepare([ref(one)])
    assert tool.slices == {"GPU-0": 0, "GPU-1": 0}
    assert sharing.active() == frozenset()


def test_a_kill_between_note_and_setting_is_cleared(tmp_path: Path) -> None:
    tool = Tool()

    class Killed(BaseException):
        pass

    def step(name: str) -> None:
        if name.startswith("set "):
            raise Killed

    with pytest.raises(Killed):
        TimeSlices(tmp_path, tool, step).apply("u", TimeSlicing(Interval.SHORT), {GPUS[0]: all_devices()[GPUS[0]]})
    later = TimeSlices(tmp_path, tool)
    assert later.active() == {GPUS[0]}
    later.clear(GPUS[0])
    assert later.active() == frozenset() and tool.slices == {"GPU-0": 0}
    later.clear(GPUS[0])


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    tool = Tool()
    slices = TimeSlices(tmp_path, tool)
    tool.fail = True
    nodes = {GPUS[0]: all_devices()[GPUS[0]]}
    with pytest.raises(HardwareError, match="Unknown Error"):
        slices.apply("u", TimeSlicing(), nodes)
    with pytest.raises(HardwareError, match="Unknown Error"):
        slices.clear(GPUS[0])
    assert slices.active() == {GPUS[0]}  # still known, so tried again
    (tmp_path / GPUS[0]).write_text("damaged")
    with pytest.raises(HardwareError, match="remove it"):
        slices.clear(GPUS[0])
    with pytest.raises(HardwareError, match="not a device name"):
        slices.clear("../x")
    with pytest.raises(HardwareError, match="Mps is not time slicing"):
        slices.apply("u", Mps(), nodes)


def test_the_tools_own_words_reach_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n[ \"$4\" = --set-timeslice=0 ] || { echo 'No permission' >&2; exit 4; }\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    run_command(["nvidia-smi", "compute-policy", "-i", "GPU-0", "--set-timeslice=0"])
    with pytest.raises(HardwareError, match="status 4: No permission"):
        run_command(["nvidia-smi", "compute-policy", "-i", "GPU-0", "--set-timeslice=3"])
    with pytest.raises(HardwareError, match="no-such-tool"):
        run_command(["no-such-tool"])
