"""The agent's Prometheus endpoint."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric

from gpunode.health.metrics import families
from gpunode.health.state import HealthState
from gpunode.model.health import NodeHealth

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HealthCollector:
    """Asks for the health state at each scrape, so that nothing has to be kept in step."""

    read: Callable[[], tuple[HealthState, NodeHealth]]

    def collect(self) -> Iterator[Metric]:
        """Families of docs/health.md."""
        yield from families(*self.read())


def serve_metrics(registry: CollectorRegistry, port: int) -> None:
    """Serve on all addresses, in a thread of its own. Port 0 serves nothing. Raises OSError when it is taken."""
    if port == 0:
        return
    try:
        start_http_server(port, registry=registry)
    except OSError as error:
        raise OSError(
            f"cannot serve metrics on port {port} ({error.strerror}): choose another with --metrics-port"
        ) from (error)
    logger.info("metrics on port %d", port)
