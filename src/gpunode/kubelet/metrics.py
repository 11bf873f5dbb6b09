"""Metrics of the kubelet plugin, in a registry that the caller owns."""

from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gpunode.kubelet.errors import ErrorKind

_SECONDS: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 45.0)


class KubeletMetrics:
    """Calls, durations, failures by kind, and what the node holds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "gpunode_kubelet_call_seconds", "Duration of the kubelet's calls.", ["call"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._failures = Counter(
            "gpunode_kubelet_claim_failures", "Claims that a call could not prepare or release.", ["call", "kind"],
            registry=registry,
        )  # fmt: skip
        self._claims = Gauge("gpunode_kubelet_prepared_claims", "Claims this node holds.", registry=registry)
        self._devices = Gauge("gpunode_kubelet_prepared_devices", "Devices in those claims.", registry=registry)
        self._held = Gauge(
            "gpunode_kubelet_held_devices", "Devices held for claims that are gone or deallocated.", registry=registry
        )
        self._repairs = Counter(
            "gpunode_kubelet_repairs", "Differences that the periodic comparison put right.", ["what"],
            registry=registry,
        )  # fmt: skip

    def called(self, call: str, seconds: float, failures: Sequence[ErrorKind]) -> None:
        """One call of the kubelet ended; `failures` has one item for each claim that failed."""
        self._seconds.labels(call).observe(seconds)
        for kind in failures:
            self._failures.labels(call, kind.value).inc()

    def holding(self, claims: int, devices: int) -> None:
        """What the checkpoint holds now."""
        self._claims.set(claims)
        self._devices.set(devices)

    def second_look(self, held: int, repaired: dict[str, int]) -> None:
        """What the periodic comparison found."""
        self._held.set(held)
        for what, count in repaired.items():
            self._repairs.labels(what).inc(count)
