"""The monitor: what is taken in together, what is on disk when, and what it says when something is wrong."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from agent_ward import GPU_A, GPU_B, MAP, A, B, Heard, running, until

from gpunode.agent import monitor as module
from gpunode.agent.monitor import HealthMonitor
from gpunode.health.devices import DeviceMap
from gpunode.health.machine import HealthMachine
from gpunode.health.policy import Policy
from gpunode.health.signals import GpuReset, OperatorClear, XidSignal
from gpunode.health.state import HealthState, Instant
from gpunode.health.store import read, request_clear
from gpunode.model.health import Dimension, GpuSample, Level

OFF_BUS = XidSignal(A, 79, text="GPU has fallen off the bus.")
HANG = XidSignal(A, 109, text="CTX SWITCH TIMEOUT")


def saved(path: Path) -> HealthState:
    return read(path) if path.exists() else HealthState()


async def test_polls_of_one_moment_are_compared_with_each_other(tmp_path: Path) -> None:
    """B has all its links and A has none: only both in one step show that A lacks some."""
    polls = (
        GpuSample("GPU-a", A, links_active=0, links_total=12),
        GpuSample("GPU-b", B, links_active=12, links_total=12),
    )
    heard = Heard()
    async with running(tmp_path / "health.json", heard) as monitor:
        await monitor.put(*polls)
        await until(lambda: monitor.health.of(GPU_A).level is Level.UNHEALTHY)
    assert heard.changes() == [("down", "raised")]
    assert heard.changes(GPU_B) == []


async def test_what_happened_is_on_disk_before_it_is_told(tmp_path: Path) -> None:
    """So a restart at any point knows what pods and people have heard."""
    path = tmp_path / "health.json"
    seen: list[bool] = []

    async def listen(_: object) -> None:
        seen.append("xid/79" in saved(path).devices[GPU_A].entries)

    monitor = HealthMonitor(HealthMachine(), path, listen, Heard().complain)
    monitor.start("boot-1", MAP)
    task = asyncio.create_task(monitor.run())
    await monitor.put(OFF_BUS)
    await until(lambda: bool(seen))
    task.cancel()
    assert seen == [True]


async def test_a_restart_keeps_fault_time_and_place_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    async with running(path, Heard()) as monitor:
        await monitor.put(OFF_BUS, kernel_sequence=7)
        await until(lambda: bool(monitor.health.devices))
        before = monitor.health
        await monitor.put(kernel_sequence=12)  # lines that are about no GPU
        await until(lambda: monitor.kernel_sequence == 12)
    heard = Heard()
    async with running(path, heard) as monitor:
        assert monitor.health == before
        assert monitor.health.of(GPU_A).findings[0].since
        assert monitor.kernel_sequence == 12
        assert heard.transitions == []


async def test_a_reboot_begins_the_log_anew(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    async with running(path, Heard()) as monitor:
        await monitor.put(OFF_BUS, kernel_sequence=7)
        await until(lambda: bool(monitor.health.devices))
    heard = Heard()
    async with running(path, heard, boot="boot-2") as monitor:
        assert (monitor.health.devices, monitor.kernel_sequence) == ({}, None)
        assert heard.changes() == [("79", "cleared")]
        await until(lambda: saved(path).boot_id == "boot-2")


async def test_a_storm_is_one_notice_and_few_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves: list[int] = []
    real = module.save

    def save(path: Path, state: HealthState) -> str:
        saves.append(1)
        return real(path, state)

    monkeypatch.setattr(module, "save", save)
    heard = Heard()
    line = XidSignal(A, 45, text="Ch 00000010")
    async with running(tmp_path / "health.json", heard) as monitor:
        for number in range(40_000):
            await monitor.put(line, kernel_sequence=number)
            if number == 20_000:
                await monitor.put(replace(OFF_BUS, pci=B), kernel_sequence=number)
        await until(lambda: monitor.kernel_sequence == 39_999, 60)
        assert monitor.state.devices[GPU_A].notes["45"].count == 40_000
    assert heard.changes() == [("45", "noted")]
    assert heard.changes(GPU_B) == [("79", "raised")]
    assert heard.calls == 2
    # One for each thing that happened, one a second, one at the end: not one for each of the batches.
    assert len(saves) < 20


async def test_polls_that_find_nothing_new_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves: list[int] = []
    monkeypatch.setattr(module, "save", lambda *_: saves.append(1) or "")
    heard = Heard()
    async with running(tmp_path / "health.json", heard) as monitor:
        await until(lambda: bool(saves))  # the boot id
        for _ in range(20):
            sampled = monitor.state.devices[GPU_A].sampled if GPU_A in monitor.state.devices else None
            await monitor.put(GpuSample("GPU-a", A), GpuSample("GPU-b", B))
            await until(
                lambda old=sampled: GPU_A in monitor.state.devices and monitor.state.devices[GPU_A].sampled != old
            )
        assert len(saves) == 1
    assert (heard.calls, len(saves)) == (0, 2)  # and once at the end


async def test_an_operators_word_is_taken_without_hold_down(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    heard = Heard()
    async with running(path, heard, Policy()) as monitor:
        await monitor.put(OFF_BUS)
        await until(lambda: bool(monitor.health.devices))
        request_clear(path, OperatorClear(GPU_A, by="operator jo", dimension=Dimension.ECC))
        request_clear(path, OperatorClear(GPU_A, by="operator jo"))
        await until(lambda: not monitor.health.devices)
        assert not list(path.with_name("health.json.requests").iterdir())
    assert "cleared by operator jo" in heard.transitions[-1].message


async def test_an_unusable_word_is_complained_of_and_harms_nothing(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    (tmp_path / "health.json.requests").mkdir()
    (tmp_path / "health.json.requests" / "x.json").write_text("{")
    heard = Heard()
    async with running(path, heard) as monitor:
        await until(lambda: bool(heard.complaints))
        await monitor.put(OFF_BUS)
        await until(lambda: bool(monitor.health.devices))
    assert [reason for reason, _ in heard.complaints] == ["HealthRequestUnusable"]


async def test_a_fault_ends_and_says_why(tmp_path: Path) -> None:
    heard = Heard()
    async with running(tmp_path / "health.json", heard) as monitor:
        await monitor.put(HANG)
        await until(lambda: bool(monitor.health.devices))
        await monitor.put(GpuReset("GPU-a", success=True))
        await until(lambda: not monitor.health.devices)
    assert heard.changes() == [("109", "raised"), ("109", "cleared")]
    assert "is over: the GPU was reset" in heard.transitions[-1].message


async def test_two_faults_one_ends(tmp_path: Path) -> None:
    heard = Heard()
    async with running(tmp_path / "health.json", heard) as monitor:
        poll = GpuSample("GPU-a", A, remap_failed=True)
        await monitor.put(HANG, poll)
        await until(lambda: len(monitor.health.of(GPU_A).findings) == 2)
        await monitor.put(GpuReset("GPU-a", success=True))
        await monitor.put(poll)
        await until(lambda: ("109", "cleared") in heard.changes())
        (left,) = monitor.health.of(GPU_A).findings
        assert (left.dimension, left.level) == (Dimension.REMAP, Level.UNHEALTHY)
        assert GPU_B not in monitor.health.devices


async def test_a_flapping_device_waits_longer(tmp_path: Path) -> None:
    heard = Heard()
    policy = Policy(hold_down_s=1.0)
    async with running(tmp_path / "health.json", heard, policy) as monitor:
        loop = asyncio.get_running_loop()
        waits = []
        for _ in range(2):
            await monitor.put(HANG)
            await until(lambda: bool(monitor.health.devices))
            began = loop.time()
            await monitor.put(GpuReset("GPU-a", success=True))
            await until(lambda: not monitor.health.devices, 20)
            waits.append(loop.time() - began)
    assert waits[0] >= 1.0
    assert waits[1] >= 2.0
    assert heard.changes() == 2 * [("109", "raised"), ("109", "cleared")]


async def test_a_full_disk_is_complained_of_once_and_health_goes_on(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    heard = Heard()
    async with running(blocker / "health.json", heard) as monitor:
        await monitor.put(OFF_BUS)
        await until(lambda: heard.changes() == [("79", "raised")])
        await monitor.put(HANG)
        await until(lambda: ("109", "raised") in heard.changes())
        assert monitor.health.of(GPU_A).level is Level.UNHEALTHY
    assert [reason for reason, _ in heard.complaints if reason != "HealthStateUnusable"] == ["HealthStateNotSaved"]


async def test_a_damaged_state_is_set_aside_and_complained_of(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    path.write_text('{"boot_id": 3')
    heard = Heard()
    async with running(path, heard) as monitor:
        await monitor.put(OFF_BUS)
        await until(lambda: bool(monitor.health.devices))
    assert [reason for reason, _ in heard.complaints] == ["HealthStateUnusable"]
    assert path.with_name("health.json.damaged").read_text() == '{"boot_id": 3'


@pytest.mark.parametrize("wall", [0.0, -1e12, 4e9, 1e300])
async def test_a_wrong_clock_mislabels_and_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wall: float
) -> None:
    real = module.now
    monkeypatch.setattr(module, "now", lambda: Instant(wall, real().uptime))
    heard = Heard()
    async with running(tmp_path / "health.json", heard) as monitor:
        await monitor.put(HANG)
        await until(lambda: monitor.health.of(GPU_A).level is Level.UNHEALTHY)
        monkeypatch.setattr(module, "now", lambda: Instant(1.7e9, real().uptime))  # the clock is set right
        await monitor.put(GpuReset("GPU-a", success=True))
        await until(lambda: not monitor.health.devices)


async def test_devices_that_appear_later_are_meant_from_then_on(tmp_path: Path) -> None:
    heard = Heard()
    async with running(tmp_path / "health.json", heard, devices=DeviceMap()) as monitor:
        await monitor.put(GpuReset("GPU-a", success=False))  # nobody knows this GPU
        monitor.use(MAP)
        await monitor.put(GpuReset("GPU-a", success=False))
        await until(lambda: bool(monitor.health.devices))
    assert heard.changes() == [("reset-failed", "raised")]


async def test_an_agent_that_is_superseded_writes_nothing_and_leaves_words_to_the_newer_one(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    charge = [False]
    heard = Heard()
    monitor = HealthMonitor(HealthMachine(), path, heard.listen, heard.complain, lambda: charge[0])
    monitor.start("boot-1", MAP)
    task = asyncio.create_task(monitor.run())
    try:
        request_clear(path, OperatorClear(GPU_A, by="operator jo"))
        await monitor.put(OFF_BUS)
        await until(lambda: heard.changes() == [("79", "raised")])
        assert not path.exists()
        assert monitor.health.of(GPU_A).level is Level.UNHEALTHY, "the kubelet still asks it"
        charge[0] = True
        await until(lambda: ("79", "cleared") in heard.changes() and path.exists())
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
