"""Fault scenarios: the files that are shipped end as they say, and wrong ones are refused."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gpunode.hardware.board import load_board
from gpunode.hardware.fake.faults import parse_fault
from gpunode.hardware.fake.machine import FakeMachine
from gpunode.hardware.rescan import Scanner
from gpunode.health.devices import device_map
from gpunode.health.machine import HealthMachine
from gpunode.health.parse import Pending, parse, parse_record
from gpunode.health.scenario import ScenarioError, TimedFault, expand, load_scenario, parse_scenario, scenario_names
from gpunode.health.signals import RecoveryActionChanged, Signal
from gpunode.health.state import HealthState, Instant
from gpunode.model.health import Dimension, GpuSample, Level, RecoveryAction
from gpunode.slices.planner import SliceConfig, plan

RECOVERY = [action for action in RecoveryAction if action is not RecoveryAction.UNKNOWN]
FABRIC_STATES = ("unsupported", "notStarted", "inProgress", "completed")
FABRIC_FAULTS = {0: "degraded-bandwidth", 2: "route-recovery", 4: "route-unhealthy", 6: "access-timeout-recovery"}


class Rehearsal:
    """A fake machine and a health machine that reads its kernel log and, every 5 s, its counters."""

    def __init__(self, base: Path) -> None:
        self.fake = FakeMachine.create(load_board("hgx-h100"), "node-0", base, boot_id="boot-1")
        self.gpus = self.fake.state.gpus
        self.scanner = Scanner(self.fake.nvml, self.fake.roots, "node-0")
        self.rescan()
        self.machine, self.state, self.now = HealthMachine(), HealthState(), 0.0
        self.pending, self.read = Pending(), 0
        self.transitions = 0

    def rescan(self) -> None:
        inventory = self.scanner.scan().inventory
        assert inventory is not None
        self.inventory, self.map = inventory, device_map(inventory)

    def log(self) -> list[Signal]:
        found: list[Signal] = []
        text = self.fake.roots.kmsg.read_text()
        for line in text[self.read :].splitlines():
            signals, self.pending = parse(parse_record(line).text, self.pending)
            found += signals
        self.read = len(text)
        return found

    def polls(self) -> list[Signal]:
        if not self.fake.state.saved.driver_loaded:
            return []
        return [self.poll(gpu) for gpu in self.gpus]

    def poll(self, gpu) -> GpuSample:
        saved = gpu.saved
        if saved.lost:
            return GpuSample(gpu.uuid, gpu.pci, present=False, error="GPU is lost")
        return GpuSample(
            gpu.uuid,
            gpu.pci,
            recovery=RECOVERY[saved.recovery],
            ecc_uncorrected=saved.ecc_volatile,
            remap_pending=saved.remap_pending,
            remap_failed=saved.remap_failed,
            fabric_state=FABRIC_STATES[saved.fabric_state],
            fabric_faults=frozenset(n for shift, n in FABRIC_FAULTS.items() if saved.fabric_mask >> shift & 3 == 1),
            links_active=18 - len(saved.dead_links),
            links_total=18,
        )

    def step(self, *signals: Signal) -> None:
        step = self.machine.step(self.state, signals, self.map, Instant(1e9 + self.now, self.now))
        self.state = step.state
        self.transitions += len(step.transitions)

    def until(self, time: float) -> None:
        while self.now + 5 <= time:
            self.now += 5
            self.step(*self.polls())
        self.now = max(self.now, time)

    def play(self, faults: list[TimedFault]) -> None:
        for at, group in itertools.groupby(faults, key=lambda timed: timed.at):
            self.until(at)
            for timed in group:
                self.fake.inject(parse_fault(msgspec.json.encode(timed.fault)))
            self.rescan()
            self.step(*self.log())

    def levels(self) -> dict[int, Level]:
        health = self.machine.project(self.state, self.map)
        levels = {gpu.index: health.of(gpu.name).level for gpu in self.gpus}
        return {index: level for index, level in levels.items() if level is not Level.HEALTHY}


@pytest.mark.parametrize("name", scenario_names())
def test_every_scenario_ends_as_it_says(name: str, tmp_path: Path) -> None:
    scenario = load_scenario(name)
    assert scenario.name == name
    rehearsal = Rehearsal(tmp_path)
    rehearsal.step(*rehearsal.log(), *rehearsal.polls())
    faults = list(expand(scenario, len(rehearsal.gpus)))
    if len(faults) > 2000:
        # A storm's lines are alike: one in 500 keeps this test quick, the whole is the soak test's.
        faults = [f for number, f in enumerate(faults) if number % 500 == 0 or f.fault != faults[0].fault]
    rehearsal.play(faults)
    rehearsal.until(rehearsal.now + 600)
    assert rehearsal.levels() == scenario.expect


def published(rehearsal: Rehearsal) -> dict[str, object]:
    config = SliceConfig("gpu.gpunode.dev", "node-0")
    planned = plan(rehearsal.inventory, rehearsal.machine.project(rehearsal.state, rehearsal.map), config)
    return {device.name: device for one in planned for device in one.spec.devices}


def test_a_switch_port_takes_its_own_gpu_and_nothing_else_of_the_node(tmp_path: Path) -> None:
    rehearsal = Rehearsal(tmp_path)
    rehearsal.step(*rehearsal.log(), *rehearsal.polls())
    before = published(rehearsal)
    rehearsal.play(list(expand(load_scenario("switch-port-fatal"), 8)))
    rehearsal.until(rehearsal.now + 60)
    hit = rehearsal.gpus[1].name
    health = rehearsal.machine.project(rehearsal.state, rehearsal.map)
    assert set(health.devices) == {hit}
    assert {(f.dimension, f.code) for f in health.of(hit).findings} >= {(Dimension.FABRIC, "sxid-20034")}
    after = published(rehearsal)
    assert {name for name in before if after[name] != before[name]} == {hit}
    assert list(after) == list(before)


def test_a_switch_as_a_whole_takes_the_gpus_behind_it_until_their_reset(tmp_path: Path) -> None:
    rehearsal = Rehearsal(tmp_path)
    rehearsal.step(*rehearsal.log(), *rehearsal.polls())
    rehearsal.play(list(expand(load_scenario("switch-fatal"), 8)))
    rehearsal.until(rehearsal.now + 600)
    assert set(rehearsal.levels()) == set(range(1, 8))
    recovery = {"name": "x", "description": "d", "steps": [{"at": 0, "do": "recover", "gpu": "all"}]}
    began = rehearsal.now
    rehearsal.play([replace(f, at=began) for f in expand(parse_scenario(json.dumps(recovery)), 8)])
    rehearsal.until(rehearsal.now + 600)
    assert rehearsal.levels() == {}


def test_there_is_a_scenario_for_everything_fake_hardware_can_do() -> None:
    kinds = {
        fault.fault["kind"]
        for name in scenario_names()
        for fault in itertools.islice(expand(load_scenario(name), 8), 1000)
    }
    assert kinds >= {"xid", "lost", "linkdown", "fabricchange", "recoverychange", "remappending", "driverreload",
                     "drivergone", "recover", "switcherror"}  # fmt: skip
    assert len(scenario_names()) >= 16


def test_flapping_is_held_back_longer_each_time(tmp_path: Path) -> None:
    rehearsal = Rehearsal(tmp_path)
    rehearsal.step(*rehearsal.log(), *rehearsal.polls())
    faults = list(expand(load_scenario("flapping"), 8))
    held = []
    for failure, recovery in zip(faults[::2], faults[1::2], strict=True):
        rehearsal.play([failure, recovery])
        start = rehearsal.now
        while rehearsal.levels():
            rehearsal.until(rehearsal.now + 5)
        held.append(rehearsal.now - start)
    assert held == sorted(held) and held[0] < held[1] < held[2]


def test_faults_come_in_order_of_time() -> None:
    text = """
    name: x
    description: two storms and a step between
    steps:
      - {at: 0, do: storm, gpu: 0, code: 45, count: 4, seconds: 4}
      - {at: 1.5, do: recover, gpu: 1}
      - {at: 0.5, do: storm, gpu: 1, code: 13, count: 2, seconds: 2}
    """
    faults = list(expand(parse_scenario(text), 2))
    assert [(f.at, f.fault.get("code")) for f in faults] == [
        (0, 45), (0.5, 13), (1, 45), (1.5, None), (1.5, 13), (2, 45), (3, 45),
    ]  # fmt: skip
    assert all(isinstance(parse_fault(msgspec.json.encode(f.fault)), object) for f in faults)


@pytest.mark.parametrize("action", RECOVERY[1:])
def test_every_verdict_reaches_the_log_as_it_was_given(action: RecoveryAction, tmp_path: Path) -> None:
    fake = FakeMachine.create(load_board("hgx-h100"), "node-0", tmp_path)
    steps = f"[{{at: 0, do: verdict, gpu: 0, action: {action}}}, {{at: 1, do: verdict, gpu: 0, action: none}}]"
    for timed in expand(parse_scenario(HEAD + steps), 1):
        fake.inject(parse_fault(msgspec.json.encode(timed.fault)))
    told = [signal for line in fake.roots.kmsg.read_text().splitlines() for signal in parse(parse_record(line).text)[0]]
    verdicts = [signal.new for signal in told if isinstance(signal, RecoveryActionChanged)]
    assert verdicts == [action, RecoveryAction.NONE]


HEAD = "name: x\ndescription: d\nsteps: "


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD + "[]", "length"),
        (HEAD + "[{at: 0, do: explode}]", "explode"),
        (HEAD + "[{at: -1, do: driver-gone}]", ">= 0"),
        (HEAD + "[{at: 0, do: xid, gpu: 0}]", "code"),
        (HEAD + "[{at: 0, do: xid, gpu: some, code: 1}]", "some"),
        (HEAD + "[{at: 0, do: driver-gone, gpu: 1}]", "gpu"),
        (HEAD + "[{at: 0, do: switch-error, switch: 0, code: 79}]", "10000"),
        (HEAD + "[{at: 0, do: switch-error, switch: '0000:05:00', code: 12020}]", "regex"),
        (HEAD + "[{at: 0, do: switch-error, switch: 0, code: 12020, fatal: perhaps}]", "bool"),
        (HEAD + "[{at: 0, do: storm, gpu: 0, code: 45, count: 10000000, seconds: 1}]", "1000000"),
        (HEAD.replace("name: x", "name: X y") + "[{at: 0, do: driver-gone}]", "matching regex"),
        (HEAD + "[{at: 0, do: verdict, gpu: 0, action: unknown}]", "no driver says unknown"),
        (HEAD + "[{at: 0, do: xid, gpu: 0, code: 79, gi: -1}]", ">= 0"),
        (HEAD + "[{at: 0, do: xid, gpu: 0, code: 79, gi: 1, ci: 100000000000000000000}]", "<= 99"),
        (HEAD + "[{at: 0, do: xid, gpu: 0, code: 79, pid: 0}]", ">= 1"),
        (HEAD + "[{at: 0, do: driver-gone}]\nexpect: {0: broken}", "broken"),
        ("{", "not YAML"),
        ("", "object"),
        ("x" * (1 << 21), "larger"),
    ],
)
def test_a_wrong_scenario_is_refused(text: str, says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        parse_scenario(text, "s.yaml")


def test_a_gpu_that_the_machine_lacks_is_named() -> None:
    with pytest.raises(ScenarioError, match="GPU 3, the machine has 2"):
        expand(parse_scenario(HEAD + "[{at: 0, do: recover, gpu: 3}]"), 2)


def test_names_and_paths(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="there are: application-errors"):
        load_scenario("nothing")
    with pytest.raises(ScenarioError, match="cannot be read"):
        load_scenario(tmp_path / "absent.yaml")
    file = tmp_path / "mine.yaml"
    file.write_text(HEAD + "[{at: 0, do: recover, gpu: all}]")
    assert len(list(expand(load_scenario(file), 5))) == 5
