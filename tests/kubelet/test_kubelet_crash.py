"""kill -9 at every step that persists anything; the steps come from running the code, not from a list."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kubelet_fakes import GPUS, PARTITIONS, Machine, claim, gpu_config, ref

from gpunode.kubelet.checkpoint import Entry
from gpunode.kubelet.ledger import Ledger
from gpunode.kubelet.seams import Steps
from gpunode.model.resource import ResourceClaim

PLAIN = claim(1, GPUS[0], GPUS[1])
SLICED = claim(2, GPUS[2], GPUS[3], config=[gpu_config()])
PARTED = claim(3, PARTITIONS[0])
THROUGH_MPS = claim(4, GPUS[4], GPUS[6], config=[gpu_config("MPS", mps={"activeThreadPercentage": 50})])
PARTED_MPS = claim(5, PARTITIONS[1], config=[gpu_config("MPS", "MigConfig")])
OLD = claim(9, GPUS[5], config=[gpu_config()])  # prepared before, and to stay untouched
CLAIMS = [PLAIN, SLICED, PARTED, THROUGH_MPS, PARTED_MPS]


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: a kill loses nothing there either, and fsync costs nothing."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kubelet-") as directory:
        yield Path(directory)


class Killed(BaseException):
    """What a kill looks like from inside: no handler for errors may run."""


def prepare(ledger: Ledger, claims: list[ResourceClaim]) -> None:
    answer, _ = ledger.prepare([(ref(c), c) for c in claims], tolerate_loss=True)
    assert all(isinstance(a, Entry) for a in answer.values()), answer


def unprepare(ledger: Ledger, claims: list[ResourceClaim]) -> None:
    answer, _ = ledger.unprepare([ref(c) for c in claims])
    assert set(answer.values()) == {None}


Operation = Callable[[Ledger, list[ResourceClaim]], None]
OPERATIONS: dict[str, tuple[Operation, Operation | None]] = {
    # name: (the call that is killed, what was done before it)
    "prepare": (prepare, None),
    "unprepare": (unprepare, prepare),
    "repeat": (prepare, prepare),
}


def machine(tmp: Path, operation: str) -> Machine:
    node = Machine(tmp, mps=True)
    prepare(node.ledger(), [OLD])
    if before := OPERATIONS[operation][1]:
        before(node.ledger(), CLAIMS)
    if operation == "repeat":  # after a reboot of the tmpfs only: every file has to be written again
        for file in node.paths.cdi.iterdir():
            file.unlink()
    return node


def fork(work: Callable[[], None]) -> int:
    """Run work in a child; returns its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def killer(at: int, how: str) -> Steps:
    count = iter(range(1_000_000))

    def step(_name: str) -> None:
        if next(count) == at:
            if how == "kill -9":
                os.kill(os.getpid(), signal.SIGKILL)
            raise Killed

    return step


def killed_at(node: Machine, work: Callable[[Ledger], object], at: int, how: str) -> bool:
    """Run work, killed before its step number `at`; False when it has fewer steps."""
    ledger = node.ledger(killer(at, how))
    if how == "kill -9":
        status = fork(lambda: (work(ledger), None)[1])
        assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
        return os.WIFSIGNALED(status)
    try:
        work(ledger)
    except Killed:
        return True
    return False


def steps_of(node: Machine, work: Callable[[Ledger], object]) -> list[str]:
    names: list[str] = []
    work(node.ledger(names.append))
    return names


def finish_and_check(node: Machine, operation: str) -> None:
    """What a restarted plugin and a kubelet that asks again make of it."""
    node.ledger().repair()
    node.check()
    OPERATIONS[operation][0](node.ledger(), CLAIMS)
    entries = node.check()
    assert set(entries) == {OLD.metadata.uid} | (
        set() if operation == "unprepare" else {c.metadata.uid for c in CLAIMS}
    )


