"""Facts about PCI devices that the kernel knows better than NVML: PCIe root, NUMA node, network devices near by."""

import logging
import re
from pathlib import Path

from gpunode.hardware.roots import Roots
from gpunode.model.hardware import Nic, PciAddress

logger = logging.getLogger(__name__)

_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_ADDRESS = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")
# PCI class codes: 0x0200 Ethernet controller, 0x0207 InfiniBand controller.
_NETWORK_CLASSES = ("0x0200", "0x0207")
_MAX_SMALL_FILE = 4096
_MAX_NICS = 256


def parse_pci(value: str) -> PciAddress:
    """0000:07:00.0, or NVML's 8-digit domain form. Raises ValueError."""
    match = _ADDRESS.fullmatch(value)
    if match is None:
        raise ValueError(f"not a PCI address: {value[:32]!r} (example: 0000:07:00.0)")
    domain, bus, device, function = (int(part, 16) for part in match.groups())
    return PciAddress(domain, bus, device, function)


def read_small(path: Path) -> str:
    """A sysfs or /proc attribute without its line end; "" where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_SMALL_FILE).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def boot_id(roots: Roots) -> str:
    return read_small(roots.proc / "sys/kernel/random/boot_id")


def pcie_root(roots: Roots, pci: PciAddress) -> str:
    """Root complex the device hangs on, e.g. "pci0000:00"; "" where sysfs does not say."""
    path = (roots.sys / "bus/pci/devices" / str(pci)).resolve()
    return next((part for part in path.parts if _ROOT.fullmatch(part)), "")


def numa_node(roots: Roots, pci: PciAddress) -> int | None:
    """None where the kernel says -1 (no affinity known) or nothing."""
    value = read_small(roots.sys / "bus/pci/devices" / str(pci) / "numa_node")
    return int(value) if value.isdecimal() else None


def nics(roots: Roots) -> tuple[Nic, ...]:
    """Network functions on PCI, in PCI order; virtual functions are left out."""
    directory = roots.sys / "bus/pci/devices"
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError:
        return ()
    found: list[Nic] = []
    for name in names:
        device = directory / name
        if not read_small(device / "class").startswith(_NETWORK_CLASSES) or (device / "physfn").exists():
            continue
        try:
            pci = parse_pci(name)
        except ValueError:
            logger.warning("skipping %s: its name is not a PCI address", device)
            continue
        found.append(Nic(pci, pcie_root(roots, pci), numa_node(roots, pci), _first_child(device / "infiniband")))
    return tuple(found[:_MAX_NICS])


def _first_child(directory: Path) -> str:
    try:
        return min((path.name for path in directory.iterdir()), default="")
    except OSError:
        return ""
