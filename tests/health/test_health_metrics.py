"""Metrics of the health state."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from gpunode.health.devices import DeviceMap, KnownGpu, Partition
from gpunode.health.machine import HealthMachine
from gpunode.health.metrics import families
from gpunode.health.signals import GpuReset, XidSignal
from gpunode.health.state import HealthState, Instant
from gpunode.model.hardware import PciAddress, device_name

A = PciAddress(0, 7, 0)
GPU = device_name(A)
MAP = DeviceMap((KnownGpu(GPU, "GPU-a", A, False, (Partition(f"{GPU}-mig-1", 1, 0),)),))


FINDING_LABELS = [
    f'action="reset-gpu",code="95",device="{name}",dimension="xid",level="unhealthy"' for name in (GPU, f"{GPU}-mig-1")
]


def test_families() -> None:
    machine = HealthMachine()
    state = HealthState()
    batches = [[XidSignal(A, 13)] * 5, [XidSignal(A, 119)] * 2, [GpuReset("GPU-a", True)], []]
    for uptime, batch in zip((1, 2, 3, 40), batches, strict=True):
        state = machine.step(state, batch, MAP, Instant(1e9, uptime)).state
    state = machine.step(state, [XidSignal(A, 95)], MAP, Instant(1e9, 50)).state
    state = machine.step(state, [GpuReset("GPU-a", True)], MAP, Instant(1e9, 51)).state

    class Health(Collector):
        def collect(self):
            return families(state, machine.project(state, MAP))

    registry = CollectorRegistry()
    registry.register(Health())
    text = generate_latest(registry).decode()
    lines = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    assert lines == {
        f'gpunode_health_level{{device="{GPU}"}}': 2,
        f'gpunode_health_level{{device="{GPU}-mig-1"}}': 2,
        **{f"gpunode_health_finding{{{labels}}}": 1 for labels in FINDING_LABELS},
        f'gpunode_health_sightings{{code="13",device="{GPU}"}}': 5,
        f'gpunode_health_sightings{{code="95",device="{GPU}"}}': 1,
        f'gpunode_health_recovering{{device="{GPU}"}}': 1,
        f'gpunode_health_flaps{{device="{GPU}",dimension="xid"}}': 1,
    }
