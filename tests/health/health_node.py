"""A GPU node in miniature for the tests of health: two GPUs, one with two partitions, behind one switch."""

from dataclasses import replace

from gpunode.health.devices import DeviceMap, KnownGpu, Partition
from gpunode.health.machine import HealthMachine
from gpunode.health.policy import Policy
from gpunode.health.signals import RecoveryActionChanged, Signal, XidSignal
from gpunode.health.state import HealthState, Instant, Transition
from gpunode.model.hardware import PciAddress, device_name
from gpunode.model.health import GpuSample, Level, NodeHealth
from gpunode.model.health import RecoveryAction as Recovery

A, B = PciAddress(0, 7, 0), PciAddress(0, 0x0F, 0)
GPU_A, GPU_B = device_name(A), device_name(B)
PART_1, PART_2 = f"{GPU_A}-mig-1", f"{GPU_A}-mig-2"
SWITCH = PciAddress(0, 0xC4, 0)
MAP = DeviceMap(
    (
        KnownGpu(GPU_A, "GPU-a", A, True, (Partition(PART_1, 1, 0), Partition(PART_2, 2, 0))),
        KnownGpu(GPU_B, "GPU-b", B, True),
    ),
    switch_ports={(SWITCH, 30): GPU_B},
)
GOOD_A = GpuSample("GPU-a", A, recovery=Recovery.NONE, ecc_uncorrected=0, remap_pending=False, remap_failed=False)
NONE_A = RecoveryActionChanged(A, Recovery.GPU_RESET, Recovery.NONE)


class Node:
    """A state with a clock: keeps tests short."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.machine = HealthMachine(policy=policy or Policy())
        self.state, self.now = HealthState(boot_id="boot-1"), 100.0
        self.log: list[Transition] = []

    def feed(self, *signals: Signal, after: float = 1.0) -> NodeHealth:
        self.now += after
        step = self.machine.step(self.state, signals, MAP, Instant(1_700_000_000 + self.now, self.now))
        self.state = step.state
        self.log += step.transitions
        return self.health

    @property
    def health(self) -> NodeHealth:
        return self.machine.project(self.state, MAP)

    def level(self, device: str = GPU_A) -> Level:
        return self.health.of(device).level

    def changes(self) -> list[tuple[str, str]]:
        return [(t.code, t.change) for t in self.log]


def xid(code: int, pci: PciAddress = A, **fields: object) -> XidSignal:
    return replace(XidSignal(pci, code, text="text"), **fields)
