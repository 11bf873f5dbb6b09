"""One control daemon: started, set up, watched, started again when it ends, stopped. Everything here blocks."""

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from gpunode.files import within, write_atomic
from gpunode.kubelet.mps import launch
from gpunode.kubelet.mps.files import LOG, PIPE, DaemonState, MpsFiles, Phase, Wanted, encode, printable

logger = logging.getLogger(__name__)

TOOL: Final = "nvidia-cuda-mps-control"
_DIRECTORIES: Final = ("usr/bin", "usr/local/bin", "bin", "usr/local/nvidia/bin", "usr/sbin")
_PATH: Final = "/usr/local/nvidia/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_MIB: Final = 2**20
_ANSWER_LIMIT: Final = 4096
# The daemon's /tmp: pipes and logs. Containers can write to the pipes' directory, so all of it is bounded.
_TMP_OPTIONS: Final = "mode=0755,size=64m,nr_inodes=4096"
_SHM_OPTIONS: Final = "mode=1777"
_NUMBER = re.compile(r"\d+(\.\d+)?")


class ToolError(Exception):
    """The tool failed; its own words."""


class SettingsError(ToolError):
    """The daemon answers, but does not take what the claim asks for."""


@dataclass(frozen=True)
class Times:
    """Seconds. start: for a daemon to answer. call: for one call of the tool. stop: for each way of stopping it.
    check: between two looks whether it still answers. back_off: least and longest wait before it is started again."""

    start: float = 10.0
    call: float = 5.0
    stop: float = 1.0
    check: float = 60.0
    back_off: tuple[float, float] = (1.0, 60.0)


@dataclass(frozen=True)
class Driver:
    """Where the driver's programs are. root: its root directory. tool: the control program, a name or a path in it."""

    root: Path = Path("/")
    tool: str = TOOL

    def find(self) -> str:
        """Path of the tool within the root. Raises ToolError when it cannot be run there."""
        for needed in ("tmp", "dev/shm"):
            if not (self.root / needed).is_dir():
                raise ToolError(f"{self.root / needed} is no directory; name the driver's root with --driver-root")
        places = [self.tool] if self.tool.startswith("/") else [f"/{d}/{self.tool}" for d in _DIRECTORIES]
        for place in places:
            found = within(self.root, place)
            if os.access(found, os.X_OK):
                if (self.root / "tmp") in found.parents:
                    raise ToolError(f"{place} is below /tmp, which is another directory for a daemon")
                return place
        raise ToolError(f"there is no {self.tool} below {self.root}; name the driver's root with --driver-root")


