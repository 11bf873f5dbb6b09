"""The health state as Prometheus metric families; docs/health.md lists them."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from gpunode.health.state import HealthState
from gpunode.health.work import SEVERITY
from gpunode.model.health import NodeHealth


def families(state: HealthState, health: NodeHealth) -> Iterator[Metric]:
    """Families for a collector. `health` is the projection of `state`.

    Label values are bounded: devices of one node, codes that the catalogue or this package knows, and at most
    MAX_NOTES harmless codes a device.
    """
    level = GaugeMetricFamily(
        "gpunode_health_level", "Health of a device: 0 healthy, 1 degraded, 2 unhealthy.", labels=["device"]
    )
    finding = GaugeMetricFamily(
        "gpunode_health_finding",
        "1 for each fault that stands.",
        labels=["device", "dimension", "code", "level", "action"],
    )
    for name in sorted({*state.devices, *health.devices}):
        device = health.of(name)
        level.add_metric([name], SEVERITY[device.level])
        for one in device.findings:
            finding.add_metric([name, one.dimension, one.code, one.level, one.action], 1)
    yield from (level, finding, _sightings(state), _recovering(state), _flaps(state))


def _sightings(state: HealthState) -> Metric:
    family = GaugeMetricFamily(
        "gpunode_health_sightings",
        "How often a code was seen since its fault began, or in this boot where it is harmless.",
        labels=["device", "code"],
    )
    for name, device in sorted(state.devices.items()):
        counts = {code: note.count for code, note in device.notes.items()}
        for entry in device.entries.values():
            code = entry.finding.code
            counts[code] = counts.get(code, 0) + entry.count
        for code, count in sorted(counts.items()):
            family.add_metric([name, code], count)
    return family


def _recovering(state: HealthState) -> Metric:
    family = GaugeMetricFamily(
        "gpunode_health_recovering", "Faults of a device that are over and in their hold-down.", labels=["device"]
    )
    for name, device in sorted(state.devices.items()):
        family.add_metric([name], sum(entry.recovering is not None for entry in device.entries.values()))
    return family


def _flaps(state: HealthState) -> Metric:
    family = GaugeMetricFamily(
        "gpunode_health_flaps",
        "Returns to fault soon after recovery; each doubles the next hold-down.",
        labels=["device", "dimension"],
    )
    for name, device in sorted(state.devices.items()):
        for dimension, flaps in sorted(device.flaps.items()):
            family.add_metric([name, dimension], flaps.count)
    return family
