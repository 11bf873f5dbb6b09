"""Serving Prometheus metrics and readiness over HTTP, the same way for agent and controller."""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

logger = logging.getLogger(__name__)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds for a client that says nothing

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes and probes are not worth a line each."""


@dataclass(frozen=True)
class MetricsServer:
    """A running endpoint."""

    port: int
    _server: WSGIServer

    def close(self) -> None:
        """Stop serving; waits for the request in progress."""
        self._server.shutdown()
        self._server.server_close()


def _nothing() -> str:
    return ""


def serve_metrics(
    registry: CollectorRegistry, port: int, missing: Callable[[], str] = _nothing
) -> MetricsServer | None:
    """Serve /metrics and /readyz on all addresses, in threads. Port 0 serves nothing. Raises OSError when it is taken.

    missing: what keeps this process from being ready, "" when nothing does; a rolling update waits for that.
    """
    if port == 0:
        return None
    metrics = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            return metrics(environ, start)  # type: ignore[no-any-return]
        status, text = "404 Not Found", "there are /metrics and /readyz"
        if path == "/readyz":
            waiting = missing()
            status, text = ("503 Service Unavailable", f"waiting for {waiting}") if waiting else ("200 OK", "ready")
        start(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    try:
        server = make_server("", port, answer, server_class=_Server, handler_class=_Handler)
    except OSError as error:
        text = f"cannot serve metrics on port {port} ({error.strerror}): choose another with --metrics-port"
        raise OSError(text) from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    logger.info("metrics on port %d", server.server_port)
    return MetricsServer(server.server_port, server)
