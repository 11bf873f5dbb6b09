"""A state machine over everything that can happen to a node: whatever the order, nothing is lost or given twice.

Model: what the kubelet believes. `running` are the claims it was told are prepared and has not given back; their
containers may be using the devices. After every step the node must agree with itself (`Machine.check`) and:
I1 no device is in two running claims beyond shares and admin access; I7 a running claim is in the book, and asking for
it again gives the same answer; I8 a claim fails only for its own devices.
"""

import asyncio
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kubelet_fakes import DRIVER, GPUS, PARTITIONS, FakeApi, Machine, claim, gpu_config, make_engine, ref, result, uid

from gpunode.kubelet.checkpoint import CheckpointFile, Entry, State
from gpunode.kubelet.errors import ClaimError, ErrorKind
from gpunode.kubelet.prepare import Prepared, PrepareEngine
from gpunode.kubelet.reconcile import SecondLook
from gpunode.kubelet.resolve import ClaimRef, conflict
from gpunode.kubelet.seams import no_step
from gpunode.model.resource import ResourceClaim

DEVICES = [GPUS[0], GPUS[1], GPUS[7], *PARTITIONS]
CONFIGS: list[Any] = [[], [], [gpu_config()], [gpu_config("MPS"), gpu_config("MPS", "MigConfig")]]
# Before which persistent step the plugin dies; most operations have fewer than ten.
KILL = st.sampled_from([None, None, 0, 1, 2, 3, 4, 5, 6, 7, 9, 12])


class Killed(BaseException):
    """A kill, seen from inside."""


