"""gpunode health, as a user types it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gpunode.cli.health import app
from gpunode.health import store
from gpunode.health.devices import DeviceMap
from gpunode.health.machine import HealthMachine
from gpunode.health.signals import XidSignal
from gpunode.health.state import HealthState, Instant
from gpunode.model.hardware import PciAddress, device_name
from gpunode.model.health import Dimension

A = PciAddress(0, 7, 0)
GPU = device_name(A)


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "health.json"
    step = HealthMachine().step(HealthState(), [XidSignal(A, 13), XidSignal(A, 79)], DeviceMap(), Instant(1e9, 1))
    assert store.save(path, step.state) == ""
    return path


def test_status(state: Path) -> None:
    result = run("status", "--state", str(state))
    assert result.exit_code == 0
    assert GPU in result.output and "unhealthy" in result.output and "XID 79" in result.output
    (found,) = json.loads(run("status", "--state", str(state), "-o", "json").output)
    assert (found["device"], found["finding"]["code"]) == (GPU, "79")


def test_status_with_the_agents_policy(state: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("gangGraceSeconds: {host: 600}\n")
    shown = run("status", "--state", str(state), "--policy", str(policy)).output
    assert "GANGS STAY" in shown and "until 2001-09-09T01:56:40Z" in " ".join(shown.split())
    (found,) = json.loads(run("status", "--state", str(state), "--policy", str(policy), "-o", "json").output)
    assert found["finding"]["grace"] == 600
    assert "GANGS STAY" not in run("status", "--state", str(state)).output
    policy.write_text("gangGraceSeconds: {hosts: 600}\n")
    wrong = run("status", "--state", str(state), "--policy", str(policy))
    assert wrong.exit_code == 2 and "'hosts' names nothing" in wrong.stderr


def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    log = "NVRM: Xid (PCI:0000:07:00): 119, pid=7, name=[red]x[/red], Timeout\n"
    assert "[red]x[/red]" in run("replay", "-", stdin=log).output


def test_history(state: Path) -> None:
    result = run("history", "--state", str(state))
    assert result.output.index("noted") < result.output.index("raised")
    assert "nothing has happened" in run("history", "--device", "gpu-x", "--state", str(state)).output


def test_clear_leaves_a_word_for_the_agent(state: Path) -> None:
    done = run("clear", GPU, "--dimension", "xid", "--state", str(state))
    assert (done.exit_code, done.output) == (0, f"1 fault of {GPU} will be lifted by the agent\n")
    (request,), problems = store.take_requests(state)
    assert (request.device, request.dimension, problems) == (GPU, Dimension.XID, "")
    assert store.take_requests(state) == ((), "")


@pytest.mark.parametrize("arguments", [("gpu-x",), (GPU, "--dimension", "ecc")])
def test_clear_of_nothing_is_refused(state: Path, arguments: tuple[str, ...]) -> None:
    result = run("clear", *arguments, "--state", str(state))
    assert result.exit_code == 1 and "nothing stands against" in result.stderr
    assert store.take_requests(state) == ((), "")


def test_no_agent_has_run_here(tmp_path: Path) -> None:
    for command in ("status", "history"):
        result = run(command, "--state", str(tmp_path / "health.json"))
        assert result.exit_code == 1 and "does not exist" in result.stderr


def test_looking_at_a_damaged_file_leaves_it_in_place(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    path.write_text("{")
    result = run("status", "--state", str(path))
    assert result.exit_code == 1 and "cannot be used" in result.stderr
    assert path.read_text() == "{"


LOG = "[  100.000000] NVRM: Xid (PCI:0000:07:00): 79, GPU has fallen off the bus.\n"


def test_replay(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text(LOG)
    for result in (run("replay", str(file)), run("replay", "-", stdin=LOG)):
        assert result.exit_code == 0
        assert "0.000 s" in result.output and "1 fault stands at the end" in result.output
    told = json.loads(run("replay", str(file), "-o", "json").output)
    assert told["records"] == 1 and told["standing"][0]["device"] == GPU


def test_replay_with_own_rules(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("xids: [{code: 79, class: ignore, action: none}]")
    result = run("replay", "-", "--catalogue", str(mine), stdin=LOG)
    assert "0 faults stand at the end" in result.output
    mine.write_text("xids: [{code: 79, class: bad}]")
    result = run("replay", "-", "--catalogue", str(mine), stdin=LOG)
    assert result.exit_code == 2 and "bad" in result.stderr


def test_replay_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = run("replay", str(tmp_path / "absent"))
    assert result.exit_code == 1 and "cannot be read" in result.stderr


def test_policy(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("holdDownSeconds: 5")
    assert "holdDownSeconds: 5" in run("policy", "--policy", str(file)).output
    explained = run("policy", "--explain", "94")
    assert "CONTAINED" in explained.output and "restart the application" in explained.output
    assert json.loads(run("policy", "--explain", "79", "-o", "json").output)["class"] == "host"
    file.write_text("holdDownSeconds: x")
    assert run("policy", "--policy", str(file)).exit_code == 2
