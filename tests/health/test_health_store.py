"""The saved state: round trip, damage, and disks that do not take it."""

import errno
import os
from pathlib import Path

import msgspec
import pytest

from gpunode.health import store
from gpunode.health.devices import DeviceMap
from gpunode.health.machine import HealthMachine
from gpunode.health.signals import FallenOffBus, OperatorClear, XidSignal
from gpunode.health.state import HealthState, Instant
from gpunode.model.hardware import PciAddress

A = PciAddress(0, 7, 0)


@pytest.fixture
def state() -> HealthState:
    signals = [FallenOffBus(A), XidSignal(A, 13, pid=4, text="(GPC 0, TPC 1, SM 0)"), XidSignal(A, 119)]
    step = HealthMachine().step(HealthState(boot_id="b"), signals, DeviceMap(), Instant(1e9, 5.5))
    return msgspec.structs.replace(step.state, kernel_sequence=77)


def test_round_trip(tmp_path: Path, state: HealthState) -> None:
    path = tmp_path / "deep" / "health.json"
    assert store.save(path, state) == ""
    assert store.load(path) == store.Loaded(state)
    assert [p.name for p in path.parent.iterdir()] == ["health.json"]


def test_nothing_saved_yet(tmp_path: Path) -> None:
    assert store.load(tmp_path / "health.json") == store.Loaded(HealthState())


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"null", b"\xff\xfe", b'{"version": 99}', b'{"devices": 3}', b"[" * 100_000, b" " * (17 << 20)],
    ids=["empty", "cut", "null", "binary", "version", "shape", "deep", "large"],
)
def test_damage_is_set_aside(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "health.json"
    path.write_bytes(damage)
    loaded = store.load(path)
    assert loaded.state == HealthState()
    assert "not usable" in loaded.note and "set aside" in loaded.note
    assert (tmp_path / "health.json.damaged").read_bytes() == damage
    assert not path.exists()


def test_every_truncation_is_noticed(tmp_path: Path, state: HealthState) -> None:
    path = tmp_path / "health.json"
    store.save(path, state)
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        assert store.load(path).note, length


def test_a_full_disk_keeps_the_old_state_and_says_so(
    tmp_path: Path, state: HealthState, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "health.json"
    store.save(path, HealthState(boot_id="old"))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in store.save(path, state)
    monkeypatch.undo()
    assert store.load(path).state.boot_id == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["health.json"]


def test_a_directory_in_the_way_is_reported(tmp_path: Path, state: HealthState) -> None:
    path = tmp_path / "health.json"
    path.mkdir()
    assert "cannot be read" in store.load(path).note
    assert "could not be saved" in store.save(path, state)


def test_requests_are_given_once_oldest_first(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    assert store.take_requests(path) == ((), "")
    for number in range(3):
        store.request_clear(path, OperatorClear(f"gpu-{number}", by="me"))
        os.utime(max((tmp_path / "health.json.requests").iterdir(), key=os.path.getmtime), (number, number))
    (tmp_path / "health.json.requests" / "bad.json").write_text("{")
    requests, problems = store.take_requests(path)
    assert [request.device for request in requests] == ["gpu-0", "gpu-1", "gpu-2"]
    assert "bad.json" in problems
    assert store.take_requests(path) == ((), "")
