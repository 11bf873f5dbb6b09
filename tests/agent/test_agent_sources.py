"""Sources of health on a fake machine: kernel log, NVML events and polls, together and each alone."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pynvml
import pytest
from agent_ward import Heard, running, until

import gpunode.agent.inventory as module
from gpunode.agent.inventory import DriverReplacedError, HardwareWatch
from gpunode.agent.monitor import HealthMonitor
from gpunode.agent.sources import follow_kernel_log, follow_nvml
from gpunode.hardware import kmsg
from gpunode.hardware.board import load_board
from gpunode.hardware.discover import discover
from gpunode.hardware.fake import FakeMachine, Recover, Xid, kernel_log
from gpunode.hardware.fake.faults import DriverGone, DriverReload, Lost, RemapPending
from gpunode.hardware.rescan import Scanner
from gpunode.health.devices import DeviceMap, device_map
from gpunode.health.parse import Pending, parse
from gpunode.health.policy import Policy
from gpunode.health.replay import read_records
from gpunode.health.signals import Signal, XidSignal
from gpunode.health.state import HealthState
from gpunode.model.hardware import Inventory
from gpunode.model.health import Dimension, Level

FIRST, SECOND = "gpu-0000-07-00-0", "gpu-0000-0f-00-0"
XID_79 = "NVRM: Xid (PCI:0000:07:00): 79, pid=1, GPU has fallen off the bus."


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[FakeMachine]:
    made = FakeMachine.create(load_board("dgx-a100-80"), "node-1", tmp_path / "fake")
    made.nvml.nvmlInit()
    yield made


@asynccontextmanager
async def watched(
    machine: FakeMachine, heard: Heard, path: Path, log: Path | None = None, polls: bool = False
) -> AsyncIterator[tuple[HealthMonitor, HardwareWatch]]:
    """A monitor with all sources on a fake machine. log: read instead of the machine's own."""
    inventory = discover(machine.nvml, machine.roots, "node-1")
    async with running(path, heard, Policy(hold_down_s=0), device_map(inventory), "boot") as monitor:

        def changed(found: Inventory) -> None:
            monitor.use(device_map(found))

        watch = HardwareWatch(Scanner(machine.nvml, machine.roots, "node-1"), machine.nvml, inventory, monitor, changed)
        work = [
            follow_kernel_log(log or machine.roots.kmsg, monitor, heard.complain),
            follow_nvml(machine.nvml, monitor),
            *([watch.run()] if polls else []),
        ]
        tasks = [asyncio.create_task(one) for one in work]
        await asyncio.sleep(0.3)  # NVML tells only what happens after the registration
        try:
            yield monitor, watch
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def entry_counts(state: HealthState) -> tuple[int, int]:
    entry = state.devices[FIRST].entries["xid/109"]
    return entry.kernel, entry.nvml


async def test_both_sources_tell_of_one_event_and_it_is_one(machine: FakeMachine, tmp_path: Path) -> None:
    heard = Heard()
    async with watched(machine, heard, tmp_path / "h.json") as (monitor, _):
        machine.inject(Xid(device=FIRST, code=109))
        await until(lambda: FIRST in monitor.state.devices and entry_counts(monitor.state) == (1, 1))
        assert monitor.state.devices[FIRST].entries["xid/109"].count == 1
    assert [c for c in heard.changes(FIRST) if c[0] == "109"] == [("109", "raised")]


async def test_a_line_without_words_and_its_event_are_one(machine: FakeMachine, tmp_path: Path) -> None:
    async with watched(machine, Heard(), tmp_path / "h.json") as (monitor, _):
        machine.inject(Xid(device=FIRST, code=46))
        await until(lambda: FIRST in monitor.state.devices and "xid/46" in monitor.state.devices[FIRST].entries)
        await until(lambda: monitor.state.devices[FIRST].entries["xid/46"].nvml == 1)
        await until(lambda: monitor.state.devices[FIRST].entries["xid/46"].kernel == 1)
        assert monitor.state.devices[FIRST].entries["xid/46"].count == 1


