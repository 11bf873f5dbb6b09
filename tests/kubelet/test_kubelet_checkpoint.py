"""The checkpoint file: durable, and damage costs as little as possible."""

import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from kubelet_fakes import gpu_nodes, uid

from gpunode.files import write_atomic
from gpunode.kubelet.checkpoint import MAX_BYTES, QUARANTINED, CheckpointFile, Entry, HeldDevice, Loaded, State
from gpunode.kubelet.config import Interval, Mps, TimeSlicing
from gpunode.model.injection import DeviceNode, DeviceNodes, Mount


def entry(n: int) -> Entry:
    return Entry(
        uid=uid(n), namespace="ns", name=f"claim-{n}", boot_id="b", state=State.COMPLETED,
        devices=(HeldDevice("gpu-0", "node-1", ("r",), gpu_nodes(0), share_id="s", consumed={"memory": "1Gi"}),),
    )  # fmt: skip


def write(path: Path, body: object) -> None:
    """A file with a right checksum and an unknown header field, whatever the body."""
    raw = msgspec.json.encode(body)
    path.write_bytes(msgspec.json.encode({"version": 1, "checksum": sha256(raw).hexdigest(), "n": 2}) + b"\n" + raw)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    file = CheckpointFile(tmp_path / "checkpoint.json")
    assert file.load().entries == {}
    entries = {uid(n): entry(n) for n in range(3)}
    file.save(entries)
    assert file.load().entries == entries
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.json"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda raw: b"", "no header line"),
        (lambda raw: raw[: len(raw) // 3], "no header line|checksum"),
        (lambda raw: raw[:-1], "checksum"),
        (lambda raw: raw.replace(b"claim-1", b"claim-9"), "checksum"),
        (lambda raw: b"\x00" * len(raw), "no header line"),
        (lambda raw: b"garbage\n" + raw, "header"),
        (lambda raw: raw.replace(b'"version":1', b'"version":99'), "version 99"),
        (lambda raw: b"\n".join(raw.split(b"\n")[1:]) * 2 + b"\n", "header"),
    ],
)
def test_a_damaged_file_is_set_aside_and_reported(tmp_path: Path, damage: Callable[[bytes], bytes], says: str) -> None:
    path = tmp_path / "checkpoint.json"
    file = CheckpointFile(path)
    file.save({uid(1): entry(1)})
    broken = damage(path.read_bytes())
    path.write_bytes(broken)
    loaded = file.load()
    assert loaded.entries == {} and loaded.lost
    (problem,) = loaded.problems
    assert re.search(says, problem) and "damaged-0" in problem
    assert (tmp_path / "checkpoint.json.damaged-0").read_bytes() == broken
    assert file.load().problems == ()


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    with (tmp_path / "checkpoint.json").open("wb") as file:
        file.truncate(MAX_BYTES + 2)
    assert "larger than" in CheckpointFile(tmp_path / "checkpoint.json").peek().problems[0]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with pytest.raises(OSError):
        write_atomic(tmp_path / "target", b"x", durable=False)
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_one_bad_entry_costs_its_own_claim_only(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    file = CheckpointFile(path)
    file.save({uid(1): entry(1), uid(2): entry(2)})
    body = msgspec.json.decode(path.read_bytes().split(b"\n", 1)[1])
    body["claims"][uid(1)]["state"] = "half-done"
    write(path, body)
    loaded = file.load()
    assert set(loaded.entries) == {uid(2)} and loaded.lost
    (problem,) = loaded.problems
    assert uid(1) in problem and "state" in problem
    assert file.load().problems == ()


def test_a_look_changes_nothing(tmp_path: Path) -> None:
    file = CheckpointFile(tmp_path / "checkpoint.json")
    assert file.peek() == Loaded(missing=True)
    file.save({uid(1): entry(1)})
    assert file.peek() == file.load()
    (tmp_path / "checkpoint.json").write_bytes(b"broken")
    assert file.peek().lost and "damaged" in file.peek().problems[0]
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.json"]


def test_files_set_aside_do_not_pile_up(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    for n in range(QUARANTINED + 3):
        path.write_bytes(b"broken %d" % n)
        CheckpointFile(path).load()
    assert len(list(tmp_path.glob("*.damaged-*"))) == QUARANTINED


def test_fields_of_a_newer_program_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    body = msgspec.to_builtins({"claims": {uid(1): entry(1)}, "later": 1})
    body["claims"][uid(1)]["alsoLater"] = {"x": []}
    write(path, body)
    assert CheckpointFile(path).load().entries == {uid(1): entry(1)}


# Written by the first release; never to be changed, only added to.
RELEASED = {
    1: (
        b'{"version":1,"checksum":"CHECKSUM"}\n'
        b'{"claims":{"00000001-0000-4000-8000-000000000000":{"uid":"00000001-0000-4000-8000-000000000000",'
        b'"namespace":"ns","name":"claim-1","boot_id":"b","state":"completed","devices":[{"device":"gpu-0",'
        b'"pool":"node-1","requests":["r"],"nodes":{"uuid":"GPU-0","pci":"0000:00:00.0","nodes":[{"host_path":'
        b'"/host/nvidia0","container_path":"/dev/nvidia0"}],"control":[{"host_path":"/host/nvidiactl",'
        b'"container_path":"/dev/nvidiactl"}],"env":{"GPUNODE_GPU_0":"GPU-0"},"mounts":[{"host_path":"/a",'
        b'"container_path":"/b","options":["ro"]}],"parent":"gpu-1","dynamic":true},"admin":true,"share_id":"s",'
        b'"consumed":{"memory":"1Gi"},"sharing":{"strategy":"TimeSlicing","interval":"Long"}},{"device":"gpu-1",'
        b'"pool":"node-1","requests":["r"],"nodes":{"uuid":"GPU-1"},"sharing":{"strategy":"MPS",'
        b'"active_thread_percentage":5}}]}},"lost":true}'
    )
}


@pytest.mark.parametrize("version", RELEASED)
def test_files_of_every_release_are_read(tmp_path: Path, version: int) -> None:
    body = RELEASED[version].split(b"\n", 1)[1]
    path = tmp_path / "checkpoint.json"
    path.write_bytes(RELEASED[version].replace(b"CHECKSUM", sha256(body).hexdigest().encode()))
    loaded = CheckpointFile(path).load()
    assert loaded.problems == () and loaded.lost
    first, second = loaded.entries[uid(1)].devices
    assert first == HeldDevice(
        "gpu-0", "node-1", ("r",),
        DeviceNodes(
            "GPU-0", "0000:00:00.0", nodes=(DeviceNode("/host/nvidia0", "/dev/nvidia0"),),
            control=(DeviceNode("/host/nvidiactl", "/dev/nvidiactl"),), env={"GPUNODE_GPU_0": "GPU-0"},
            mounts=(Mount("/a", "/b", ("ro",)),), parent="gpu-1", dynamic=True,
        ),
        admin=True, share_id="s", consumed={"memory": "1Gi"}, sharing=TimeSlicing(Interval.LONG),
    )  # fmt: skip
    assert second.sharing == Mps(active_thread_percentage=5)
