"""Partitions, sharing, admin access, and hardware that does not obey."""

import asyncio
import dataclasses
import shutil
import subprocess
import sys
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kubelet_fakes import (
    DRIVER,
    GPUS,
    PARTITIONS,
    FakeApi,
    Machine,
    cdi_files,
    claim,
    gpu_config,
    make_engine,
    ref,
    result,
    until,
)

from gpunode.kubelet.checkpoint import Entry
from gpunode.kubelet.effects import Effects
from gpunode.kubelet.errors import ClaimError, ErrorKind
from gpunode.kubelet.lock import NodeLock
from gpunode.model.errors import HardwareError
from gpunode.model.injection import DeviceNodes
from gpunode.model.resource import ResourceClaim

SHARES = [f"0f0f0f0f-000{n}-4000-8000-000000000000" for n in range(3)]


@pytest.fixture
def node(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def prepare(node: Machine, *claims: ResourceClaim) -> list[Entry | ClaimError]:
    answer, _ = node.ledger().prepare([(ref(c), c) for c in claims], tolerate_loss=False)
    return [answer[c.metadata.uid] for c in claims]


def unprepare(node: Machine, *claims: ResourceClaim) -> list[ClaimError | None]:
    answer, _ = node.ledger().unprepare([ref(c) for c in claims])
    return [answer[c.metadata.uid] for c in claims]


def fails(answer: Any, kind: ErrorKind) -> str:
    assert isinstance(answer, ClaimError), answer
    assert answer.kind is kind
    return answer.message


def test_a_partition_is_made_given_and_removed(node: Machine) -> None:
    one = claim(1, PARTITIONS[0])
    (entry,) = prepare(node, one)
    assert isinstance(entry, Entry)
    assert entry.devices[0].nodes.uuid == "MIG-0"
    ((_, spec),) = cdi_files(node.tmp).items()
    assert spec["devices"][0]["containerEdits"]["deviceNodes"][0]["path"] == "/dev/cap0"
    assert prepare(node, one) == [entry]
    node.check()
    assert unprepare(node, one) == [None]
    assert node.check() == {}


def test_a_partition_that_vanished_is_made_again(node: Machine) -> None:
    one = claim(1, PARTITIONS[0])
    prepare(node, one)
    for file in node.partitioner.directory.iterdir():
        file.unlink()
    prepare(node, one)
    assert len(node.check()) == 1


def test_a_half_made_partition_and_a_stray_one_are_removed(node: Machine) -> None:
    (node.partitioner.directory / f"{PARTITIONS[0]}.gi").touch()
    repairs, _ = node.ledger().repair()
    assert repairs.strays_removed == (PARTITIONS[0],)
    node.check()


def test_a_whole_gpu_and_its_partition_exclude_each_other(node: Machine) -> None:
    part, whole = claim(1, PARTITIONS[0]), claim(2, GPUS[7])
    prepare(node, part)
    assert PARTITIONS[0] in fails(prepare(node, whole)[0], ErrorKind.HELD)
    unprepare(node, part)
    prepare(node, whole)
    assert GPUS[7] in fails(prepare(node, part)[0], ErrorKind.HELD)
    node.check()


def test_hardware_that_fails_costs_its_claim_only_and_leaves_nothing(node: Machine) -> None:
    node.partitioner.broken.add(PARTITIONS[1])
    bad, good = claim(1, PARTITIONS[0], PARTITIONS[1]), claim(2, GPUS[0], config=[gpu_config()])
    answer = prepare(node, bad, good)
    assert "Unknown Error" in fails(answer[0], ErrorKind.HARDWARE)
    assert isinstance(answer[0], ClaimError) and answer[0].devices == (PARTITIONS[1],)
    assert isinstance(answer[1], Entry)
    node.partitioner.broken.clear()
    node.ledger().repair()
    assert set(node.check()) == {good.metadata.uid}
    assert isinstance(prepare(node, bad)[0], Entry)
    node.check()


def test_a_partition_in_use_is_released_later(node: Machine) -> None:
    one = claim(1, PARTITIONS[0])
    prepare(node, one)
    node.partitioner.in_use.add(PARTITIONS[0])
    assert "In use" in fails(unprepare(node, one)[0], ErrorKind.HARDWARE)
    assert cdi_files(node.tmp) == {}  # no new container gets it
    assert "ns/claim-1" in fails(prepare(node, claim(2, PARTITIONS[0]))[0], ErrorKind.HELD)
    node.partitioner.in_use.clear()
    assert unprepare(node, one) == [None]
    assert node.check() == {}


def test_sharing_is_set_once_and_reset_by_the_last_share(node: Machine) -> None:
    config = [gpu_config("MPS", mps={"activeThreadPercentage": 50})]
    one, two = (claim(n, result(GPUS[0], shareID=SHARES[n]), config=config) for n in (1, 2))
    other = claim(3, result(GPUS[0], shareID=SHARES[0]), config=[gpu_config()])
    prepare(node, one, two)
    assert "other settings" in fails(prepare(node, other)[0], ErrorKind.HELD)
    unprepare(node, one)
    assert set(node.check()) == {two.metadata.uid}
    unprepare(node, two)
    assert node.check() == {}
    assert isinstance(prepare(node, other)[0], Entry)
    node.check()


def test_admin_access_looks_without_touching(node: Machine) -> None:
    user = claim(1, PARTITIONS[0], GPUS[0], config=[gpu_config()])
    admin = claim(2, result(PARTITIONS[0], adminAccess=True), result(GPUS[0], adminAccess=True))
    assert "nothing to look at" in fails(prepare(node, admin)[0], ErrorKind.UNKNOWN_DEVICE)
    prepare(node, user)
    (entry,) = prepare(node, admin)
    assert isinstance(entry, Entry)
    assert [d.nodes.uuid for d in entry.devices] == ["MIG-0", "GPU-0"]
    assert all(d.sharing is None for d in entry.devices)
    unprepare(node, admin)
    node.check()
    prepare(node, admin)
    unprepare(node, user)
    assert list(node.partitioner.existing()) == []


def test_what_the_node_does_not_offer_is_refused_before_anything_is_written(node: Machine) -> None:
    book = dataclasses.replace(node.ledger(), effects=Effects())
    for asked in (claim(1, PARTITIONS[0]), claim(2, GPUS[0], config=[gpu_config()])):
        answer, entries = book.prepare([(ref(asked), asked)], tolerate_loss=False)
        fails(answer[asked.metadata.uid], ErrorKind.CONFIG)
        assert entries == {}


def test_a_bad_configuration_is_refused_with_its_path(node: Machine) -> None:
    bad = claim(1, GPUS[0], config=[gpu_config("Timeslicing")])
    message = fails(prepare(node, bad)[0], ErrorKind.CONFIG)
    assert "status.allocation.devices.config[0].opaque.parameters.sharing.strategy" in message


def test_a_changed_configuration_needs_release_first(node: Machine) -> None:
    prepare(node, claim(1, GPUS[0], config=[gpu_config()]))
    fails(prepare(node, claim(1, GPUS[0], config=[gpu_config("MPS")]))[0], ErrorKind.HELD)


def damage(node: Machine) -> None:
    path = node.paths.checkpoint(DRIVER)
    path.write_bytes(path.read_bytes()[:-5])


async def test_a_damaged_checkpoint_is_rebuilt_from_live_claims_before_anything_is_prepared(node: Machine) -> None:
    claims = [
        claim(1, GPUS[0], config=[gpu_config()]),
        claim(2, PARTITIONS[0]),
        claim(3, GPUS[1]),
    ]
    api = FakeApi(*claims)

    async def allocated() -> list[ResourceClaim]:
        if api.fail:
            raise api.fail
        return list(api.claims.values())

    engine = make_engine(
        node.tmp, api, devices=node.devices, allocated=allocated, notify=node.notices.append,
        partitioner=node.partitioner, sharing=node.sharing,
    )  # fmt: skip
    await engine.prepare([ref(c) for c in claims])
    before = node.check()
    damage(node)
    rival = api.put(claim(4, GPUS[1]))
    api.fail = ConnectionError("API server away")
    assert (await engine.recover()).lost
    assert node.partitioner.existing()  # not taken for a stray while the book is incomplete
    api.fail = None
    held = (await engine.prepare([ref(rival)]))[rival.metadata.uid]
    assert "ns/claim-3" in fails(held, ErrorKind.HELD)
    assert node.check() == before
    assert [n.reason for n in node.notices] == ["CheckpointDamaged", "CheckpointRebuilt"]
    assert (await engine.recover()).lost is False


def test_admin_access_is_answered_again_after_its_partition_went(node: Machine) -> None:
    """The kubelet asks again after its restart: what the pod already has is not refused then."""
    owner, admin = claim(1, PARTITIONS[0]), claim(2, result(PARTITIONS[0], adminAccess=True))
    prepare(node, owner)
    (entry,) = prepare(node, admin)
    unprepare(node, owner)
    assert prepare(node, admin) == [entry]


async def test_admin_access_comes_back_after_what_it_looks_at(node: Machine) -> None:
    admin, user = claim(1, result(PARTITIONS[0], adminAccess=True)), claim(2, PARTITIONS[0])  # the older one looks

    async def allocated() -> list[ResourceClaim]:
        return [admin, user]

    engine = make_engine(
        node.tmp, FakeApi(admin, user), devices=node.devices, allocated=allocated, partitioner=node.partitioner,
        notify=node.notices.append,
    )  # fmt: skip
    await engine.prepare([ref(user)])
    await engine.prepare([ref(admin)])
    before = node.check()
    damage(node)
    await engine.recover()
    await engine.adopt_lost()
    assert node.check() == before and len(before) == 2


async def test_a_checkpoint_that_was_removed_is_rebuilt_too(node: Machine) -> None:
    one = claim(1, GPUS[0])

    async def allocated() -> list[ResourceClaim]:
        return [one]

    engine = make_engine(node.tmp, FakeApi(one), allocated=allocated, notify=node.notices.append)
    await engine.prepare([ref(one)])
    before = node.check()
    shutil.rmtree(node.paths.plugin_dir(DRIVER))
    node.paths.plugin_dir(DRIVER).mkdir()
    rival = claim(2, GPUS[0])
    answer = await make_engine(node.tmp, FakeApi(rival), allocated=allocated).prepare([ref(rival)])
    assert "ns/claim-1" in fails(answer[rival.metadata.uid], ErrorKind.HELD)
    assert node.check() == before


async def test_nothing_is_prepared_while_the_rebuild_is_impossible(node: Machine) -> None:
    one = claim(1, GPUS[0])

    async def away() -> list[ResourceClaim]:
        raise ConnectionError("API server away")

    engine = make_engine(node.tmp, FakeApi(one), allocated=away)
    await engine.prepare([ref(one)])
    damage(node)
    assert "listing" in fails((await engine.prepare([ref(one)]))[one.metadata.uid], ErrorKind.API)
    assert await engine.unprepare([ref(one)]) == {one.metadata.uid: None}


async def test_one_bad_entry_is_brought_back_without_touching_the_others(node: Machine) -> None:
    one, two = claim(1, GPUS[0]), claim(2, GPUS[1])

    async def allocated() -> list[ResourceClaim]:
        return [one, two]

    engine = make_engine(node.tmp, FakeApi(one, two), allocated=allocated, notify=node.notices.append)
    await engine.prepare([ref(one), ref(two)])
    before = node.check()
    path = node.paths.checkpoint(DRIVER)
    body = path.read_bytes().split(b"\n", 1)[1].replace(b'"state":"completed"', b'"state":"odd"', 1)
    path.write_bytes(msgspec.json.encode({"version": 1, "checksum": sha256(body).hexdigest()}) + b"\n" + body)
    assert await engine.prepare([ref(two)])
    assert node.check() == before
    assert one.metadata.uid in node.notices[0].message


async def test_an_abandoned_call_still_ends_in_order(node: Machine) -> None:
    """The kubelet gives up on a call: the lock is kept until the work has ended, then others go on."""
    one, two = claim(1, PARTITIONS[0]), claim(2, GPUS[0])
    entered, go = threading.Event(), threading.Event()

    def slow(name: str) -> None:
        if name.startswith("gpu instance"):
            entered.set()
            assert go.wait(10)

    node.partitioner.step = slow
    engine = make_engine(node.tmp, FakeApi(one, two), devices=node.devices, partitioner=node.partitioner)
    call = asyncio.create_task(engine.prepare([ref(one)]))
    await until(entered.is_set)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    later = asyncio.create_task(engine.prepare([ref(two)]))
    go.set()
    await later
    assert set(node.check()) == {one.metadata.uid, two.metadata.uid}
    engine.close()


async def test_a_drivers_surprise_is_its_own_claims_error(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a HardwareError: a bug, or an errno of the driver that must not pass for one of our own files."""
    part, whole = claim(1, PARTITIONS[0]), claim(2, GPUS[0])

    def surprise(_device: str) -> None:
        raise OSError("No data available")

    monkeypatch.setattr(node.partitioner, "create", surprise)
    answer = prepare(node, part, whole)
    assert "No data available" in fails(answer[0], ErrorKind.HARDWARE)
    assert isinstance(answer[1], Entry)
    assert set(node.check()) == {whole.metadata.uid}


def test_what_cannot_be_rolled_back_is_held_told_and_repaired_later(node: Machine) -> None:
    """The second partition cannot be made, and then the first is busy."""
    node.partitioner.broken.add(PARTITIONS[1])
    node.partitioner.in_use.add(PARTITIONS[0])
    one = claim(1, *PARTITIONS)
    assert "Unknown Error" in fails(prepare(node, one)[0], ErrorKind.HARDWARE)
    assert cdi_files(node.tmp) == {}
    assert node.ledger().repair()[0].rolled_back == 0
    assert "ns/claim-1" in fails(prepare(node, claim(2, PARTITIONS[0]))[0], ErrorKind.HELD)
    node.partitioner.in_use.clear()
    assert node.ledger().repair()[0].rolled_back == 1
    assert node.check() == {}


def test_a_stray_that_cannot_be_removed_is_told(node: Machine) -> None:
    (node.partitioner.directory / f"{PARTITIONS[0]}.gi").touch()
    node.partitioner.in_use.add(PARTITIONS[0])
    assert node.ledger().repair()[0].strays_removed == ()
    assert [n.reason for n in node.notices] == ["HardwareUnrepaired"] and "In use" in node.notices[0].message


def test_a_stray_that_cannot_be_removed_keeps_no_other(node: Machine) -> None:
    for name in PARTITIONS:
        (node.partitioner.directory / f"{name}.gi").touch()
    for name in GPUS[:2]:
        (node.sharing.directory / name).touch()
    node.partitioner.in_use.add(min(PARTITIONS))
    node.sharing.broken.add(GPUS[0])
    assert node.ledger().repair()[0].strays_removed == (GPUS[1], max(PARTITIONS))
    assert [n.reason for n in node.notices] == ["HardwareUnrepaired"]


async def test_a_rebuild_that_hardware_refuses_is_tried_again(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    one = claim(1, PARTITIONS[0])

    async def allocated() -> list[ResourceClaim]:
        return [one]

    engine = make_engine(
        node.tmp, FakeApi(one), devices=node.devices, allocated=allocated, partitioner=node.partitioner,
        notify=node.notices.append,
    )  # fmt: skip
    await engine.prepare([ref(one)])
    before = node.check()
    damage(node)
    await engine.recover()

    def surprise() -> None:
        raise HardwareError("GPU is lost")

    with monkeypatch.context() as patched:
        patched.setattr(node.partitioner, "existing", surprise)
        await engine.adopt_lost()
        assert await engine.entries() == {} and (await engine.recover()).lost
    await engine.adopt_lost()
    assert node.check() == before


async def test_an_agent_that_fails_at_being_told_fails_no_claim(node: Machine) -> None:
    one = claim(1, GPUS[0])

    def deaf(_told: object) -> None:
        raise RuntimeError("deaf")

    engine = make_engine(node.tmp, FakeApi(one), notify=deaf, changed=deaf)
    node.paths.checkpoint(DRIVER).write_bytes(b"broken")
    assert not isinstance((await engine.prepare([ref(one)]))[one.metadata.uid], ClaimError)


async def test_devices_that_cannot_be_told_fail_the_call_and_not_the_plugin(node: Machine) -> None:
    one = claim(1, GPUS[0])
    broken = [True]

    def devices() -> dict[str, DeviceNodes]:
        if broken[0]:
            raise RuntimeError("inventory")
        return node.devices()

    engine = make_engine(node.tmp, FakeApi(one), devices=devices)
    fails((await engine.prepare([ref(one)]))[one.metadata.uid], ErrorKind.INTERNAL)
    broken[0] = False
    assert not isinstance((await engine.prepare([ref(one)]))[one.metadata.uid], ClaimError)


async def test_a_lock_that_another_process_keeps_is_waited_for_and_then_told(node: Machine) -> None:
    one = claim(1, GPUS[0])
    engine = make_engine(node.tmp, FakeApi(one), lock=NodeLock(node.paths.lock(DRIVER), timeout_s=0.05))
    script = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print(flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(node.paths.lock(DRIVER))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        assert other.stdin and other.stdout and other.stdout.readline()
        message = fails((await engine.prepare([ref(one)]))[one.metadata.uid], ErrorKind.BUSY)
        assert "second plugin instance" in message
        other.kill()
    assert not isinstance((await engine.prepare([ref(one)]))[one.metadata.uid], ClaimError)


async def test_a_disk_that_refuses_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    one = claim(1, GPUS[0])
    engine = make_engine(tmp_path, FakeApi(one))
    directory = Machine(tmp_path).paths.plugin_dir(DRIVER)
    (directory / ".checkpoint.json.tmp").mkdir()  # as good as a full disk: the file cannot be written
    fails((await engine.prepare([ref(one)]))[one.metadata.uid], ErrorKind.STORAGE)
    (directory / ".checkpoint.json.tmp").rmdir()
    assert not isinstance((await engine.prepare([ref(one)]))[one.metadata.uid], ClaimError)
    (directory / ".checkpoint.json.tmp").mkdir()
    fails((await engine.unprepare([ref(one)]))[one.metadata.uid], ErrorKind.STORAGE)
    (directory / ".checkpoint.json.tmp").rmdir()
    assert await engine.unprepare([ref(one)]) == {one.metadata.uid: None}
    assert Machine(tmp_path).check() == {}


async def test_a_cdi_directory_that_refuses_is_told_to_the_claim(tmp_path: Path) -> None:
    one = claim(1, GPUS[0])
    engine = make_engine(tmp_path, FakeApi(one), notify=lambda _: None)
    (tmp_path / "cdi").touch()
    fails((await engine.prepare([ref(one)]))[one.metadata.uid], ErrorKind.STORAGE)
    (tmp_path / "cdi").unlink()
    assert not isinstance((await engine.prepare([ref(one)]))[one.metadata.uid], ClaimError)
