"""From the addresses in signals to the devices they mean."""

from collections.abc import Callable
from dataclasses import dataclass, field

from gpunode.model.hardware import Gpu, Inventory, MigSlice, PciAddress, device_name, mig_device_name


@dataclass(frozen=True)
class Partition:
    """A MIG partition by the numbers that the driver uses in its messages."""

    name: str
    gi: int
    ci: int


@dataclass(frozen=True)
class KnownGpu:
    """What health needs of a GPU. `switched`: its NVLinks end in switches. `mig`: it is in MIG mode.

    switches: those that a link of it is known to end at. loose: it has a link of which nobody knows where it ends.
    """

    name: str
    uuid: str
    pci: PciAddress
    switched: bool = False
    partitions: tuple[Partition, ...] = ()
    mig: bool = False
    switches: frozenset[PciAddress] = frozenset()
    loose: bool = False


@dataclass(frozen=True)
class DeviceMap:
    """The GPUs of one node. `switch_ports`: GPU name by NVSwitch address and port, where that is known.

    driver_branch: e.g. 580, None where the driver's version is not known.
    """

    gpus: tuple[KnownGpu, ...] = ()
    driver_branch: int | None = None
    switch_ports: dict[tuple[PciAddress, int], str] = field(default_factory=dict)

    def gpu_at(self, pci: PciAddress) -> str:
        """Name of the GPU at an address; signals name no function, so 0 is meant.

        Names come from addresses, so a GPU that discovery no longer sees still has one.
        """
        return device_name(PciAddress(pci.domain, pci.bus, pci.device))

    def device_at(self, pci: PciAddress, gi: int | None, ci: int | None) -> str:
        """The partition that a signal names, or the whole GPU when it names none (or one that is not known)."""
        gpu = self.gpu_at(pci)
        if gi is None:
            return gpu
        found = [p.name for known in self.gpus if known.name == gpu for p in known.partitions if p.gi == gi]
        exact = [
            p.name for known in self.gpus if known.name == gpu for p in known.partitions if (p.gi, p.ci) == (gi, ci)
        ]
        return next(iter(exact or found), gpu)

    def by_uuid(self, uuid: str) -> str | None:
        return next((gpu.name for gpu in self.gpus if gpu.uuid == uuid), None)

    def partitions_of(self, gpu: str) -> tuple[str, ...]:
        return tuple(p.name for known in self.gpus if known.name == gpu for p in known.partitions)

    def behind_switch(self, switch: PciAddress, link: int | None) -> tuple[str, ...]:
        """GPUs that a switch fault reaches: the one at the port where that is known, else all behind that switch.

        Where no GPU is known to be behind that switch, all on switches; and where the driver does not even say what
        links end at, a node that has a switch has all its GPUs on it.
        """
        switch = PciAddress(switch.domain, switch.bus, switch.device)
        if link is not None and (name := self.switch_ports.get((switch, link))):
            return (name,)
        switched = [gpu for gpu in self.gpus if gpu.switched] or self.gpus
        if any(switch in gpu.switches for gpu in self.gpus):
            # A link that nobody ever saw up may be one to this switch.
            switched = [gpu for gpu in self.gpus if switch in gpu.switches or gpu.loose]
        return tuple(gpu.name for gpu in switched)


def _partition_name(gpu: Gpu, mig: MigSlice) -> str:
    return mig_device_name(gpu.pci, mig.profile, mig.placement_start)


def device_map(inventory: Inventory, partition_name: Callable[[Gpu, MigSlice], str] = _partition_name) -> DeviceMap:
    """The device map of an inventory."""
    return DeviceMap(
        tuple(
            KnownGpu(
                device_name(gpu.pci),
                gpu.uuid,
                gpu.pci,
                any(link.peer == "switch" for link in gpu.links),
                tuple(Partition(partition_name(gpu, m), m.gpu_instance, m.compute_instance) for m in gpu.mig),
                gpu.mig_enabled,
                frozenset(link.switch for link in gpu.links if link.switch is not None),
                any(link.switch is None and link.peer in ("", "switch") for link in gpu.links),
            )
            for gpu in inventory.gpus
        ),
        _branch(inventory.driver_version),
        _ports(inventory),
    )


def _ports(inventory: Inventory) -> dict[tuple[PciAddress, int], str]:
    """GPU names by switch and port. A port that several GPUs claim (a driver that answers the same for all) is not
    known."""
    claimed: dict[tuple[PciAddress, int], set[str]] = {}
    for gpu in inventory.gpus:
        for link in gpu.links:
            if link.switch is not None and link.port is not None:
                claimed.setdefault((link.switch, link.port), set()).add(device_name(gpu.pci))
    return {port: names.pop() for port, names in claimed.items() if len(names) == 1}


def _branch(version: str) -> int | None:
    head = version.partition(".")[0]
    return int(head) if head.isascii() and head.isdecimal() and len(head) < 6 else None
