"""The agent's side of MPS: what is wanted, what is refused and why, and what is undone."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kubelet_fakes import (
    GPUS,
    PARTITIONS,
    FakeApi,
    Machine,
    claim,
    gpu_config,
    make_engine,
    ref,
    result,
    with_partitions,
)

from gpunode.kubelet.cdi import spec
from gpunode.kubelet.checkpoint import Entry
from gpunode.kubelet.config import Mps, TimeSlicing
from gpunode.kubelet.errors import ClaimError, ErrorKind
from gpunode.kubelet.guard import BlackHoleGuard
from gpunode.kubelet.mps.control import MpsDaemons
from gpunode.kubelet.mps.daemon import settings
from gpunode.kubelet.mps.files import DaemonState, Phase, Wanted, read
from gpunode.kubelet.prepare import PrepareEngine
from gpunode.kubelet.reconcile import SecondLook
from gpunode.kubelet.seams import Notice
from gpunode.model.errors import HardwareError
from gpunode.model.resource import ResourceClaim

MPS = [gpu_config("MPS", mps={"activeThreadPercentage": 25, "pinnedDeviceMemoryLimit": "10Gi"})]
MIG_MPS = gpu_config("MPS", "MigConfig")


@pytest.fixture
def node(tmp_path: Path) -> Machine:
    return Machine(tmp_path, mps=True)


def prepare(node: Machine, one: ResourceClaim) -> Entry | ClaimError:
    return node.ledger().prepare([(ref(one), one)], tolerate_loss=True)[0][one.metadata.uid]


def unprepare(node: Machine, one: ResourceClaim) -> ClaimError | None:
    return node.ledger().unprepare([ref(one)])[0][one.metadata.uid]


def refused(answer: object, kind: ErrorKind, *words: str) -> None:
    assert isinstance(answer, ClaimError) and answer.kind is kind, answer
    assert all(word in answer.message for word in words), answer.message


def failed(message: str, **more: Any) -> DaemonState:
    return DaemonState(phase=Phase.FAILED, wanted=None, keeper="", message=message, **more)


def test_a_claim_wants_one_daemon_for_its_gpus_and_gets_its_pipes(node: Machine) -> None:
    one = claim(1, GPUS[2], GPUS[0], config=MPS)
    entry = prepare(node, one)
    assert isinstance(entry, Entry)
    node.check()
    assert read(node.keeper.files.wanted(GPUS[0]), Wanted) == Wanted(
        devices={GPUS[0]: "GPU-0", GPUS[2]: "GPU-2"}, exclusive=("GPU-0", "GPU-2"),
        thread_percentage=25, memory_bytes=10 * 2**30,
    )  # fmt: skip
    place = node.keeper.files.daemon(GPUS[0])
    for device in spec(entry)["devices"]:
        edits = device["containerEdits"]
        assert "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps" in edits["env"]
        assert {m["containerPath"]: m["hostPath"] for m in edits["mounts"]} == {
            "/tmp/nvidia-mps": str(place / "tmp/nvidia-mps"),
            "/dev/shm": str(place / "shm"),
        }
        assert all("rw" in m["options"] for m in edits["mounts"])
    assert unprepare(node, one) is None
    assert node.check() == {}
    assert not place.exists() and node.modes.set() == set()


def test_a_partition_has_a_daemon_of_its_own_and_no_compute_mode(node: Machine) -> None:
    one = claim(1, PARTITIONS[0], config=[MIG_MPS])
    assert isinstance(prepare(node, one), Entry)
    assert read(node.keeper.files.wanted(PARTITIONS[0]), Wanted) == Wanted(devices={PARTITIONS[0]: "MIG-0"})
    node.check()
    assert unprepare(node, one) is None
    assert node.check() == {}


@pytest.mark.parametrize(
    ("config", "devices", "words"),
    [
        ([MIG_MPS], PARTITIONS, "one partition a claim"),
        ([*MPS, MIG_MPS], (GPUS[0], PARTITIONS[0]), "same settings"),
        ([gpu_config("MPS"), MIG_MPS], (GPUS[0], PARTITIONS[0]), "one partition a claim"),
        ([gpu_config("MPS", mps={"pinnedDeviceMemoryLimit": "1Ei"})], GPUS[:1], "more than any GPU has"),
    ],
)
def test_what_one_daemon_cannot_serve_is_refused(
    node: Machine, config: list[Any], devices: tuple[str, ...], words: str
) -> None:
    refused(prepare(node, claim(1, *devices, config=config)), ErrorKind.CONFIG, words)
    assert node.check() == {}


def test_shares_of_a_gpu_have_one_daemon_which_the_last_of_them_ends(node: Machine) -> None:
    first = claim(1, result(GPUS[0], shareID="s1"), config=MPS)
    second = claim(2, result(GPUS[0], shareID="s2"), config=MPS)
    wider = claim(3, result(GPUS[0], shareID="s3"), result(GPUS[1], shareID="s4"), config=MPS)
    assert isinstance(prepare(node, first), Entry)
    assert isinstance(prepare(node, second), Entry)
    refused(prepare(node, wider), ErrorKind.HELD, "through MPS", "claims of their own")
    assert unprepare(node, first) is None
    assert set(node.check()) == {second.metadata.uid}
    assert unprepare(node, second) is None
    assert node.check() == {}


def test_a_keeper_that_hangs_is_not_waited_for_by_each_claim(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node lock is held meanwhile, and a call of the kubelet ends after 45 s."""
    claims = [claim(n, GPUS[n], config=MPS) for n in range(6)]
    running, asked = claims[:4], claims[4:]
    ledger = node.ledger()
    for one in running:
        ledger.prepare([(ref(one), one)], tolerate_loss=True)
    turn = node.keeper.turn
    looks: list[str] = []
    hung = True

    def keep(_seconds: float = 0.0) -> None:
        if hung:
            looks.append("")
            time.sleep(0.02)
        else:
            turn()

    monkeypatch.setattr(node.keeper, "turn", keep)
    ledger = node.ledger()
    for answer in ledger.unprepare([ref(one) for one in running])[0].values():
        refused(answer, ErrorKind.HARDWARE, "has not stopped")
    for answer in ledger.prepare([(ref(one), one) for one in asked], tolerate_loss=True)[0].values():
        refused(answer, ErrorKind.CONFIG, "keeper of this node does nothing")
    for _ in range(3):
        ledger.repair()
    assert 10 <= len(looks) <= 45, "two daemons are waited for, 0.2 s each, and the others once or twice"
    hung = False
    for one in asked:  # the kubelet tries again
        assert isinstance(ledger.prepare([(ref(one), one)], tolerate_loss=True)[0][one.metadata.uid], Entry)
    ledger.unprepare([ref(one) for one in claims])
    assert node.check() == {}