@pytest.mark.parametrize("how", ["raise", "kill -9"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_killed_at_every_step(tmp_path: Path, operation: str, how: str) -> None:
    work = OPERATIONS[operation][0]
    names = steps_of(machine(tmp_path / "all", operation), lambda ledger: work(ledger, CLAIMS))
    assert len(names) > 3, names
    for at, name in enumerate(names):
        node = machine(tmp_path / str(at), operation)
        assert killed_at(node, lambda ledger: work(ledger, CLAIMS), at, how), name
        finish_and_check(node, operation)
    assert not killed_at(machine(tmp_path / "end", operation), lambda ledger: work(ledger, CLAIMS), len(names), how)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_other_instance_goes_on_without_a_restart(tmp_path: Path, operation: str) -> None:
    """During a rolling update the kubelet calls the survivor, which does not run its start-up repair again."""
    work = OPERATIONS[operation][0]
    names = steps_of(machine(tmp_path / "all", operation), lambda ledger: work(ledger, CLAIMS))
    for at in range(len(names)):
        node = machine(tmp_path / str(at), operation)
        assert killed_at(node, lambda ledger: work(ledger, CLAIMS), at, "raise")
        work(node.ledger(), CLAIMS)
        node.check()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_killed_again_while_repairing(tmp_path: Path, operation: str) -> None:
    work = OPERATIONS[operation][0]
    names = steps_of(machine(tmp_path / "all", operation), lambda ledger: work(ledger, CLAIMS))
    for at in range(len(names)):
        for second in range(100):
            node = machine(tmp_path / f"{at}-{second}", operation)
            assert killed_at(node, lambda ledger: work(ledger, CLAIMS), at, "raise")
            again = killed_at(node, lambda ledger: ledger.repair(), second, "raise")
            finish_and_check(node, operation)
            if not again:
                break
        else:
            pytest.fail("repair has more steps than this test looks at")


@pytest.mark.parametrize("operation", ["prepare", "unprepare"])
def test_nobody_asks_again_after_the_kill(tmp_path: Path, operation: str) -> None:
    """The pod was deleted meanwhile: the kubelet only unprepares, or not even that."""
    work = OPERATIONS[operation][0]
    names = steps_of(machine(tmp_path / "all", operation), lambda ledger: work(ledger, CLAIMS))
    for at in range(len(names)):
        node = machine(tmp_path / str(at), operation)
        assert killed_at(node, lambda ledger: work(ledger, CLAIMS), at, "raise")
        unprepare(node.ledger(), CLAIMS)
        assert set(node.check()) == {OLD.metadata.uid}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_rebooted_after_the_kill(tmp_path: Path, operation: str) -> None:
    work = OPERATIONS[operation][0]
    names = steps_of(machine(tmp_path / "all", operation), lambda ledger: work(ledger, CLAIMS))
    for at in range(len(names)):
        node = machine(tmp_path / str(at), operation)
        assert killed_at(node, lambda ledger: work(ledger, CLAIMS), at, "raise")
        node.reboot()
        node.ledger().repair()
        assert node.check() == {}
        prepare(node.ledger(), [*CLAIMS, OLD])
        assert len(node.check()) == len(CLAIMS) + 1


def test_every_change_on_disk_has_a_fault_point_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the matrix itself: a rename or unlink added without a step would never be tested."""
    fresh = [False]
    changes: list[str] = []

    def step(_name: str) -> None:
        fresh[0] = True

    def watched(name: str) -> None:
        original = getattr(Path, name)

        def change(self: Path, *args: object, **kwargs: object) -> object:
            assert fresh[0] or not self.exists(), f"{name} of {self} without a step before it"
            fresh[0] = False
            changes.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(Path, name, change)

    node = machine(tmp_path, "prepare")
    for name in ("replace", "unlink", "touch"):
        watched(name)
    prepare(node.ledger(step), CLAIMS)
    unprepare(node.ledger(step), CLAIMS)
    assert {"replace", "unlink", "touch"} == set(changes)
