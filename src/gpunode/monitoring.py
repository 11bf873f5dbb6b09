"""Serving Prometheus metrics, the same way for agent and controller."""

import logging

from prometheus_client import CollectorRegistry, start_http_server

logger = logging.getLogger(__name__)


def serve_metrics(registry: CollectorRegistry, port: int) -> None:
    """Serve on all addresses, in a thread of its own. Port 0 serves nothing. Raises OSError when it is taken."""
    if port == 0:
        return
    try:
        start_http_server(port, registry=registry)
    except OSError as error:
        text = f"cannot serve metrics on port {port} ({error.strerror}): choose another with --metrics-port"
        raise OSError(text) from error
    logger.info("metrics on port %d", port)