async def test_without_a_keeper_a_claim_is_refused_and_no_device_blamed(tmp_path: Path) -> None:
    node = Machine(tmp_path, mps=True)
    node.keeper.die()
    blamed: list[str] = []
    guard = BlackHoleGuard(lambda device, _: blamed.append(device), lambda _: None, 1)
    claims = [claim(n, GPUS[0], config=MPS) for n in range(1, 5)]
    engine = make_engine(tmp_path, FakeApi(*claims), sharing=node.control(), guard=guard)
    for one in claims:
        answer = (await engine.prepare([ref(one)]))[one.metadata.uid]
        refused(answer, ErrorKind.CONFIG, "no MPS keeper runs on this node", "daemonset/mps")
    assert blamed == [] and node.check() == {}
    node.keeper.start()
    assert not isinstance((await engine.prepare([ref(claims[0])]))[claims[0].metadata.uid], ClaimError)
    engine.close()


def test_a_keeper_that_dies_while_a_daemon_is_waited_for_is_no_devices_fault(node: Machine) -> None:
    node.keeper.turn = lambda _seconds=0.0: node.keeper.fd >= 0 and node.keeper.die()  # type: ignore[method-assign]
    refused(prepare(node, claim(1, GPUS[0], config=MPS)), ErrorKind.CONFIG, "no MPS keeper")


def test_a_daemon_that_fails_is_told_in_the_tools_words_and_undone(node: Machine) -> None:
    node.keeper.says[GPUS[0]] = failed("CUDA error: out of memory")
    one = claim(1, GPUS[0], config=MPS)
    answer = prepare(node, one)
    refused(answer, ErrorKind.HARDWARE, "the MPS daemon failed: CUDA error: out of memory")
    assert isinstance(answer, ClaimError) and answer.devices == (GPUS[0],)
    assert node.check() == {}
    node.keeper.says[GPUS[0]] = failed("it does not take the settings: no", refused=True)
    refused(prepare(node, one), ErrorKind.CONFIG, "does not take the settings")
    node.keeper.says[GPUS[0]] = DaemonState(phase=Phase.STARTING, wanted=None, keeper="")
    refused(prepare(node, one), ErrorKind.HARDWARE, "the MPS daemon is starting")
    assert node.check() == {}
    node.keeper.says.clear()
    assert isinstance(prepare(node, one), Entry)


def test_a_gpu_whose_mode_cannot_be_set_is_told_and_nothing_stays(node: Machine) -> None:
    node.modes.lost.add("GPU-1")
    refused(prepare(node, claim(1, GPUS[0], GPUS[1], config=MPS)), ErrorKind.HARDWARE, "GPU-1: GPU is lost")
    assert node.check() == {}


