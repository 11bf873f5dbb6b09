"""The sharing strategies as one: each part of a claim goes to the control of its strategy."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gpunode.kubelet.config import Mps, Sharing
from gpunode.kubelet.seams import SharingControl
from gpunode.model.injection import DeviceNodes


@dataclass(frozen=True)
class Strategies:
    """A `SharingControl` made of one for time slicing and one for MPS. A device is set up by one of them at a time."""

    slices: SharingControl
    mps: SharingControl

    def refuses(self, wanted: Mapping[Sharing, Mapping[str, DeviceNodes]]) -> str:
        """Why this cannot be applied here, or ""."""
        return self.slices.refuses(wanted) or self.mps.refuses(wanted)

    def apply(self, uid: str, sharing: Sharing, devices: Mapping[str, DeviceNodes]) -> Mapping[str, DeviceNodes]:
        """Set the devices up, and undo what the other strategy may have left on them. Raises HardwareError."""
        mine, other = (self.mps, self.slices) if isinstance(sharing, Mps) else (self.slices, self.mps)
        for device in sorted(other.active() & devices.keys()):
            other.clear(device)
        return mine.apply(uid, sharing, devices)

    def reset(self, uid: str, sharing: Sharing, devices: Mapping[str, DeviceNodes]) -> None:
        """Back to the default. Raises HardwareError, InUseError."""
        (self.mps if isinstance(sharing, Mps) else self.slices).reset(uid, sharing, devices)

    def active(self) -> frozenset[str]:
        """Devices set up by either. Raises HardwareError."""
        return self.slices.active() | self.mps.active()

    def clear(self, device: str) -> None:
        """Back to the default, whichever strategy set it up. Raises HardwareError, InUseError."""
        self.slices.clear(device)
        self.mps.clear(device)

    def confirm(self, devices: Collection[str]) -> None:
        """Raises HardwareError where what was set up does not work now."""
        self.slices.confirm(devices)
        self.mps.confirm(devices)

    def troubles(self) -> Mapping[str, str]:
        """What does not work now, by device. Raises HardwareError."""
        return {**self.slices.troubles(), **self.mps.troubles()}