class Daemon:
    """Keeps one daemon running, in a thread of its own, until `stop`. The daemon dies with that thread.

    keeper: token of the keeper, which marks what is said about the daemon as said by this one.
    """

    def __init__(self, files: MpsFiles, wanted: Wanted, driver: Driver, keeper: str, times: Times) -> None:
        self.wanted = wanted
        self._directory = files.daemon(wanted.name)
        self._file = files.state(wanted.name)
        self._driver = driver
        self._times = times
        self._state = DaemonState(phase=Phase.STARTING, wanted=wanted, keeper=keeper)
        self._stop = threading.Event()
        self._remove = False
        self._thread = threading.Thread(target=self._run, name=wanted.name, daemon=True)

    def start(self) -> None:
        """Returns at once."""
        self._thread.start()

    def stop(self, *, remove: bool) -> None:
        """Ask it to end. remove: its directory goes too; otherwise containers keep what they have mounted of it."""
        self._remove = self._remove or remove
        self._stop.set()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        least, longest = self._times.back_off
        pause = least
        try:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    self._once()
                except (ToolError, OSError) as error:
                    self._say(Phase.FAILED, printable(str(error)), refused=isinstance(error, SettingsError))
                except Exception as error:
                    logger.exception("%s: keeping its daemon failed", self.wanted.name)
                    self._say(Phase.FAILED, printable(repr(error)))
                if time.monotonic() - began > longest:
                    pause = least
                if not self._stop.wait(pause):
                    pause = min(2 * pause, longest)
                    self._state = replace(self._state, restarts=self._state.restarts + 1)
        finally:
            if self._remove:
                remove(self._directory)
            else:
                self._say(Phase.STOPPED, "the keeper has ended")

    def _once(self) -> None:
        """From start to end. Raises ToolError, OSError saying why it ended; returns when it was stopped."""
        _no_link(self._directory)
        self._say(Phase.STARTING)
        output = self._prepare()
        with output.open("wb") as log:
            process = subprocess.Popen(
                self._command("-f"), env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        try:
            self._set_up(process, output)
            self._say(Phase.READY, pid=process.pid)
            self._watch(process, output)
        finally:
            self._end(process)

    def _set_up(self, process: "subprocess.Popen[bytes]", output: Path) -> None:
        deadline = time.monotonic() + self._times.start
        while True:
            try:
                self._threads()
                break
            except ToolError as error:
                self._check_alive(process, output)
                if time.monotonic() > deadline:
                    raise ToolError(f"it does not answer within {self._times.start:.0f} s: {error}") from error
                if self._stop.wait(0.02):
                    raise ToolError("stopped") from None
        try:
            self._apply_settings()
        except SettingsError:
            raise
        except ToolError as error:
            self._check_alive(process, output)
            raise SettingsError(f"it does not take the settings: {error}") from error

    def _apply_settings(self) -> None:
        if commands := settings(self.wanted):
            self._call(*commands)
        wished = self.wanted.thread_percentage
        if wished is not None and (told := self._threads()) != wished:
            raise SettingsError(f"it keeps {told:g} % of threads although {wished} % were set")
        if self.wanted.memory_bytes is not None:
            told_limit = self._call("get_default_device_pinned_mem_limit 0")
            if not _NUMBER.search(told_limit):
                raise SettingsError(f"it did not take the memory limit: {printable(told_limit) or 'nothing said'}")

    def _threads(self) -> float:
        told = self._call("get_default_active_thread_percentage")
        number = _NUMBER.search(told)
        if number is None:
            raise ToolError(printable(told) or "no answer")
        return float(number[0])

    def _watch(self, process: "subprocess.Popen[bytes]", output: Path) -> None:
        """Until it ends (ToolError) or is to be stopped. One that does not answer keeps its clients, and is told."""
        looked = time.monotonic()
        while not self._stop.wait(0.5):
            self._check_alive(process, output)
            if time.monotonic() - looked < self._times.check:
                continue
            try:
                self._threads()
                if self._state.phase is not Phase.READY:
                    self._say(Phase.READY, pid=process.pid)
            except ToolError as error:
                self._say(Phase.FAILED, f"it runs but does not answer: {error}", process.pid)
            looked = time.monotonic()

    def _check_alive(self, process: "subprocess.Popen[bytes]", output: Path) -> None:
        if (status := _ended(process)) is None:
            return
        with suppress(OSError), output.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            if said := printable(file.read().decode(errors="replace")):
                raise ToolError(f"it ended with status {status}: {said}")
        raise ToolError(f"it ended with status {status}")

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        """Ask, then make it end; its servers are in its process group. Reaped last: till then its number is its own."""
        if _ended(process) is None:
            with suppress(ToolError):
                self._call("quit", timeout=self._times.stop)
            _wait_for_end(process, self._times.stop)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            _wait_for_end(process, self._times.stop)
        with suppress(subprocess.TimeoutExpired):
            process.wait(self._times.stop)

    def _call(self, *commands: str, timeout: float | None = None) -> str:
        """What the tool prints for these commands. Raises ToolError.

        It prints what it is told over a socket in a directory that containers can write to, so no more is read.
        """
        what = commands[0].split()[0]
        process = subprocess.Popen(
            self._command(), env=self._environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        alarm = threading.Timer(timeout or self._times.call, process.kill)
        alarm.start()
        with process:
            try:
                said = _converse(process, "\n".join((*commands, "")))
            finally:
                alarm.cancel()
        if process.returncode == -signal.SIGKILL:
            raise ToolError(f"{what} had no answer")
        if process.returncode != 0:
            raise ToolError(printable(said) or f"{what} failed with status {process.returncode}")
        return said

    def _command(self, *arguments: str) -> Sequence[str]:
        place = (str(self._driver.root), str(self._directory / "tmp"), str(self._directory / "shm"))
        return [sys.executable, "-I", "-S", launch.__file__, *place, self._driver.find(), *arguments]

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": _PATH,
            "CUDA_VISIBLE_DEVICES": ",".join(self.wanted.uuids),
            "CUDA_MPS_PIPE_DIRECTORY": PIPE,
            "CUDA_MPS_LOG_DIRECTORY": LOG,
        }

    def _prepare(self) -> Path:
        """The directories, the same ones over restarts, as containers have them mounted; returns where output goes."""
        for name, options in (("tmp", _TMP_OPTIONS), ("shm", _SHM_OPTIONS)):
            path = self._directory / name
            _no_link(path)
            path.mkdir(parents=True, exist_ok=True)
            if not path.is_mount():
                launch.mount_tmpfs(str(path), options)
        pipes, logs = self._directory / PIPE[1:], self._directory / LOG[1:]
        for path, mode in ((pipes, 0o1777), (logs, 0o700)):
            path.mkdir(exist_ok=True)
            path.chmod(mode)
        with os.scandir(pipes) as found:
            for entry in found:
                if not entry.is_dir(follow_symlinks=False):
                    Path(entry.path).unlink(missing_ok=True)
        return logs / "output.log"

    def _say(self, phase: Phase, message: str = "", pid: int = 0, *, refused: bool = False) -> None:
        self._state = replace(self._state, phase=phase, message=message, pid=pid, since=time.time(), refused=refused)
        logger.log(
            logging.WARNING if phase is Phase.FAILED else logging.INFO,
            "%s: %s%s", self.wanted.name, phase, f": {message}" if message else "",
        )  # fmt: skip
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_atomic(self._file, encode(self._state), durable=False)
        except OSError as error:
            logger.error("%s: its state cannot be written: %s", self.wanted.name, error)


def _converse(process: "subprocess.Popen[bytes]", text: str) -> str:
    """Give a process its input, and take its output up to the limit; one that goes on is killed."""
    if process.stdin is None or process.stdout is None:
        raise ValueError("a process without pipes")
    with suppress(BrokenPipeError):
        process.stdin.write(text.encode())
        process.stdin.close()
    said = process.stdout.read(_ANSWER_LIMIT + 1)
    if len(said) > _ANSWER_LIMIT:
        process.kill()
    return said[:_ANSWER_LIMIT].decode(errors="replace")


def _ended(process: "subprocess.Popen[bytes]") -> int | None:
    """Status of a process that has ended, which is not reaped; None while it runs. Signals are negative."""
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _wait_for_end(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _ended(process) is None and time.monotonic() < deadline:
        time.sleep(0.01)


def settings(wanted: Wanted) -> list[str]:
    """Commands that set a daemon up. Pure.

    Devices by number, as the daemon counts those it sees: limits given by UUID were seen to be taken and not applied
    (NVIDIA/k8s-device-plugin, pull request 572). Whole MiB, rounded down.
    """
    found = []
    if wanted.thread_percentage is not None:
        found.append(f"set_default_active_thread_percentage {wanted.thread_percentage}")
    if wanted.memory_bytes is not None:
        mib = max(1, wanted.memory_bytes // _MIB)
        found += [f"set_default_device_pinned_mem_limit {n} {mib}M" for n in range(len(wanted.devices))]
    return found


def remove(directory: Path) -> None:
    """A daemon's directory with its mounts; what cannot be removed is tried again by the keeper's next look."""
    try:
        if _no_link(directory):
            return
        for name in ("tmp", "shm"):
            _no_link(directory / name)
            while (path := directory / name).is_mount():
                launch.unmount(str(path))
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except (OSError, RecursionError) as error:
        logger.error("%s cannot be removed: %s", directory, error)


def _no_link(path: Path) -> bool:
    """Remove a link in place of a directory of ours: what it leads to is not ours to mount or to unmount.

    Returns whether there was one. Raises OSError.
    """
    if not path.is_symlink():
        return False
    logger.error("%s was a link; it is removed", path)
    path.unlink(missing_ok=True)
    return True
