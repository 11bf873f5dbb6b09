"""Processes that outlive the command that started them, known by record files; only those are ever signalled.

A record holds the process id together with the start time in clock ticks since boot (/proc/PID/stat, field 22) and the
boot id, so an id that the kernel has given to someone else is never mistaken for ours. Signals go through a pidfd that
is opened before the record is compared, which closes the gap between looking and killing.
Every process also carries MARKER in its environment and hands it on to its children, which finds the processes whose
record was lost and the children that a killed parent left behind (containerd's shims).
"""

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpunode.cluster.errors import ClusterError

MARKER: Final = "GPUNODE_CLUSTER_STATE"
# The record's name, by which `adopt` makes a lost record anew.
NAME_MARKER: Final = "GPUNODE_CLUSTER_PROCESS"
# Python ignores these; a child must not inherit that.
_DEFAULTS: Final = (signal.SIGPIPE, signal.SIGXFSZ)


@dataclass(frozen=True, slots=True)
class Record:
    """One started process: who it is (pid, start ticks, boot id) and what it was."""

    name: str
    pid: int
    ticks: int
    boot: str
    argv: tuple[str, ...]
    log: str


@dataclass(frozen=True, slots=True)
class Processes:
    """The supervised processes of one cluster, kept under its state directory."""

    state: Path

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Record:
        """Starts `argv` in a session of its own, or returns the record of the running process of that name.

        name  unique in the cluster; becomes a file name
        argv  argv[0] is looked up in PATH of `env`
        log   receives stdout and stderr, appended; by default STATE/logs/NAME.log
        env   added to the environment of this process

        Raises ClusterError if the program cannot be executed.
        """
        running = self.get(name)
        if running is not None:
            return running
        target = log or self.log(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        full_env = {**os.environ, **(env or {}), MARKER: str(self.state), NAME_MARKER: name}
        files = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(target), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        program = _which(argv[0], full_env.get("PATH", os.defpath))
        try:
            pid = os.posix_spawn(program, list(argv), full_env, file_actions=files, setsid=True, setsigdef=_DEFAULTS)
        except OSError as error:
            raise ClusterError(f"{name}: cannot run {program}: {error.strerror}") from error
        record = Record(name, pid, start_ticks(pid) or 0, boot_id(), tuple(argv), str(target))
        self._write(record)
        return record

    def log(self, name: str) -> Path:
        return self.state / "logs" / f"{name}.log"

    def names(self) -> tuple[str, ...]:
        """Names of all records, running or not."""
        return tuple(sorted(file.stem for file in self._directory.glob("*.json")))

    def record(self, name: str) -> Record | None:
        """The record of that name, whether or not its process is alive. An unreadable one counts as none."""
        try:
            data = json.loads((self._directory / f"{name}.json").read_text())
            return Record(name, int(data["pid"]), int(data["ticks"]), data["boot"], tuple(data["argv"]), data["log"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def get(self, name: str) -> Record | None:
        """The record of that name if its process is running, else None."""
        record = self.record(name)
        return record if record is not None and is_running(record) else None

    def alive(self, name: str) -> bool:
        return self.get(name) is not None

    def kill(self, name: str) -> bool:
        """kill -9 of that one process; waits until it is gone. False if it was not running."""
        return bool(self.stop_all((name,), grace=0))

    def stop(self, name: str, grace: float = 10.0) -> bool:
        """SIGTERM, and SIGKILL after `grace` seconds; waits until it is gone. False if it was not running."""
        return bool(self.stop_all((name,), grace))

    def stop_all(self, names: Iterable[str], grace: float = 10.0) -> tuple[str, ...]:
        """Stops several processes at the same time (grace 0: SIGKILL at once); returns those that were running."""
        records = [record for name in names if (record := self.record(name)) is not None]
        stopped = stop_pids({record.pid: record.ticks for record in records if record.boot == boot_id()}, grace)
        for record in records:
            (self._directory / f"{record.name}.json").unlink(missing_ok=True)
        return tuple(record.name for record in records if record.pid in stopped)

    def marked(self) -> dict[int, int]:
        """Pid -> start ticks of every process that carries this cluster's mark, recorded or not; never ourselves."""
        return {pid: ticks for pid, ticks in marked().get(str(self.state), {}).items() if pid != os.getpid()}

    def adopt(self) -> tuple[str, ...]:
        """Makes records anew for running processes that have lost theirs; returns their names.

        Children carry the same marks, but only what `start` started leads a session.
        """
        adopted: list[str] = []
        for pid, ticks in self.marked().items():
            environ = environment(pid)
            name = environ.get(NAME_MARKER)
            with contextlib.suppress(OSError):
                if name and os.getsid(pid) == pid and not self.alive(name):
                    argv = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0")
                    self._write(Record(name, pid, ticks, boot_id(), tuple(argv), str(self.log(name))))
                    adopted.append(name)
        return tuple(adopted)

    def tail(self, name: str, lines: int = 3) -> str:
        """The last lines of a process's log on one line, for error messages."""
        record = self.record(name)
        try:
            text = Path(record.log if record else self.log(name)).read_text(errors="replace")
        except OSError:
            return ""
        return " | ".join(line.strip() for line in text.splitlines()[-lines:])

    @property
    def _directory(self) -> Path:
        return self.state / "run"

    def _write(self, record: Record) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(
            {"pid": record.pid, "ticks": record.ticks, "boot": record.boot, "argv": record.argv, "log": record.log}
        )
        replace_text(self._directory / f"{record.name}.json", text)


def replace_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Writes a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
    temporary.replace(path)


def boot_id() -> str:
    """Identity of this boot of the kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot (proc(5), stat field 22); None if gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name may hold spaces and brackets, so count from the last closing one.
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def is_running(record: Record) -> bool:
    _reap(record.pid)
    return record.boot == boot_id() and start_ticks(record.pid) == record.ticks


def stop_pids(targets: Mapping[int, int], grace: float) -> set[int]:
    """SIGTERM to every pid whose start ticks match, SIGKILL to those still there after `grace` seconds.

    grace 0 means SIGKILL at once. Returns the pids that were running. Waits up to 10 s for the killed ones.
    """
    open_fds: dict[int, int] = {}
    try:
        for pid, ticks in targets.items():
            with contextlib.suppress(OSError):
                open_fds[pid] = os.pidfd_open(pid)
                if start_ticks(pid) != ticks:
                    os.close(open_fds.pop(pid))
        stopped = set(open_fds)
        for sig, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
            if patience > 0:
                _signal_and_wait(open_fds, sig, patience)
        return stopped
    finally:
        for fd in open_fds.values():
            os.close(fd)


def environment(pid: int) -> dict[str, str]:
    """Environment that a process was started with; empty if it is gone or someone else's."""
    try:
        items = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (item.decode(errors="replace").partition("=") for item in items if item)
    return {name: value for name, _, value in pairs}


def marked() -> dict[str, dict[int, int]]:
    """State directory -> {pid: start ticks} of all processes that carry a mark. Needs root to see other users'."""
    found: dict[str, dict[int, int]] = {}
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        state = environment(pid).get(MARKER)
        ticks = start_ticks(pid) if state else None
        if state and ticks is not None:
            found.setdefault(state, {})[pid] = ticks
    return found


def _signal_and_wait(open_fds: dict[int, int], sig: signal.Signals, patience: float) -> None:
    """Signals every pidfd and removes those whose process ended within `patience` seconds."""
    for fd in open_fds.values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, sig)
    deadline = time.monotonic() + patience
    while open_fds and (left := deadline - time.monotonic()) > 0:
        poll = select.poll()
        for fd in open_fds.values():
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(left * 1000)}
        for pid, fd in list(open_fds.items()):
            if fd in ready:
                _reap(pid)
                os.close(open_fds.pop(pid))


def _reap(pid: int) -> None:
    """Collects the exit status if the process is our child, so that it does not stay a zombie."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _which(program: str, path: str) -> str:
    if "/" in program:
        return program
    for directory in path.split(os.pathsep):
        candidate = Path(directory) / program
        if os.access(candidate, os.X_OK):
            return str(candidate)
    raise ClusterError(f"{program} is not installed: run `gpunode cluster build`, which installs what is missing")
