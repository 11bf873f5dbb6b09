"""What the agent's Prometheus endpoint says of health."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric

from gpunode.health.metrics import families
from gpunode.health.state import HealthState
from gpunode.model.health import NodeHealth


@dataclass(frozen=True)
class HealthCollector:
    """Asks for the health state at each scrape, so that nothing has to be kept in step."""

    read: Callable[[], tuple[HealthState, NodeHealth]]

    def collect(self) -> Iterator[Metric]:
        """Families of docs/health.md."""
        yield from families(*self.read())
