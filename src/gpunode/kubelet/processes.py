"""Who has a GPU open: by device number, so that the name a container gave the node does not matter."""

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from gpunode.kubelet.seams import Leftover
from gpunode.model.injection import DeviceNodes

logger = logging.getLogger(__name__)

MAX_FDS: Final = 65536
# kubelet cgroups: .../kubepods-burstable-pod3f2a9c1e_77b0_....slice/... or .../pod3f2a9c1e-77b0-.../...
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")


class OpenDevices:
    """Reads /proc of the host (the agent shares its PID namespace)."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def using(self, devices: Sequence[DeviceNodes]) -> Sequence[Leftover]:
        """Processes other than this one that have a device open; what cannot be read does not count."""
        by_number = {number: "" for device in devices for number in _numbers(device)}
        return self._users(by_number).get("", [])

    def users(self, devices: Mapping[str, DeviceNodes]) -> Mapping[str, Sequence[Leftover]]:
        """The same for each device by its key, in one walk through all processes; keys without a user are left out."""
        return self._users({number: key for key, device in devices.items() for number in _numbers(device)})

    def _users(self, keys: Mapping[int, str]) -> dict[str, list[Leftover]]:
        found: dict[str, list[Leftover]] = {}
        for pid in psutil.pids() if keys else ():
            open_keys = {keys[number] for number in self._open_numbers(pid) if number in keys}
            if open_keys and pid != os.getpid():
                user = self._leftover(pid)
                for key in open_keys:
                    found.setdefault(key, []).append(user)
        return found

    def _open_numbers(self, pid: int) -> Iterator[int]:
        with suppress(OSError), os.scandir(self._proc / str(pid) / "fd") as fds:
            for _, fd in zip(range(MAX_FDS), fds, strict=False):
                with suppress(OSError):
                    yield fd.stat().st_rdev

    def _leftover(self, pid: int) -> Leftover:
        command, pod = "?", ""
        with suppress(psutil.Error):
            command = psutil.Process(pid).name()
        with suppress(OSError):
            if found := _POD.search((self._proc / str(pid) / "cgroup").read_text(errors="replace")[:4096]):
                pod = found.group(1).replace("_", "-")
        return Leftover(pid, command, pod)


def _numbers(device: DeviceNodes) -> set[int]:
    numbers = set()
    for path in own_nodes(device):
        with suppress(OSError):
            numbers.add(os.stat(path).st_rdev)  # noqa: PTH116 (a number is wanted, not a Path)
    return numbers - {0}


def own_nodes(device: DeviceNodes) -> list[str]:
    """Host paths of nodes that belong to this device alone: a partition shares /dev/nvidia<n> with its GPU."""
    paths = [node.host_path for node in device.nodes]
    return [p for p in paths if "nvidia-cap" in p] if device.parent else paths