def test_a_prepared_claim_is_handed_out_again_only_while_its_daemon_serves(node: Machine) -> None:
    """The next pod of the claim waits; what runs already is left alone."""
    one = claim(1, GPUS[0], config=MPS)
    assert isinstance(first := prepare(node, one), Entry)
    node.keeper.says[GPUS[0]] = failed("it ended with status 3")
    node.keeper.turn()
    refused(prepare(node, one), ErrorKind.HARDWARE, "it ended with status 3")
    assert one.metadata.uid in node.ledger().load().entries and node.modes.set() == {"GPU-0"}
    node.keeper.die()
    refused(prepare(node, one), ErrorKind.CONFIG, "no MPS keeper")
    node.keeper.says.clear()
    node.keeper.start()  # what an earlier keeper said does not count
    assert prepare(node, one) == first
    node.check()


def test_release_does_not_wait_for_a_keeper_that_is_gone(node: Machine) -> None:
    one = claim(1, GPUS[0], config=MPS)
    prepare(node, one)
    node.keeper.die()
    assert unprepare(node, one) is None
    assert node.keeper.files.names_wanted() == [] and node.modes.set() == set()


def test_release_waits_for_the_daemon_to_end(node: Machine) -> None:
    one = claim(1, GPUS[0], config=MPS)
    prepare(node, one)
    turn, node.keeper.turn = node.keeper.turn, lambda _seconds=0.0: None  # type: ignore[method-assign]
    refused(unprepare(node, one), ErrorKind.HARDWARE, "has not stopped the daemon")
    assert node.modes.set() == {"GPU-0"}  # nobody else may use it before
    node.keeper.turn = turn  # type: ignore[method-assign]
    assert unprepare(node, one) is None
    assert node.check() == {}


def test_a_gpu_goes_from_one_strategy_to_the_other(node: Machine) -> None:
    """Also where the book was lost in between, so that nobody undid the first."""
    control = node.control()
    nodes = {GPUS[0]: with_partitions()[GPUS[0]]}
    control.apply("a", Mps(), nodes)
    control.apply("b", TimeSlicing(), nodes)
    assert node.keeper.files.names_wanted() == [] and node.modes.set() == set()
    control.apply("a", Mps(), nodes)
    assert list(node.sharing.directory.iterdir()) == []
    assert control.active() == {GPUS[0]}
    control.clear(GPUS[0])
    assert control.active() == frozenset()


def test_what_no_claim_owns_is_ended(node: Machine) -> None:
    """As after a reboot, or when the checkpoint is gone: a file of then, whose devices other claims have now."""
    node.control().apply("old", Mps(), {name: with_partitions()[name] for name in GPUS[:3]})
    assert isinstance(prepare(node, claim(1, GPUS[1], config=MPS)), Entry)
    assert isinstance(prepare(node, claim(2, GPUS[0])), Entry)
    assert node.control().active() == {GPUS[1]}
    node.ledger().repair()
    node.check()


def test_a_reboot_starts_anew(node: Machine) -> None:
    one = claim(1, GPUS[0], config=MPS)
    prepare(node, one)
    node.reboot()
    node.ledger().repair()
    assert node.check() == {} and node.keeper.files.names_wanted() == []
    assert isinstance(prepare(node, one), Entry)
    node.check()


@pytest.mark.parametrize("content", [b"", b"{", b'{"devices": {}}', b"[" * 10_000, b"x" * 70_000])
def test_a_damaged_file_is_set_aside_and_costs_nothing_else(node: Machine, content: bytes) -> None:
    one, other = claim(1, GPUS[0], config=MPS), claim(2, GPUS[1], config=MPS)
    prepare(node, one)
    prepare(node, other)
    node.keeper.files.wanted(GPUS[0]).write_bytes(content)
    assert node.control().active() == {GPUS[0], GPUS[1]}
    assert "damaged" in node.control().troubles()[GPUS[0]]
    node.keeper.turn = lambda _seconds=0.0: node.keeper.fd >= 0 and node.keeper.die()  # type: ignore[method-assign]
    assert unprepare(node, one) is None
    assert (node.keeper.files.root / "damaged.json").read_bytes() == content
    assert node.modes.set() == {"GPU-1"} and node.keeper.files.names_wanted() == [GPUS[1]]


def test_a_damaged_file_is_made_anew_when_its_devices_are_shared_again(node: Machine) -> None:
    one = claim(1, GPUS[0], config=MPS)
    prepare(node, one)
    node.keeper.files.wanted(GPUS[0]).write_bytes(b"?")
    refused(prepare(node, one), ErrorKind.HARDWARE, "is damaged")
    node.control().apply("u", Mps(25), {GPUS[0]: with_partitions()[GPUS[0]]})
    assert read(node.keeper.files.wanted(GPUS[0]), Wanted) is not None
    assert node.modes.set() == {"GPU-0"}


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/etc/passwd"), Path.mkdir, os.mkfifo])
def test_what_is_no_file_hides_no_other(node: Machine, make: Callable[[Path], None]) -> None:
    path = node.keeper.files.wanted(GPUS[5])
    path.parent.mkdir()
    make(path)
    with pytest.raises(ValueError, match="no file"):
        read(path, Wanted)
    control = MpsDaemons(node.keeper.files.root, node.modes)
    assert control.active() == {GPUS[5]}
    assert "damaged" in control.troubles()[GPUS[5]]
    control.confirm([GPUS[0]])


