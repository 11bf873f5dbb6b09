"""Which of two agents on a node publishes, and how ready and measured they are."""

import asyncio
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from prometheus_client import CollectorRegistry, Counter
from typer.testing import CliRunner

from gpunode.agent import succession
from gpunode.agent.node import NodeAgent
from gpunode.agent.options import AgentOptions
from gpunode.agent.succession import Succession
from gpunode.cli import agent as cli
from gpunode.kubelet.plugin import KubeletPaths
from gpunode.monitoring import serve_metrics

DRIVER = "gpu.gpunode.dev"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Shorter than pytest's: a unix socket path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="agent-") as directory:
        yield Path(directory)


@contextmanager
def serving(path: Path) -> Iterator[None]:
    """Something that answers at a socket; the socket stays when it ends, as after kill -9."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        time.sleep(0.01)  # the next socket is made later by the file system's clock
        yield


def test_the_newest_that_answers_publishes(tmp_path: Path) -> None:
    paths = KubeletPaths(tmp_path)
    changes: list[str] = []
    old, new = (Succession(paths, DRIVER, i, lambda i=i: changes.append(i)) for i in ("", "b"))  # type: ignore[misc]
    old.look()
    assert not old.superseded, "not there itself yet"
    with serving(paths.registration_socket(DRIVER)):
        old.look()
        assert not old.superseded
        with serving(paths.registration_socket("other.example.com")), serving(paths.registration_socket(DRIVER, "b")):
            for one in (old, new, old):
                one.look()
            assert (old.superseded, new.superseded) == (True, False)
        old.look()
        assert not old.superseded, "the newer one was killed"
    assert changes == ["", ""]


def test_sockets_of_killed_agents_go_and_no_others(tmp_path: Path) -> None:
    paths = KubeletPaths(tmp_path)
    own, killed = (paths.registration_socket(DRIVER, name) for name in ("own", "killed"))
    # A driver whose name begins like ours, killed as well: that is its own agents' affair.
    foreign = paths.registration_socket(f"{DRIVER}-test", "killed")
    unnamed = paths.registration_socket(f"{DRIVER}-test")
    calls = paths.plugin_dir(DRIVER) / "dra-killed.sock"
    newest = Succession(paths, DRIVER, "own", lambda: None)
    with serving(own):
        for path in (killed, foreign, unnamed, calls):
            with serving(path):
                pass
        newest.sweep()
        assert killed.exists(), "it may have been bound a moment ago and not listen yet"
        with serving(calls):  # taken over by another in time
            newest.sweep()
            assert sorted(p.name for p in paths.registry.iterdir()) == sorted(p.name for p in (own, foreign, unnamed))
            assert calls.exists()
        newest.sweep()
        newest.sweep()
        assert not calls.exists()


async def test_only_the_newest_sweeps(tmp_path: Path) -> None:
    paths = KubeletPaths(tmp_path)
    old, new = (Succession(paths, DRIVER, name, lambda: None, every_s=0.01) for name in ("old", "new"))
    killed = paths.registration_socket(DRIVER, "killed")
    with serving(killed):
        pass
    with serving(paths.registration_socket(DRIVER, "old")), serving(paths.registration_socket(DRIVER, "new")):
        for one, there in ((old, True), (new, False)):
            task = asyncio.create_task(one.run())
            await asyncio.sleep(0.2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert killed.exists() is there


async def test_a_directory_that_goes_while_it_is_read_ends_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    sockets = KubeletPaths.registration_sockets

    def gone(paths: KubeletPaths, driver: str) -> list[Path]:
        looks.append(driver)
        if len(looks) == 1:
            raise FileNotFoundError(2, "No such file or directory")
        return sockets(paths, driver)

    monkeypatch.setattr(KubeletPaths, "registration_sockets", gone)
    task = asyncio.create_task(Succession(KubeletPaths(tmp_path), DRIVER, "a", lambda: None, every_s=0.01).run())
    await asyncio.sleep(0.1)
    assert not task.done() and len(looks) > 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(("published", "superseded", "missing"), [
    (False, False, "slices and the kubelet"), (False, True, "the kubelet"), (True, False, "the kubelet"),
])  # fmt: skip
def test_an_agent_that_another_publishes_for_is_ready_without_slices(
    published: bool, superseded: bool, missing: str
) -> None:
    """Or, after a step of the clock, a rolling update would wait for ever for the newer one."""
    event = asyncio.Event()
    if published:
        event.set()
    agent: Any = SimpleNamespace(
        _publisher=SimpleNamespace(published=event),
        _succession=SimpleNamespace(superseded=superseded),
        _plugin=SimpleNamespace(registered=asyncio.Event()),
    )
    assert NodeAgent._missing(agent) == missing


def test_sockets_made_in_one_tick_of_the_clock_have_an_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = KubeletPaths(tmp_path)
    made = succession._made
    monkeypatch.setattr(succession, "_made", lambda path: (0, path.name) if made(path) else None)
    a, b = (Succession(paths, DRIVER, name, lambda: None) for name in "ab")
    with serving(paths.registration_socket(DRIVER, "a")), serving(paths.registration_socket(DRIVER, "b")):
        a.look()
        b.look()
        assert (a.superseded, b.superseded) == (True, False)


def test_each_process_is_an_instance_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an earlier one's name was empty: two of the same name would take each other's sockets."""
    seen: list[str] = []
    monkeypatch.setattr(cli, "serve", lambda main, _: asyncio.run(main()))

    async def run_agent(options: AgentOptions) -> None:
        seen.append(options.instance)

    monkeypatch.setattr("gpunode.agent.run.run_agent", run_agent)
    app = typer.Typer()
    cli.register(app)
    for arguments in ([], [], ["--instance", ""], ["--instance", "pod-uid"]):
        done = CliRunner().invoke(app, ["--node-name", "n", "--backend", "fake", *arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert seen[3] == "pod-uid"
    assert len(set(seen)) == 4
    assert all(seen)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port: int = taken.getsockname()[1]
        return port


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_metrics_and_readiness_over_http(free_port: int) -> None:
    registry = CollectorRegistry()
    Counter("gpunode_things", "Things.", registry=registry).inc()
    missing = ["the kubelet"]
    server = serve_metrics(registry, free_port, lambda: missing[0])
    assert server is not None
    try:
        assert get(free_port, "/readyz") == (503, "waiting for the kubelet\n")
        missing[0] = ""
        assert get(free_port, "/readyz") == (200, "ready\n")
        status, text = get(free_port, "/metrics")
        assert status == 200
        assert "gpunode_things_total 1.0" in text
        assert get(free_port, "/other")[0] == 404
        with pytest.raises(OSError, match=f"port {free_port}.*--metrics-port"):
            serve_metrics(registry, free_port)
    finally:
        server.close()
    assert serve_metrics(registry, 0) is None
