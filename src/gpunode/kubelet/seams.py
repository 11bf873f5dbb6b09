"""What the kubelet plugin needs from others, as protocols: claims, hardware, and someone to tell."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpunode.kubelet.config import Sharing
from gpunode.model.injection import DeviceNodes
from gpunode.model.resource import ResourceClaim


class ClaimReader(Protocol):
    """Where live claims come from."""

    async def get(self, namespace: str, name: str) -> ResourceClaim:
        """The claim as the API server has it now. Raises LookupError when it is gone, other errors when unknown."""
        ...


class Partitioner(Protocol):
    """Makes and removes partitions (MIG instances) by device name. Blocking; called from one thread at a time.

    All methods can be called again after a kill at any point within them.
    """

    def create(self, device: str) -> DeviceNodes:
        """Make the partition, or adopt the one that is there; a half-made one is removed first.

        A whole GPU among them is made by undoing its division.

        Raises HardwareError with the driver's own words.
        """
        ...

    def remove(self, device: str) -> None:
        """Remove the partition and anything half-made in its place; one that is not there is removed already.

        Raises InUseError while something uses it, HardwareError otherwise.
        """
        ...

    def existing(self) -> frozenset[str]:
        """Names of partitions, whole or half-made, on the GPUs whose partitions come and go with claims.

        Partitions that an administrator made are not among them. Raises HardwareError.
        """
        ...


class SharingControl(Protocol):
    """Applies time slicing or MPS to the devices of one claim. Blocking; can be called again after a kill."""

    def refuses(self, wanted: Mapping[Sharing, Mapping[str, DeviceNodes]]) -> str:
        """Why this node cannot apply what one claim wants, its devices by sharing and name, or "" when it can."""
        ...

    def apply(self, uid: str, sharing: Sharing, devices: Mapping[str, DeviceNodes]) -> Mapping[str, DeviceNodes]:
        """Set the devices (by name) up for the claim; returns them with what containers need in addition.

        Raises HardwareError, NotOfferedError when no device is at fault.
        """
        ...

    def reset(self, uid: str, sharing: Sharing, devices: Mapping[str, DeviceNodes]) -> None:
        """Back to the default; nothing set up is nothing to do. Raises HardwareError, InUseError.

        After a kill a partition among the devices may lack its UUID; then nothing was set up for it.
        """
        ...

    def active(self) -> frozenset[str]:
        """Names of devices that are set up for some claim, by us. Raises HardwareError."""
        ...

    def clear(self, device: str) -> None:
        """Back to the default, whoever it was set up for. Raises HardwareError, InUseError."""
        ...

    def confirm(self, devices: Collection[str]) -> None:
        """Before devices that are set up are handed out again: wait a few seconds for what serves them.

        Raises HardwareError, NotOfferedError when it does not.
        """
        ...

    def troubles(self) -> Mapping[str, str]:
        """Devices that are set up and do not work now, or stopped working meanwhile, with the reason.

        Raises HardwareError.
        """
        ...


class ComputeMode(Protocol):
    """How many processes may use a whole GPU at a time. Blocking; raises HardwareError."""

    def exclusive(self, uuid: str) -> None:
        """One process."""
        ...

    def default(self, uuid: str) -> None:
        """Any number. A GPU that is gone needs nothing."""
        ...


@dataclass(frozen=True)
class Notice:
    """Something a person should know: becomes an Event. `claim` is namespace, name, uid where it is about one."""

    reason: str
    message: str
    claim: tuple[str, str, str] | None = None
    devices: tuple[str, ...] = ()


# All claims allocated on this node, as far as the API server knows them. May raise what the transport raises.
Allocated = Callable[[], Awaitable[Sequence[ResourceClaim]]]
Notify = Callable[[Notice], None]
# Called between persistent steps with the step's name; tests kill there.
Steps = Callable[[str], None]


def no_step(_name: str) -> None:
    """The default of `Steps`."""


@dataclass(frozen=True)
class Leftover:
    """A process that has a device open although its claim is gone."""

    pid: int
    command: str
    pod_uid: str = ""


class Processes(Protocol):
    """Who uses devices. Blocking."""

    def using(self, devices: Sequence[DeviceNodes]) -> Sequence[Leftover]:
        """Processes of this node that have one of these devices open."""
        ...
