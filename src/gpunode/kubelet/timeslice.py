"""Time slicing through the driver's own tool, with a note on disk of what was set.

    nvidia-smi compute-policy -i <uuid> --set-timeslice=<0..3>     (0 is the driver's default)

NVML has no call for it.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from gpunode.files import write_atomic
from gpunode.kubelet.config import Interval, Sharing, TimeSlicing
from gpunode.kubelet.seams import Steps, no_step
from gpunode.kubelet.tool import run_tool
from gpunode.model.errors import HardwareError
from gpunode.model.injection import DeviceNodes

logger = logging.getLogger(__name__)

Run = Callable[[Sequence[str]], None]
_TIMEOUT_S: Final = 20.0
_STEPS: Final = {Interval.DEFAULT: 0, Interval.SHORT: 1, Interval.MEDIUM: 2, Interval.LONG: 3}
_DEVICE = re.compile(r"[a-z0-9-]{1,63}")


class _Note(msgspec.Struct):
    """Content of a note: the device it is about, as CUDA calls it."""

    uuid: str


def run_command(command: Sequence[str]) -> None:
    """Run a driver tool. Raises HardwareError with what it printed."""
    run_tool(command, _TIMEOUT_S)


class TimeSlices:
    """A `SharingControl` whose notes are files in `directory`, one a device, written before the setting is made."""

    def __init__(self, directory: Path, run: Run = run_command, step: Steps = no_step) -> None:
        self._directory = directory
        self._run = run
        self._step = step

    def refuses(self, wanted: Mapping[Sharing, Mapping[str, DeviceNodes]]) -> str:
        """Nothing of its own strategy."""
        return ""

    def apply(self, uid: str, sharing: Sharing, devices: Mapping[str, DeviceNodes]) -> Mapping[str, DeviceNodes]:
        """Set the interval of every device. Raises HardwareError."""
        if not isinstance(sharing, TimeSlicing):
            raise HardwareError(f"{type(sharing).__name__} is not time slicing")
        for device, nodes in devices.items():
            note = self._note(device)
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                write_atomic(note, msgspec.json.encode(_Note(nodes.uuid)), durable=True, step=self._step)
            except OSError as error:
                raise HardwareError(f"cannot note that the time slice of {device} is changed: {error}") from error
            self._step(f"set time slice of {device}")
            self._set(nodes.uuid, sharing.interval)
            logger.info("time slice of %s is %s for claim %s", device, sharing.interval, uid)
        return devices

    def reset(self, uid: str, sharing: Sharing, devices: Mapping[str, DeviceNodes]) -> None:
        """Back to the driver's default. Raises HardwareError."""
        for device in devices:
            self.clear(device)

    def active(self) -> frozenset[str]:
        """Devices with a note. Raises HardwareError."""
        try:
            return frozenset(file.name for file in self._directory.iterdir() if _DEVICE.fullmatch(file.name))
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            raise HardwareError(f"cannot read the notes of time slices: {error}") from error

    def clear(self, device: str) -> None:
        """Back to the driver's default, if there is a note. Raises HardwareError."""
        note = self._note(device)
        try:
            uuid = msgspec.json.decode(note.read_bytes(), type=_Note).uuid
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            raise HardwareError(f"cannot read {note}: {error}; remove it and set the time slice by hand") from error
        self._step(f"reset time slice of {device}")
        self._set(uuid, Interval.DEFAULT)
        self._step(f"remove note of {device}")
        try:
            note.unlink(missing_ok=True)
        except OSError as error:
            raise HardwareError(f"cannot remove {note}: {error}") from error

    def confirm(self, devices: Collection[str]) -> None:
        """Nothing serves a time slice that could have ended."""

    def troubles(self) -> Mapping[str, str]:
        """None: what is set stays set."""
        return {}

    def _note(self, device: str) -> Path:
        if not _DEVICE.fullmatch(device):
            raise HardwareError(f"{device[:80]!r} is not a device name")
        return self._directory / device

    def _set(self, uuid: str, interval: Interval) -> None:
        self._run(["nvidia-smi", "compute-policy", "-i", uuid, f"--set-timeslice={_STEPS[interval]}"])
