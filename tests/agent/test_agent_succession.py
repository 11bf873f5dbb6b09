"""Which of two agents on a node publishes, and how ready and measured they are."""

import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from gpunode.agent.succession import Succession
from gpunode.kubelet.plugin import KubeletPaths
from gpunode.monitoring import serve_metrics

DRIVER = "gpu.gpunode.dev"


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
