"""What health reacts to: kernel log lines, NVML events and polls, each as a plain value."""

from dataclasses import dataclass

from gpunode.model.hardware import PciAddress
from gpunode.model.health import Dimension, GpuSample, RecoveryAction


@dataclass(frozen=True)
class XidSignal:
    """One XID, from the kernel log or from an NVML event (then, and only then, `text` is empty).

    gi, ci: MIG GPU and compute instance, None where the driver names none (NVML says 0xFFFFFFFF).
    pid is None when the driver does not know it. previous: the XID that a 45 says it follows.
    count: how many equal ones this value stands for.
    """

    pci: PciAddress
    code: int
    gi: int | None = None
    ci: int | None = None
    pid: int | None = None
    process: str = ""
    text: str = ""
    previous: int | None = None
    count: int = 1


@dataclass(frozen=True)
class SxidSignal:
    """One NVSwitch error. `switch` is the switch's number, `link` its port or None."""

    pci: PciAddress
    switch: int
    code: int
    fatal: bool
    link: int | None = None
    text: str = ""
    count: int = 1


@dataclass(frozen=True)
class FallenOffBus:
    """The kernel says the GPU is off the bus, in a line that is not an XID."""

    pci: PciAddress


@dataclass(frozen=True)
class RecoveryActionChanged:
    """XID 154: the driver's verdict on a GPU changed."""

    pci: PciAddress
    old: RecoveryAction
    new: RecoveryAction


@dataclass(frozen=True)
class GpuReset:
    """A reset of one GPU was reported. A failed one leaves a GPU that needs the host restarted."""

    uuid: str
    success: bool


@dataclass(frozen=True)
class DriverReloaded:
    """The driver was loaded anew; every GPU was initialised with it."""

    version: str


@dataclass(frozen=True)
class GpuLost:
    """NVML says that the GPU is lost or cannot be used. `reason` is NVML's word."""

    pci: PciAddress
    reason: str


@dataclass(frozen=True)
class PrepareResult:
    """Outcome of preparing one device for a claim; `error` is empty on success."""

    device: str
    error: str = ""


@dataclass(frozen=True)
class OperatorClear:
    """A person declares a device (in one dimension, or in all) to be in order."""

    device: str
    by: str
    dimension: Dimension | None = None


Signal = (
    XidSignal
    | SxidSignal
    | FallenOffBus
    | RecoveryActionChanged
    | GpuReset
    | DriverReloaded
    | GpuLost
    | PrepareResult
    | OperatorClear
    | GpuSample
)
