"""The controller's Prometheus metrics; docs/operations.md lists them."""

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gpunode.model.gang import Action, Evict, Place, Report

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class ControllerMetrics:
    """How long decisions and their writes take, what was done, and what waits for which reason."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decide = Histogram(
            "gpunode_decide_seconds", "Duration of one decision.", buckets=_SECONDS, registry=registry
        )
        self._commit = Histogram(
            "gpunode_commit_seconds", "Duration of one decision's writes.", buckets=_SECONDS, registry=registry
        )
        self._failures = Counter(
            "gpunode_commit_failures", "Actions that lost a race or were refused and are decided again.",
            registry=registry,
        )  # fmt: skip
        self._placed = Counter("gpunode_gangs_placed", "Placements of gangs.", registry=registry)
        self._evicted = Counter("gpunode_gangs_evicted", "Evictions of whole gangs.", registry=registry)
        self._waiting = Gauge("gpunode_gangs_waiting", "Gangs with a reason to report.", ["reason"], registry=registry)
        self._reasons: set[str] = set()

    def decided(self, seconds: float, actions: Iterable[Action]) -> None:
        """One decision ended with these actions."""
        self._decide.observe(seconds)
        tally = Tally(action.reason.code.value for action in actions if isinstance(action, Report))
        # Reasons are an enumeration, so the label stays bounded; one that nobody has any more reads 0.
        self._reasons |= set(tally)
        for reason in self._reasons:
            self._waiting.labels(reason).set(tally[reason])

    def committed(self, seconds: float, actions: Iterable[Action], failed: int) -> None:
        """One decision's writes ended."""
        actions = tuple(actions)
        if not actions:
            return
        self._commit.observe(seconds)
        self._failures.inc(failed)
        self._placed.inc(sum(1 for action in actions if isinstance(action, Place) and action.assignments))
        self._evicted.inc(sum(1 for action in actions if isinstance(action, Evict)))