@pytest.mark.parametrize("make", ["a directory", "nothing", "no permission"])
async def test_without_a_kernel_log_nvml_alone_tells_and_that_is_said(
    machine: FakeMachine, tmp_path: Path, make: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "kmsg"
    if make == "a directory":
        log.mkdir()
    elif make == "no permission":
        log.write_text("")
        real = Path.open

        def refuse(path: Path, *args: object, **kwargs: object) -> object:
            if path == log:
                raise PermissionError(1, "Operation not permitted", str(log))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(Path, "open", refuse)
    heard = Heard()
    async with watched(machine, heard, tmp_path / "h.json", log) as (monitor, _):
        await until(lambda: bool(heard.complaints))
        machine.inject(Xid(device=FIRST, code=109))
        await until(lambda: monitor.health.of(FIRST).level is Level.UNHEALTHY)
        ((reason, message),) = heard.complaints
        assert reason == "KernelLogUnreadable"
        assert message.startswith(f"{log} cannot be read (")
        assert "only NVML tells" in message


async def test_a_log_that_appears_later_is_read(machine: FakeMachine, tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    async with watched(machine, Heard(), tmp_path / "h.json", log) as (monitor, _):
        await until(lambda: not monitor.health.devices)
        kernel_log.append(log, XID_79)
        await until(lambda: monitor.health.of(FIRST).level is Level.UNHEALTHY)


async def test_a_restart_reads_on_where_it_was(machine: FakeMachine, tmp_path: Path) -> None:
    """What was written while nobody ran counts, what was read before does not count twice."""
    log = machine.roots.kmsg
    kernel_log.append(log, XID_79)
    async with watched(machine, Heard(), tmp_path / "h.json") as (monitor, _):
        await until(lambda: FIRST in monitor.health.devices)
        kernel_log.append(log, "usb 1-1: new device")
        await until(lambda: monitor.kernel_sequence == 2)
    kernel_log.append(log, XID_79.replace("07:00", "0f:00"))
    heard = Heard()
    async with watched(machine, heard, tmp_path / "h.json") as (monitor, _):
        await until(lambda: SECOND in monitor.health.devices)
        assert monitor.state.devices[FIRST].entries["xid/79"].kernel == 1
    assert heard.changes(FIRST) == []


async def test_polls_find_what_nobody_tells(machine: FakeMachine, tmp_path: Path) -> None:
    heard = Heard()
    async with watched(machine, heard, tmp_path / "h.json", tmp_path / "none", polls=True) as (monitor, watch):
        machine.inject(Lost(device=FIRST), RemapPending(device=SECOND))
        watch.wake()
        await until(lambda: {FIRST, SECOND} <= set(monitor.health.devices))
        assert [f.dimension for f in monitor.health.of(FIRST).findings] == [Dimension.PRESENCE]
        assert monitor.health.of(SECOND).level is Level.DEGRADED
        machine.inject(Recover(device=FIRST), Recover(device=SECOND))
        # The first poll begins the end, a later one confirms it.
        for _ in range(3):
            watch.wake()
            await asyncio.sleep(0.3)
        await until(lambda: not monitor.health.devices)


async def test_a_driver_that_goes_and_comes_back_is_no_loss(machine: FakeMachine, tmp_path: Path) -> None:
    heard = Heard()
    async with watched(machine, heard, tmp_path / "h.json", polls=True) as (monitor, watch):
        machine.inject(DriverGone())
        for _ in range(3):
            watch.wake()
            await asyncio.sleep(0.2)
        machine.inject(DriverReload())
        watch.wake()
        await asyncio.sleep(0.5)
        machine.inject(Xid(device=SECOND, code=109))
        await until(lambda: SECOND in monitor.health.devices)
        assert FIRST not in monitor.health.devices
    assert not [t for t in heard.transitions if t.dimension is Dimension.PRESENCE]


async def test_a_driver_that_was_replaced_for_good_ends_the_agent(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mismatch() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(module, "_MISMATCH_S", 0.5)
    async with running(tmp_path / "h.json", Heard(), Policy(), DeviceMap(), "boot") as monitor:
        scanner = Scanner(machine.nvml, machine.roots, "node-1")
        inventory = scanner.scan().inventory
        assert inventory is not None
        watch = HardwareWatch(scanner, machine.nvml, inventory, monitor, lambda _: None)
        task = asyncio.create_task(watch.run())
        await asyncio.sleep(0.1)
        machine.inject(DriverGone())
        monkeypatch.setattr(machine.nvml, "nvmlInit", mismatch, raising=False)
        began = asyncio.get_running_loop().time()
        while not task.done():
            watch.wake()
            await asyncio.sleep(0.05)
        assert asyncio.get_running_loop().time() - began >= 0.4, "a driver in the middle of its upgrade is waited for"
        with pytest.raises(DriverReplacedError, match="new process"):
            await task


async def test_a_fault_of_one_gpu_changes_nothing_about_another(machine: FakeMachine, tmp_path: Path) -> None:
    async with watched(machine, Heard(), tmp_path / "h.json", polls=True) as (monitor, watch):
        machine.inject(Xid(device=FIRST, code=79))
        watch.wake()
        await until(lambda: monitor.health.of(FIRST).level is Level.UNHEALTHY)
        await asyncio.sleep(0.5)
        assert set(monitor.health.devices) == {FIRST}


OFF_BUS = (
    "NVRM: The NVIDIA GPU 0000:07:00.0 (PCI ID: 10de:20b2)\nNVRM: installed in this system has\n"
    "NVRM: fallen off the bus and is not responding to commands."
)
TEXTS = [
    OFF_BUS,
    *OFF_BUS.split("\n"),
    XID_79,
    "NVRM: Xid (PCI:0000:07:00): 13, pid=7, name=b\nNVRM: Xid, Graphics Exception",
    "NVRM: Xid (PCI:0000:07:00): 31, pid=7, name=\\x0aNVRM: GP, MMU Fault",
    "NVRM: Xid (PCI:0000:07:00): 43, pid=7, name=zählen, Ch 00000008",
    "EXT4-fs: file a\n" + XID_79,
    "EXT4-fs: file a\\x0a" + XID_79,
    "nvidia-nvswitch1: SXid (PCI:0000:c5:00.0): 20034, Fatal, Link 07 LTSSM; Fault Up",
    "plain; 1,2,3,-;" + XID_79,
    "",
]


async def test_the_live_log_and_a_replay_of_it_tell_the_same(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    for text in TEXTS:
        kernel_log.append(log, text)
        with log.open("a") as file:
            file.write(f" SUBSYSTEM=pci\n DEVICE=+pci:0000:07:00.0\n {XID_79}\n")
    recorded = [record.text for record in read_records(log.read_text().splitlines(keepends=True))]
    assert [text for text in recorded if not text.startswith(" ")] == TEXTS
    async with kmsg.follow(log) as stream:
        live = [(await asyncio.wait_for(anext(stream), 5)).text for _ in TEXTS]
    assert live == TEXTS
    assert signals_of(recorded) == signals_of(live)
    told = [type(s).__name__ if not isinstance(s, XidSignal) else s.code for s in signals_of(live)]
    assert told == ["FallenOffBus", "FallenOffBus", 79, 13, 31, 43, "SxidSignal"]


def signals_of(texts: list[str]) -> list[Signal]:
    found: list[Signal] = []
    pending = Pending()
    for text in texts:
        signals, pending = parse(text, pending)
        found += signals
    return found


async def test_a_message_of_three_lines_in_one_record_is_heard(machine: FakeMachine, tmp_path: Path) -> None:
    """As the driver prints it: one printk, whose line ends /dev/kmsg shows as \\x0a."""
    heard = Heard()
    log = tmp_path / "kmsg"
    kernel_log.append(log, OFF_BUS)
    async with watched(machine, heard, tmp_path / "h.json", log):
        await until(lambda: bool(heard.changes(FIRST)))
    assert heard.changes(FIRST) == [("79", "raised")]


async def test_lines_that_were_overwritten_before_they_were_read_are_told(machine: FakeMachine, tmp_path: Path) -> None:
    """While nobody ran, and while we were too slow; a log that begins anew misses nothing."""
    log, state = tmp_path / "kmsg", tmp_path / "h.json"
    log.write_text("6,7,1,-;one\n6,8,2,-;two\n")
    heard = Heard()
    async with watched(machine, heard, state, log) as (monitor, _):
        await until(lambda: monitor.kernel_sequence == 8)
    assert heard.complaints == []
    log.write_text(f"6,30,3,-;three\n3,31,4,-;{XID_79}\n6,90,5,-;later in the same minute\n")
    async with watched(machine, heard, state, log) as (monitor, _):
        await until(lambda: monitor.kernel_sequence == 90)
        assert monitor.health.of(FIRST).level is Level.UNHEALTHY
    ((reason, message),) = heard.complaints
    assert (reason, message.partition(" of ")[0]) == ("KernelLogOverrun", "21 lines")
    log.write_text("6,91,1,-;on\n")
    async with watched(machine, heard, state, log) as (monitor, _):
        await until(lambda: monitor.kernel_sequence == 91)
        replaced = tmp_path / "new"
        replaced.write_text("6,0,1,-;anew\n6,1,1,-;and on\n")
        replaced.replace(log)
        await until(lambda: monitor.kernel_sequence == 1)
    assert len(heard.complaints) == 1
