"""The agent's side of MPS: says which daemons are wanted, waits for the keeper, and sets GPUs to one process at a time.

What is wanted is written before a compute mode is changed, and removed after it is set back, so that a kill in between
leaves a file that says what to undo. A daemon is stopped before its GPU is open to other processes again.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from gpunode.files import sync_directory, write_atomic
from gpunode.kubelet.config import Mps, Sharing
from gpunode.kubelet.mps.files import PIPE, SHM, DaemonState, MpsFiles, Phase, Wanted, encode, read
from gpunode.kubelet.seams import ComputeMode, Steps, no_step
from gpunode.model.errors import HardwareError, InUseError, NotOfferedError
from gpunode.model.injection import DeviceNodes, Mount

logger = logging.getLogger(__name__)

_MISSING: Final = (
    "no MPS keeper runs on this node, so nothing would keep the control daemon: "
    "install daemonset/mps, or start `gpunode mps-keeper`"
)
_NOT_STARTED: Final = "the MPS daemon is about to start"
_MAX_MEMORY: Final = 1 << 50
_OPTIONS: Final = ("rw", "nosuid", "nodev", "noexec", "bind")


@dataclass(frozen=True)
class Patience:
    """Seconds to wait for a daemon to be ready and to be stopped, and between two looks.

    hung: how long a keeper that did nothing in that time is waited for no longer than probe, in which one that works
    does something. The node lock is held meanwhile, and the node's other claims shall not wait for it once for each.
    """

    ready: float = 5.0
    stopped: float = 8.0
    look: float = 0.02
    hung: float = 30.0
    probe: float = 0.5


class MpsDaemons:
    """A `SharingControl` for strategy MPS. One daemon serves all whole GPUs that a claim shares, or one partition."""

    def __init__(
        self,
        directory: Path,
        modes: ComputeMode,
        step: Steps = no_step,
        patience: Patience = Patience(),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._files = MpsFiles(directory)
        self._modes = modes
        self._step = step
        self._patience = patience
        self._sleep = sleep
        self._hung_until = 0.0
        self._late: dict[str, float] = {}  # daemons that were not stopped in time, and until when that counts

    def refuses(self, wanted: Mapping[Sharing, Mapping[str, DeviceNodes]]) -> str:
        """Why this cannot be applied here, or ""."""
        groups = [devices for sharing, devices in wanted.items() if isinstance(sharing, Mps)]
        if not groups:
            return ""
        if len(groups) > 1:
            return (
                "a container can be the client of one MPS daemon only, so all devices that a claim shares through MPS "
                "need the same settings; put the others into a claim and a pod of their own"
            )
        if len(groups[0]) > 1 and any(nodes.parent for nodes in groups[0].values()):
            return "MPS serves whole GPUs, or one partition by itself; ask for one partition a claim"
        if any(isinstance(sharing, Mps) and (sharing.pinned_memory_bytes or 0) >= _MAX_MEMORY for sharing in wanted):
            return "pinnedDeviceMemoryLimit is more than any GPU has"
        try:
            return self._keeper()[1]
        except OSError as error:
            return f"whether an MPS keeper runs on this node cannot be told: {error}"

    def apply(self, uid: str, sharing: Sharing, devices: Mapping[str, DeviceNodes]) -> Mapping[str, DeviceNodes]:
        """Have a daemon for the devices; returns them with its pipes and shared memory. Raises HardwareError."""
        if not isinstance(sharing, Mps):
            raise HardwareError(f"{type(sharing).__name__} is not MPS")
        wanted = _wanted(sharing, devices)
        try:
            known = self._read_all()
            for name, other in known.items():
                mine = wanted.devices.keys() & (other.devices if other else {name})
                if mine and other is None:
                    self._clear_damaged(name, devices)
                elif mine and other is not None and other != wanted:
                    self._stop(name, other)
            if known.get(wanted.name) != wanted:
                self._write(wanted)
        except OSError as error:
            raise HardwareError(f"cannot say that a MPS daemon of {wanted.name} is wanted: {error}") from error
        for gpu in wanted.exclusive:
            self._step(f"make {gpu} exclusive")
            self._modes.exclusive(gpu)
        self._wait_ready(wanted)
        logger.info("MPS daemon of %s serves claim %s", ", ".join(sorted(devices)), uid)
        return {name: self._with_daemon(wanted.name, nodes) for name, nodes in devices.items()}

    def reset(self, uid: str, sharing: Sharing, devices: Mapping[str, DeviceNodes]) -> None:
        """End the daemons of these devices. Raises HardwareError."""
        for name, wanted in self._all().items():
            if wanted is None and name in devices:
                self._clear_damaged(name, devices)
            elif wanted is not None and wanted.devices.keys() & devices.keys():
                self._end(name, wanted)

    def active(self) -> frozenset[str]:
        """Devices a daemon is wanted for, or was until something failed. Raises HardwareError."""
        found = self._all()
        return frozenset(d for name, wanted in found.items() for d in (wanted.devices if wanted else (name,)))

    def clear(self, device: str) -> None:
        """End the daemon of a device, and with it that of all devices it serves. Raises HardwareError."""
        for name, wanted in self._all().items():
            if wanted is None and name == device:
                self._clear_damaged(name, {})
            elif wanted is not None and device in wanted.devices:
                self._end(name, wanted)

    def confirm(self, devices: Collection[str]) -> None:
        """Wait a few seconds for the daemons of these devices. Raises HardwareError."""
        for name, wanted in self._all().items():
            if wanted is None and name in devices:
                raise HardwareError(f"{self._files.wanted(name)} is damaged; end the claim's pods to have it made anew")
            if wanted is not None and not wanted.stop and wanted.devices.keys() & set(devices):
                self._wait_ready(wanted)

    def troubles(self) -> Mapping[str, str]:
        """Devices whose daemon does not serve now, or ended and serves again, with the reason. Raises HardwareError."""
        found: dict[str, str] = {}
        for name, wanted in self._all().items():
            if wanted is None:
                found[name] = f"{self._files.wanted(name)} is damaged"
            elif not wanted.stop and (why := self._unready(wanted)[0] or self._started_again(wanted)):
                found |= dict.fromkeys(wanted.devices, why)
        return found

    def _keeper(self) -> tuple[str, str]:
        """Token of the keeper, and why it cannot keep daemons. Raises OSError."""
        try:
            state = self._files.living_keeper()
        except ValueError as error:
            return "", f"the MPS keeper's {self._files.keeper.name} cannot be read: {error}"
        if state is None:
            return "", _MISSING
        return state.token, f"the MPS keeper of this node cannot work: {state.problem}" if state.problem else ""

    def _unready(self, wanted: Wanted) -> tuple[str, type[HardwareError] | None]:
        """Why the daemon does not serve ("" if it does), and what that is; None where waiting may help.

        Raises HardwareError.
        """
        try:
            token, problem = self._keeper()
            state = read(self._files.state(wanted.name), DaemonState)
        except (OSError, ValueError) as error:
            raise HardwareError(f"the state of the MPS daemon of {wanted.name} cannot be read: {error}") from error
        if problem:
            return problem, NotOfferedError
        if state is None or state.keeper != token or state.wanted not in (wanted, None):
            return _NOT_STARTED, None
        if state.phase is Phase.READY:
            return "", None
        words = f"the MPS daemon is {state.phase}" if state.phase is not Phase.FAILED else "the MPS daemon failed"
        words += f": {state.message}" if state.message else ""
        if state.phase is not Phase.FAILED:
            return words, None
        return words, NotOfferedError if state.refused else HardwareError

    def _started_again(self, wanted: Wanted) -> str:
        """What became of the processes of a daemon that serves: "" unless they lost it."""
        try:
            state = read(self._files.state(wanted.name), DaemonState)
        except (OSError, ValueError):
            return ""
        if state is None or not state.restarts:
            return ""
        return f"the MPS daemon ended and was started again ({state.restarts}): processes that used it start anew"

    def _wait_ready(self, wanted: Wanted) -> None:
        """Raises HardwareError; NotOfferedError where it is the keeper that does nothing."""
        deadline = self._deadline(self._patience.ready)
        while True:
            self._step(f"look at the daemon of {wanted.name}")
            why, kind = self._unready(wanted)
            if why != _NOT_STARTED and self._hung_until:
                self._hung_until = 0.0
                deadline = self._deadline(self._patience.ready)
            if not why:
                return
            if kind is None and time.monotonic() >= deadline:
                if why == _NOT_STARTED:
                    self._hung_until = time.monotonic() + self._patience.hung
                    raise NotOfferedError(f"{why}, but the MPS keeper of this node does nothing; its log may say why")
                kind = HardwareError
            if kind is not None:
                raise kind(why)
            self._sleep(self._patience.look)

    def _deadline(self, patience_s: float) -> float:
        now = time.monotonic()
        return now + (min(patience_s, self._patience.probe) if now < self._hung_until else patience_s)

    def _all(self) -> dict[str, Wanted | None]:
        try:
            return self._read_all()
        except OSError as error:
            raise HardwareError(f"cannot read which MPS daemons are wanted: {error}") from error

    def _read_all(self) -> dict[str, Wanted | None]:
        """By name; None for a file that cannot be understood. Raises OSError."""
        found: dict[str, Wanted | None] = {}
        for name in self._files.names_wanted():
            try:
                one = read(self._files.wanted(name), Wanted)
            except ValueError:
                found[name] = None
                continue
            if one is not None:
                found[name] = one if one.name == name else None
        return found

    def _end(self, name: str, wanted: Wanted) -> None:
        try:
            self._stop(name, wanted)
        except OSError as error:
            raise HardwareError(f"cannot say that the MPS daemon of {name} is not wanted: {error}") from error

    def _stop(self, name: str, wanted: Wanted) -> None:
        """Raises OSError, HardwareError."""
        if not wanted.stop:
            self._write(replace(wanted, stop=True))
        self._wait_stopped(name)
        for gpu in wanted.exclusive:
            self._step(f"open {gpu} to all processes")
            self._modes.default(gpu)
        self._remove(name)

    def _wait_stopped(self, name: str) -> None:
        """Without a keeper no daemon lives. Raises OSError, InUseError."""
        late = time.monotonic() < self._late.get(name, 0.0)
        deadline = self._deadline(self._patience.probe if late else self._patience.stopped)
        there = self._files.daemon(name).exists()
        while self._files.daemon(name).exists() and self._keeper()[1] != _MISSING:
            if time.monotonic() >= deadline:
                self._mark_late(name)
                raise InUseError(f"the MPS keeper has not stopped the daemon of {name} yet; its log says why")
            self._step(f"look at the stopping daemon of {name}")
            self._sleep(self._patience.look)
        self._late.pop(name, None)
        if there:
            self._hung_until = 0.0

    def _mark_late(self, name: str) -> None:
        """One that cannot be stopped may be the daemon's fault, two at a time are the keeper's."""
        now = time.monotonic()
        self._late = {other: until for other, until in self._late.items() if until > now}
        self._late.setdefault(name, now + self._patience.hung)
        if len(self._late) > 1:
            self._hung_until = max(self._late.values())

    def _clear_damaged(self, name: str, devices: Mapping[str, DeviceNodes]) -> None:
        """A file that says nothing is set aside. devices: those known to be of it, so that their mode can be set."""
        path = self._files.wanted(name)
        try:
            self._step(f"set {path.name} aside")
            path.replace(self._files.root / "damaged.json")
            self._wait_stopped(name)
        except OSError as error:
            raise HardwareError(f"{path} is damaged and cannot be set aside: {error}") from error
        for nodes in devices.values():
            if nodes.uuid and not nodes.parent:
                self._modes.default(nodes.uuid)
        if not devices:
            raise HardwareError(
                f"{path} was damaged and is now {self._files.root / 'damaged.json'}; look whether a GPU still has "
                "compute mode Exclusive_Process (nvidia-smi -q -d COMPUTE) and set it back (nvidia-smi -c DEFAULT)"
            )

    def _write(self, wanted: Wanted) -> None:
        self._files.wanted_dir.mkdir(parents=True, exist_ok=True)
        write_atomic(self._files.wanted(wanted.name), encode(wanted), durable=True, step=self._step)

    def _remove(self, name: str) -> None:
        self._step(f"remove {name}.json")
        self._files.wanted(name).unlink(missing_ok=True)
        sync_directory(self._files.wanted_dir)

    def _with_daemon(self, name: str, nodes: DeviceNodes) -> DeviceNodes:
        place = self._files.daemon(name)
        mounts = (Mount(str(place / PIPE[1:]), PIPE, _OPTIONS), Mount(str(place / "shm"), SHM, _OPTIONS))
        return replace(nodes, env=nodes.env | {"CUDA_MPS_PIPE_DIRECTORY": PIPE}, mounts=nodes.mounts + mounts)


def _wanted(sharing: Mps, devices: Mapping[str, DeviceNodes]) -> Wanted:
    return Wanted(
        devices={name: nodes.uuid for name, nodes in devices.items()},
        exclusive=tuple(nodes.uuid for _, nodes in sorted(devices.items()) if not nodes.parent),
        thread_percentage=sharing.active_thread_percentage,
        memory_bytes=sharing.pinned_memory_bytes,
    )
