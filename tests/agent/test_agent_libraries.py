"""The driver's libraries: asked again until they are known, kept when they were."""

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

import gpunode.agent.libraries as module
from gpunode.agent.libraries import DriverLibraries
from gpunode.agent.machine import open_machine
from gpunode.agent.options import AgentOptions
from gpunode.kubelet.cdi import CommonEdits
from gpunode.model.errors import HardwareError
from gpunode.model.injection import Mount

GOOD = CommonEdits(mounts=(Mount("/usr/lib/libcuda.so.1", "/usr/lib/libcuda.so.1"),))


class Toolkit:
    """Answers, or fails with the words in `fails`."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.asked = 0
        self.complaints: list[tuple[str, str]] = []

    def ask(self) -> CommonEdits:
        self.asked += 1
        if self.fails:
            raise HardwareError(self.fails)
        return GOOD

    def complain(self, reason: str, message: str) -> None:
        self.complaints.append((reason, message))


def test_until_there_was_an_answer_there_is_none_and_one_that_was_stays() -> None:
    toolkit = Toolkit("the driver is not loaded")
    libraries = DriverLibraries(toolkit.ask, toolkit.complain)
    for _ in range(3):
        libraries.refresh()
    assert toolkit.complaints == [("DriverLibrariesUnknown", "the driver is not loaded")], "once"
    with pytest.raises(HardwareError, match="the driver is not loaded"):
        libraries.current()
    toolkit.fails = ""
    libraries.refresh()
    assert libraries.current() == GOOD
    toolkit.fails = "the toolkit is being replaced"
    libraries.refresh()
    assert libraries.current() == GOOD
    assert len(toolkit.complaints) == 2


async def test_it_asks_again_by_itself_and_when_the_driver_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    toolkit = Toolkit("not yet")
    libraries = DriverLibraries(toolkit.ask, toolkit.complain)
    task = asyncio.create_task(libraries.run())
    async with asyncio.timeout(5):
        while toolkit.asked < 3:
            await asyncio.sleep(0.01)
        toolkit.fails = ""
        while True:
            with suppress(HardwareError):
                libraries.current()
                break
            await asyncio.sleep(0.01)
        asked = toolkit.asked
        await asyncio.sleep(0.05)
        assert toolkit.asked == asked, "a good answer is not asked for again soon"
        libraries.wake()
        while toolkit.asked == asked:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Hangs(Toolkit):
    """Answers when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def ask(self) -> CommonEdits:
        self.go.wait(10)
        return super().ask()


async def test_a_toolkit_that_hangs_keeps_the_agent_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_S", 0.05)
    toolkit = Hangs()
    libraries = DriverLibraries(toolkit.ask, toolkit.complain)
    async with asyncio.timeout(2):
        await libraries.start()
    with pytest.raises(HardwareError, match="has not answered yet"):
        libraries.current()
    task = asyncio.create_task(libraries.run())
    await asyncio.sleep(0.05)
    toolkit.go.set()
    async with asyncio.timeout(5):
        while True:
            with suppress(HardwareError):
                assert libraries.current() == GOOD
                break
            await asyncio.sleep(0.01)
    assert toolkit.asked == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_toolkit_that_hangs_does_not_keep_the_process_from_its_end() -> None:
    program = (
        "import asyncio, time\nfrom gpunode.agent import libraries\nlibraries._FIRST_S = 0.1\n"
        "one = libraries.DriverLibraries(lambda: time.sleep(30), print)\nasyncio.run(one.start())\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=15)


def test_a_directory_that_cannot_be_looked_at_is_told() -> None:
    def ask() -> CommonEdits:
        raise OSError(errno.ESTALE, "Stale file handle")

    toolkit = Toolkit()
    libraries = DriverLibraries(ask, toolkit.complain)
    libraries.refresh()
    assert len(toolkit.complaints) == 1
    with pytest.raises(HardwareError, match="Stale file handle"):
        libraries.current()


def test_a_toolkit_that_goes_takes_nothing_from_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [CommonEdits(), GOOD, CommonEdits()]
    toolkit = Toolkit()
    libraries = DriverLibraries(lambda: answers.pop(0), toolkit.complain)
    known = []
    for _ in range(3):
        libraries.refresh()
        known.append(libraries.current())
    assert known == [CommonEdits(), GOOD, GOOD]
    assert [message for _, message in toolkit.complaints] == [
        "the container toolkit is gone; what it said last stands until it is back"
    ]


async def test_a_toolkit_that_comes_later_is_found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    answers = [CommonEdits(), CommonEdits(), GOOD]
    libraries = DriverLibraries(lambda: answers.pop(0), lambda *_: None)
    await libraries.start()
    task = asyncio.create_task(libraries.run())
    async with asyncio.timeout(5):
        while libraries.current() != GOOD:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def options(host: Path) -> AgentOptions:
    return AgentOptions(
        node="n",
        kubeconfig=None,
        driver="d",
        instance="",
        board=None,
        fake_root=host,
        kubelet_dir=host,
        cdi_dir=host,
        state_dir=host,
        metrics_port=0,
        host_root=host,
    )


def test_tools_of_a_host_run_in_the_host(tmp_path: Path) -> None:
    busybox = shutil.which("busybox")
    if os.geteuid() != 0 or busybox is None:
        pytest.skip("needs root and a static busybox")
    for name in ("sh", "echo"):
        shutil.copy(busybox, tmp_path / name)
    for name in ("usr/bin", "dev"):
        (tmp_path / name).mkdir(parents=True)
    tool = tmp_path / "usr/bin/nvidia-smi"
    tool.write_text('#!/sh\n[ -e /sh ] && /echo "$@" > /said\n')
    tool.chmod(0o755)
    machine = open_machine(options(tmp_path))
    machine.run(["nvidia-smi", "compute-policy", "-i", "GPU-0"])
    assert (tmp_path / "said").read_text() == "compute-policy -i GPU-0\n"
    with pytest.raises(HardwareError, match="nvidia-other is not installed beside the driver"):
        machine.run(["nvidia-other"])
    assert machine.libraries() == CommonEdits(), "no toolkit, no libraries"
