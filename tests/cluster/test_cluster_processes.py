import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from gpunode.cluster.errors import ClusterError
from gpunode.cluster.processes import MARKER, Processes, replace_text, start_ticks

STUBBORN = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"


@pytest.fixture
def processes(tmp_path):
    table = Processes(tmp_path)
    yield table
    table.stop_all(table.names(), grace=0)
    for pid in table.marked():
        os.kill(pid, signal.SIGKILL)


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.01)


def test_start_runs_once_and_stop_ends_it(processes):
    first = processes.start("a", ("sleep", "99"))
    assert processes.alive("a")
    assert processes.start("a", ("sleep", "99")) == first
    assert os.getsid(first.pid) == first.pid
    assert processes.stop("a")
    assert start_ticks(first.pid) is None
    assert not processes.alive("a")
    assert processes.names() == ()
    assert not processes.stop("a")


def test_a_dead_process_is_started_again(processes):
    first = processes.start("a", ("sleep", "99"))
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: not processes.alive("a"))
    assert processes.start("a", ("sleep", "99")).pid != first.pid


def test_output_is_appended_to_the_log_with_env(processes, tmp_path):
    for word in ("one", "two"):
        processes.start("a", ("sh", "-c", "echo $WORD; echo err >&2"), env={"WORD": word})
        wait_for(lambda: not processes.alive("a"))
    assert processes.log("a").read_text() == "one\nerr\ntwo\nerr\n"
    assert processes.tail("a", 2) == "two | err"
    elsewhere = tmp_path / "x" / "own.log"
    processes.start("b", ("echo", "hello"), log=elsewhere)
    wait_for(lambda: not processes.alive("b"))
    assert elsewhere.read_text() == "hello\n"
    assert processes.tail("b") == "hello"


def test_sigkill_follows_an_ignored_sigterm(processes):
    record = processes.start("a", (sys.executable, "-c", STUBBORN))
    wait_for(lambda: processes.tail("a") == "up")
    assert processes.stop_all(("a",), grace=0.1) == ("a",)
    assert start_ticks(record.pid) is None


@pytest.mark.parametrize("change", [{"ticks": 1}, {"boot": "another boot"}])
def test_a_process_that_is_not_ours_is_neither_alive_nor_killed(processes, tmp_path, change):
    """The pid was given to another process since: its start time or the boot differs from the record's."""
    with subprocess.Popen(["sleep", "99"]) as other:
        try:
            record = processes.start("a", ("true",))
            wait_for(lambda: not processes.alive("a"))
            stale = dataclasses.asdict(record) | {"pid": other.pid, "ticks": start_ticks(other.pid)} | change
            (tmp_path / "run" / "a.json").write_text(json.dumps(stale))
            assert not processes.alive("a")
            assert not processes.kill("a")
            assert other.poll() is None
        finally:
            other.kill()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "ticks": 1}', "null"])
def test_a_broken_record_counts_as_none(processes, tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a.json").write_text(text)
    assert processes.record("a") is None
    assert not processes.kill("a")
    assert processes.start("a", ("sleep", "99")).name == "a"


def test_marks_lead_to_lost_processes_and_to_orphans(processes, tmp_path):
    parent = processes.start("a", ("sh", "-c", "sleep 98 & sleep 99"))
    wait_for(lambda: len(processes.marked()) == 3)
    processes.kill("a")
    assert len(processes.marked()) == 2
    assert parent.pid not in processes.marked()
    lost = processes.start("b", ("sleep", "97"))
    (tmp_path / "run" / "b.json").unlink()
    assert processes.marked()[lost.pid] == lost.ticks
    assert Processes(tmp_path / "other").marked() == {}


def test_a_lost_record_is_made_anew_but_not_for_children(processes, tmp_path):
    lost = processes.start("b", ("sh", "-c", "sleep 98 & sleep 99"))
    wait_for(lambda: len(processes.marked()) == 3)
    (tmp_path / "run" / "b.json").unlink()
    assert processes.adopt() == ("b",)
    assert processes.get("b") == lost
    assert processes.adopt() == ()
    assert processes.start("b", ("sleep", "99")) == lost


def test_the_mark_is_not_our_own(processes, tmp_path):
    code = "import sys; from pathlib import Path; from gpunode.cluster.processes import Processes; "
    code += "print(Processes(Path(sys.argv[1])).marked())"
    env = {**os.environ, MARKER: str(tmp_path)}
    argv = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "{}"


def test_a_missing_program_is_one_sentence(processes):
    with pytest.raises(ClusterError, match="no-such-program is not installed"):
        processes.start("a", ("no-such-program",))
    with pytest.raises(ClusterError, match="a: cannot run /nonexistent"):
        processes.start("a", ("/nonexistent",))
    assert processes.names() == ()


def test_start_ticks_of_a_command_name_with_brackets(tmp_path):
    program = tmp_path / "a) b ("
    program.write_text("#!/bin/sh\nsleep 99\n")
    program.chmod(0o755)
    with subprocess.Popen([str(program)], start_new_session=True) as process:
        try:
            assert (start_ticks(process.pid) or 0) > 0
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_replace_text_sets_the_mode_and_leaves_no_temporary(tmp_path):
    replace_text(tmp_path / "f", "one")
    replace_text(tmp_path / "f", "two", mode=0o600)
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "two"
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600
