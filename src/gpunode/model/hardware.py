"""What a node's hardware is, as discovery found it: plain values, no NVML types."""

from dataclasses import dataclass
from typing import Final

# Between a GPU's device name and the rest of its partitions' names.
PARTITION_MARK: Final = "-mig-"


@dataclass(frozen=True)
class PciAddress:
    """A PCI function, always in the long form 0000:07:00.0 (lower case)."""

    domain: int
    bus: int
    device: int
    function: int = 0

    def __str__(self) -> str:
        return f"{self.domain:04x}:{self.bus:02x}:{self.device:02x}.{self.function:x}"


@dataclass(frozen=True)
class Link:
    """One NVLink of a GPU. `peer` is a GPU's UUID, or "switch", or "" where the driver does not say.

    switch, port: the NVSwitch at the other end (function 0) and the number of its link there, None where not known.
    """

    index: int
    active: bool
    peer: str = ""
    version: int = 0
    switch: PciAddress | None = None
    port: int | None = None


@dataclass(frozen=True)
class Fabric:
    """NVLink fabric registration. state: unsupported, notStarted, inProgress or completed.

    `cluster_uuid` is empty when the driver reports all zeros (the domain is then this node).
    """

    state: str
    cluster_uuid: str = ""
    clique: int = 0
    healthy: bool = True


@dataclass(frozen=True)
class Nic:
    """A network device near the GPUs; `rdma` is the RDMA device name or ""."""

    pci: PciAddress
    pcie_root: str
    numa_node: int | None
    rdma: str = ""


@dataclass(frozen=True)
class MigSlice:
    """An existing MIG instance (GPU instance with one compute instance)."""

    uuid: str
    profile: str
    placement_start: int
    placement_size: int
    gpu_instance: int
    compute_instance: int
    memory_bytes: int


@dataclass(frozen=True)
class MigProfile:
    """A kind of GPU instance a board can be cut into, with what one such instance takes away from the GPU.

    id: the driver's profile id (19 for 1g). slices: compute slices. starts, size: legal placements in memory slices.
    """

    name: str
    id: int
    slices: int
    starts: tuple[int, ...]
    size: int
    memory_bytes: int
    multiprocessors: int
    copy_engines: int = 0
    decoders: int = 0
    encoders: int = 0
    jpeg_engines: int = 0
    ofa_engines: int = 0


@dataclass(frozen=True)
class Gpu:
    """One physical GPU. Fields that the driver does not offer are None or empty."""

    uuid: str
    pci: PciAddress
    minor: int
    product: str
    memory_bytes: int
    pcie_root: str = ""
    numa_node: int | None = None
    brand: str = ""
    architecture: str = ""
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    serial: str = ""
    links: tuple[Link, ...] = ()
    nvlink_peers: frozenset[str] = frozenset()
    fabric: Fabric = Fabric("unsupported")
    mig_enabled: bool = False
    mig: tuple[MigSlice, ...] = ()
    mig_profiles: tuple[MigProfile, ...] = ()


@dataclass(frozen=True)
class Inventory:
    """Everything discovery found on one node, GPUs in PCI order."""

    node: str
    boot_id: str
    driver_version: str = ""
    cuda_version: str = ""
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()


def device_name(pci: PciAddress) -> str:
    """DRA device name of a full GPU: from its PCI address, never from an index (design D5).

    A DNS label: 0000:07:00.0 -> "gpu-0000-07-00-0".
    """
    return f"gpu-{pci.domain:04x}-{pci.bus:02x}-{pci.device:02x}-{pci.function:x}"


def mig_device_name(pci: PciAddress, profile: str, start: int) -> str:
    """DRA device name of a MIG partition: its GPU's name, profile and placement start (design D5).

    A DNS label: ("0000:07:00.0", "1g.10gb+me", 4) -> "gpu-0000-07-00-0-mig-1g-10gb-me-4".
    """
    return f"{device_name(pci)}{PARTITION_MARK}{profile.replace('.', '-').replace('+', '-').lower()}-{start}"