def test_who_only_looks_at_a_gpu_keeps_no_claim_from_sharing_it(node: Machine) -> None:
    """Found by the state machine: after damage both were brought back, in the other order both were refused."""
    looking = claim(1, result(GPUS[0], adminAccess=True))
    sharing = claim(2, result(GPUS[0], shareID="s1"), config=MPS)
    for one in (looking, sharing, looking):
        assert isinstance(prepare(node, one), Entry)
    node.check()


def test_a_damaged_file_that_no_claim_owns_is_told(node: Machine) -> None:
    node.keeper.files.wanted_dir.mkdir(parents=True)
    node.keeper.files.wanted(GPUS[0]).write_bytes(b"?")
    node.ledger().repair()
    (notice,) = node.notices
    assert notice.reason == "HardwareUnrepaired" and "nvidia-smi -c DEFAULT" in notice.message
    node.ledger().repair()
    assert len(node.notices) == 1


def test_troubles_name_the_devices_and_the_reason(node: Machine) -> None:
    control = node.control()
    control.apply("a", Mps(), {name: with_partitions()[name] for name in GPUS[:2]})
    assert control.troubles() == {}
    node.keeper.says[GPUS[0]] = failed("it ended with status -9")
    node.keeper.turn()
    assert set(control.troubles().values()) == {"the MPS daemon failed: it ended with status -9"}
    assert set(control.troubles()) == set(GPUS[:2])
    with pytest.raises(HardwareError, match="status -9"):
        control.confirm([GPUS[1]])
    control.confirm([GPUS[5]])
    node.keeper.die()
    assert "no MPS keeper" in control.troubles()[GPUS[0]]


async def test_the_second_look_tells_once_of_a_daemon_that_does_not_serve(tmp_path: Path) -> None:
    node = Machine(tmp_path, mps=True)
    one = claim(1, GPUS[0], config=MPS)
    api = FakeApi(one)
    engine: PrepareEngine = make_engine(tmp_path, api, sharing=node.control())
    await engine.prepare([ref(one)])
    told: list[Notice] = []
    look = SecondLook(engine, api, told.append)
    await look.run()
    assert told == []
    node.keeper.says[GPUS[0]] = failed("CUDA error: unknown")
    node.keeper.turn()
    for _ in range(3):
        await look.run()
    (notice,) = told
    assert notice.reason == "SharingNotWorking" and notice.claim == ("ns", "claim-1", one.metadata.uid)
    assert GPUS[0] in notice.message and "CUDA error: unknown" in notice.message
    node.keeper.says[GPUS[0]] = DaemonState(phase=Phase.READY, wanted=None, keeper="", restarts=1)
    node.keeper.turn()
    await look.run()
    await look.run()
    assert len(told) == 2 and "was started again (1)" in told[1].message
    node.keeper.die()
    await look.run()
    assert len(told) == 3 and "no MPS keeper" in told[2].message
    engine.close()


def test_every_step_of_a_claim_can_be_killed(node: Machine) -> None:
    """The crash tests kill at each of these: the note before the mode, the end of the daemon before the mode again."""
    steps: list[str] = []
    one = claim(1, GPUS[0], config=MPS)
    ledger = node.ledger(steps.append)
    ledger.prepare([(ref(one), one)], tolerate_loss=True)
    ledger.unprepare([ref(one)])
    wrote = [n for n, s in enumerate(steps) if s == f"rename {GPUS[0]}.json"]
    exclusive, opened = steps.index("make GPU-0 exclusive"), steps.index("open GPU-0 to all processes")
    removed = steps.index(f"remove {GPUS[0]}.json")
    assert wrote[0] < exclusive < wrote[1] < opened < removed


def test_settings_are_whole_mebibytes_for_each_device_by_its_number() -> None:
    two = {GPUS[0]: "GPU-0", GPUS[1]: "GPU-1"}
    assert settings(Wanted(devices=two)) == []
    assert settings(Wanted(devices=two, thread_percentage=5, memory_bytes=10 * 2**30 + 5)) == [
        "set_default_active_thread_percentage 5",
        "set_default_device_pinned_mem_limit 0 10240M",
        "set_default_device_pinned_mem_limit 1 10240M",
    ]
    assert settings(Wanted(devices=two, memory_bytes=1))[0].endswith(" 1M")