class NodeMachine(RuleBasedStateMachine):
    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.tmp = Path(tempfile.mkdtemp(dir=memory, prefix="kubelet-"))
        self.machine = Machine(self.tmp, mps=True)
        self.api = FakeApi()
        self.now = 0.0
        self.count = 0
        self.kill_at: int | None = None
        self.running: dict[str, tuple[ResourceClaim, Prepared]] = {}
        self.plugins: list[tuple[PrepareEngine, SecondLook]] = []

    def teardown(self) -> None:
        for engine, _ in self.plugins:
            engine.close()
        shutil.rmtree(self.tmp)

    # The plugin process and its death.

    def step(self, _name: str) -> None:
        if self.kill_at is not None:
            self.kill_at -= 1
            if self.kill_at < 0:
                raise Killed

    def start(self) -> tuple[PrepareEngine, SecondLook]:
        async def allocated() -> list[ResourceClaim]:
            return list(self.api.claims.values())

        self.machine.partitioner.step = self.step
        control = self.machine.control(self.step)
        engine = make_engine(
            self.tmp, self.api, boot=self.machine.boot, devices=self.machine.devices, allocated=allocated,
            partitioner=self.machine.partitioner, sharing=control, notify=lambda _: None,
            clock=lambda: self.now, step=self.step,
        )  # fmt: skip
        return engine, SecondLook(engine, self.api, lambda _: None, clock=lambda: self.now)

    def restart(self, kill: int | None = None) -> None:
        """All instances die; a new one starts, is perhaps killed while it repairs, and starts again."""
        for engine, _ in self.plugins:
            engine.close()
        self.plugins = [self.start(), self.start()]
        for at in (kill, None):
            self.kill_at = at
            try:
                asyncio.run(self.plugins[0][0].recover())
            except Killed:
                continue
            break
        self.kill_at = None

    def act(self, what: Any, kill: int | None) -> Any:
        """Run a coroutine; None if it was killed, after which the plugin has been started again."""
        self.kill_at = kill
        try:
            return asyncio.run(what)
        except Killed:
            self.seen["killed"] += 1
            self.restart()
            return None
        finally:
            self.kill_at = None

    def any_engine(self) -> PrepareEngine:
        return self.plugins[self.count % 2][0]

    def live(self) -> dict[str, ResourceClaim]:
        return {c.metadata.uid: c for c in self.api.claims.values()}

    def entries(self) -> dict[str, Entry]:
        return CheckpointFile(self.machine.paths.checkpoint(DRIVER)).peek().entries

    def pick(self, data: Any, claims: list[ResourceClaim]) -> ResourceClaim:
        return data.draw(st.sampled_from(sorted(claims, key=lambda c: c.metadata.uid)))

    # What users and the control plane do.

    @initialize()
    def begin(self) -> None:
        self.restart()

    def new_claim(self, data: Any, devices: list[str]) -> ResourceClaim:
        self.count += 1
        kind = data.draw(st.sampled_from(["plain", "plain", "admin", "share"]))
        more = {"plain": {}, "admin": {"adminAccess": True}, "share": {"shareID": uid(self.count)}}[kind]
        rows = [result(d, **more) for d in devices]
        made = claim(self.count, *rows, config=data.draw(st.sampled_from(CONFIGS)))
        allocation = msgspec.structs.replace(made.status.allocation, allocation_timestamp=f"{self.count:09}")
        status = msgspec.structs.replace(made.status, allocation=allocation)
        return self.api.put(msgspec.structs.replace(made, status=status))

    @rule(data=st.data(), devices=st.lists(st.sampled_from(DEVICES), min_size=1, max_size=3, unique=True))
    def allocate(self, data: Any, devices: list[str]) -> None:
        """A claim given devices whether or not they are free: something else is allocating too."""
        self.new_claim(data, devices)

    @precondition(lambda self: self.free())
    @rule(data=st.data(), kill=KILL, broken=st.sampled_from([False, False, True]))
    def start_a_pod(self, data: Any, kill: int | None, broken: bool) -> None:
        """What should happen all day: free devices are allocated and prepared."""
        free = st.lists(st.sampled_from(self.free()), min_size=1, max_size=2, unique=True)
        self.ask(self.new_claim(data, data.draw(free)), kill, broken)

    def free(self) -> list[str]:
        taken = {r.device for c in self.live().values() for r in _results(c)}
        return [d for d in DEVICES if d not in taken]

    @precondition(lambda self: self.api.claims)
    @rule(data=st.data(), gone=st.booleans())
    def deallocate(self, data: Any, gone: bool) -> None:
        """Also while it is running: a pod removed by force."""
        chosen = self.pick(data, list(self.live().values()))
        if gone:
            del self.api.claims[chosen.metadata.namespace, chosen.metadata.name]
        else:
            status = msgspec.structs.replace(chosen.status, allocation=None)
            self.api.put(msgspec.structs.replace(chosen, status=status))

    # What the kubelet does.

    @precondition(lambda self: self.api.claims)
    @rule(data=st.data(), kill=KILL, broken=st.sampled_from([False, False, True]))
    def prepare(self, data: Any, kill: int | None, broken: bool) -> None:
        self.ask(self.pick(data, list(self.live().values())), kill, broken)

    def ask(self, chosen: ResourceClaim, kill: int | None, broken: bool) -> None:
        others = self.entries()
        self.machine.partitioner.broken = set(PARTITIONS) if broken else set()
        answer = self.act(self.any_engine().prepare([ref(chosen)]), kill)
        self.machine.partitioner.broken = set()
        if answer is not None:
            self.answered(chosen, answer[chosen.metadata.uid], others, broken)

    def answered(
        self, asked: ResourceClaim, answer: Prepared | ClaimError, before: dict[str, Entry], broken: bool
    ) -> None:
        if not isinstance(answer, ClaimError):
            old = self.running.get(asked.metadata.uid)
            assert old is None or old[1] == answer
            if answer:
                self.seen["prepared"] += 1
                self.running[asked.metadata.uid] = (asked, answer)
            return
        self.seen[answer.kind] += 1
        match answer.kind:
            case ErrorKind.HELD:
                busy = {d.device for e in before.values() for d in e.devices}
                busy |= {d.nodes.parent for e in before.values() for d in e.devices}
                wanted = {r.device for r in _results(asked)}
                if set(PARTITIONS) & wanted:
                    wanted |= {GPUS[7]}
                assert busy & wanted
            case ErrorKind.HARDWARE:
                assert broken
            case ErrorKind.CONFIG:  # MPS serves one partition by itself
                assert len(_results(asked)) > 1 and set(PARTITIONS) & {r.device for r in _results(asked)}
                assert "one partition a claim" in answer.message or "same settings" in answer.message
            case ErrorKind.NOT_ALLOCATED:
                assert asked.status.allocation is None
            case ErrorKind.UNKNOWN_DEVICE:
                assert any(r.admin_access and r.device in PARTITIONS for r in _results(asked))
            case _:
                raise AssertionError(f"{answer.kind}: {answer.message}")

    @precondition(lambda self: self.running)
    @rule(data=st.data(), kill=KILL, in_use=st.booleans())
    def unprepare(self, data: Any, kill: int | None, in_use: bool) -> None:
        chosen = self.pick(data, [c for c, _ in self.running.values()])
        self.machine.partitioner.in_use = set(PARTITIONS) if in_use else set()
        answer = self.act(self.any_engine().unprepare([ref(chosen)]), kill)
        self.machine.partitioner.in_use = set()
        if answer is None or answer[chosen.metadata.uid] is not None:  # the kubelet tries again
            assert answer is None or in_use
            answer = self.act(self.any_engine().unprepare([ref(chosen)]), None)
        assert answer[chosen.metadata.uid] is None
        del self.running[chosen.metadata.uid]

    @rule(kill=KILL)
    def unprepare_unknown(self, kill: int | None) -> None:
        answer = self.act(self.any_engine().unprepare([ClaimRef("ns", "nobody", uid(10**6))]), kill)
        assert answer in (None, {uid(10**6): None})

    @precondition(lambda self: self.running)
    @rule()
    def restart_the_kubelet(self) -> None:
        """It forgot what is prepared and asks again for every pod that still runs."""
        for asked, answer in self.still_wanted():
            again = self.act(self.any_engine().prepare([ref(asked)]), None)
            assert again[asked.metadata.uid] == answer

    def still_wanted(self) -> list[tuple[ResourceClaim, Prepared]]:
        live = self.live()
        return [(c, a) for u, (c, a) in self.running.items() if live.get(u) == c]

    # What happens to the machine.

    @rule(kill=KILL, what=st.sampled_from(["plugin", "plugin", "node"]))
    def restarted(self, kill: int | None, what: str) -> None:
        if what == "node":
            self.machine.reboot()
            self.running.clear()
        self.restart(kill)

    @precondition(lambda self: self.machine.paths.cdi.is_dir())
    @rule(kill=KILL, lost=st.integers(0, 3))
    def files_come_and_go(self, kill: int | None, lost: int) -> None:
        for file in sorted(self.machine.paths.cdi.iterdir())[:lost]:
            file.unlink()
        (self.machine.paths.cdi / f"gpunode.dev-gpu_{DRIVER}_{uid(10**6)}.json").write_text("{}")
        (self.machine.paths.cdi / f".gpunode.dev-gpu_{DRIVER}_{uid(10**6)}.json.tmp").write_text("{")
        (self.machine.partitioner.directory / f"{PARTITIONS[1]}.gi").touch()
        if not any(d.device == GPUS[1] for e in self.entries().values() for d in e.devices):
            (self.machine.sharing.directory / GPUS[1]).touch()
        self.heal(kill)

    @precondition(lambda self: self.machine.paths.checkpoint(DRIVER).exists())
    @rule(seed=st.integers(0, 10**6), kill=KILL)
    def damage_the_checkpoint(self, seed: int, kill: int | None) -> None:
        """Claims that the API server no longer knows cannot come back from it: those are lost, and with them only
        what looks at a partition of theirs."""
        path = self.machine.paths.checkpoint(DRIVER)
        raw = bytearray(path.read_bytes())
        chance = random.Random(seed)
        kind = chance.randrange(3)
        if kind == 0:
            path.unlink()
        elif kind == 1:
            path.write_bytes(raw[: chance.randrange(len(raw))])
        else:
            raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
            path.write_bytes(raw)
        wanted = [c for c, _ in self.still_wanted()]
        owned = {r.device for c in wanted for r in _results(c) if not r.admin_access}
        back = {c.metadata.uid for c in wanted if {r.device for r in _results(c)} & set(PARTITIONS) <= owned}
        self.running = {u: v for u, v in self.running.items() if u in back}
        self.seen["brought back"] += len(self.running)
        self.heal(kill)

    @rule(after=st.sampled_from([1, 700]), kill=KILL)
    def second_look(self, after: int, kill: int | None) -> None:
        """Two of them, the second perhaps after the grace and perhaps killed."""
        self.act(self.plugins[0][1].run(), None)
        self.now += after
        findings = self.act(self.plugins[0][1].run(), kill)
        live = self.live()
        self.seen["released"] += len(findings.released) if findings else 0
        for gone in findings.released if findings else ():
            assert gone not in live or live[gone].status.allocation is None
        self.forget_released()

    def heal(self, kill: int | None) -> None:
        """A restart and a look, as after any accident."""
        self.restart(kill)
        self.act(self.plugins[0][1].run(), None)
        self.forget_released()

    def forget_released(self) -> None:
        """A claim that is gone may be let go of by the second look; its pod is gone too."""
        entries = self.entries()
        wanted = {c.metadata.uid for c, _ in self.still_wanted()}
        self.running = {u: v for u, v in self.running.items() if u in entries or u in wanted}

    @invariant()
    def the_node_agrees_with_itself(self) -> None:
        if not self.plugins:
            return
        self.machine.partitioner.step = self.machine.sharing.step = no_step
        entries = self.machine.check()
        self.seen["steps"] += 1
        self.machine.partitioner.step = self.machine.sharing.step = self.step
        running = {u: entries[u] for u in self.running}  # KeyError: a running claim was lost (I7)
        for entry in running.values():
            assert entry.state is State.COMPLETED
            assert conflict(entry, running.values()) is None  # I1


def _results(of: ResourceClaim) -> Any:
    return of.status.allocation.devices.results if of.status.allocation else ()


def run(examples: int, steps: int, *, repeat: bool) -> Counter[str]:
    """Run it and count what happened, so that a machine that does nothing cannot pass. repeat: the same every time."""
    NodeMachine.seen.clear()
    run_state_machine_as_test(
        NodeMachine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=repeat, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    return NodeMachine.seen


def test_a_slice_of_what_can_happen() -> None:
    seen = run(examples=25, steps=40, repeat=True)
    assert min(seen[what] for what in ("killed", "prepared", ErrorKind.HELD)) > 0, seen


@pytest.mark.soak
def test_ten_thousand_steps_of_what_can_happen(record_property: Callable[[str, object], None]) -> None:
    seen = run(examples=400, steps=60, repeat=False)
    for what, count in seen.items():
        record_property(str(what), count)
    assert seen["steps"] >= 10_000, seen
    rare = ("killed", "prepared", "brought back", "released", ErrorKind.HELD, ErrorKind.HARDWARE)
    assert min(seen[what] for what in rare) > 0, seen
