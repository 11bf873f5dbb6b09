"""The process that keeps control daemons running: what is wanted runs, and nothing else does.

It has no access to the API server and no state of its own. It compares the files of what is wanted with the daemons it
runs, several times a second; the daemons end with it, and are started again with it.
"""

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpunode.files import write_atomic
from gpunode.kubelet.mps.daemon import Daemon, Driver, Times, ToolError, remove
from gpunode.kubelet.mps.files import DaemonState, KeeperState, MpsFiles, Phase, Wanted, encode, read

logger = logging.getLogger(__name__)


class KeeperError(Exception):
    """The keeper cannot start; the message says what to do."""


@dataclass
class Keeper:
    """One a node and driver. `run` blocks until `stop` is set."""

    files: MpsFiles
    driver: Driver = field(default_factory=Driver)
    times: Times = field(default_factory=Times)
    look_s: float = 0.1
    stop: threading.Event = field(default_factory=threading.Event)
    _daemons: dict[str, Daemon] = field(default_factory=dict)
    _damaged: dict[str, str] = field(default_factory=dict)
    _told: KeeperState | None = None
    _announced: int = -1
    _token: str = ""

    def run(self) -> None:
        """Keep daemons until stopped; then none is left. Raises KeeperError, OSError."""
        self.files.wanted_dir.mkdir(parents=True, exist_ok=True)
        self.files.daemons_dir.mkdir(exist_ok=True)
        self._token = os.urandom(8).hex()
        with self._locked():
            logger.info("keeping MPS daemons below %s", self.files.root)
            try:
                while not self.stop.is_set():
                    try:
                        self.look()
                    except (OSError, RuntimeError) as error:  # also a thread that cannot be started
                        logger.error("cannot compare what is wanted with what runs, will retry: %s", error)
                    self.stop.wait(self.look_s)
            finally:
                for daemon in self._daemons.values():
                    daemon.stop(remove=False)
                for daemon in self._daemons.values():
                    daemon.join()
                if self._announced >= 0:
                    os.close(self._announced)
                logger.info("all daemons are stopped")

    def look(self) -> None:
        """Compare once. Raises OSError."""
        self._tell()
        wanted = self._wanted()
        for name, daemon in list(self._daemons.items()):
            if not daemon.alive:
                del self._daemons[name]
            elif name not in self._damaged and daemon.wanted != wanted.get(name):
                daemon.stop(remove=True)
        for name, one in wanted.items():
            if name not in self._daemons and not one.stop:
                daemon = Daemon(self.files, one, self.driver, self._token, self.times)
                daemon.start()
                self._daemons[name] = daemon
        for name in self.files.names_kept():
            if name not in self._daemons and name not in self._damaged:
                remove(self.files.daemon(name))

    def _wanted(self) -> dict[str, Wanted]:
        """Readable files by name. One that is damaged starts nothing, and ends nothing that runs."""
        found: dict[str, Wanted] = {}
        damaged: dict[str, str] = {}
        for name in self.files.names_wanted():
            try:
                one = read(self.files.wanted(name), Wanted)
                if one is not None and one.name != name:
                    raise ValueError(f"it is of {one.name}")
            except (ValueError, OSError) as error:
                damaged[name] = f"{self.files.wanted(name).name} cannot be read: {error}"[:300]
            else:
                if one is not None:
                    found[name] = one
        for name, message in damaged.items():
            if self._damaged.get(name) != message:
                logger.error("%s", message)
                if name not in self._daemons:
                    self._say_damaged(name, message)
        self._damaged = damaged
        return found

    def _say_damaged(self, name: str, message: str) -> None:
        state = DaemonState(phase=Phase.FAILED, wanted=None, keeper=self._token, message=message, since=time.time())
        self.files.daemon(name).mkdir(exist_ok=True)
        write_atomic(self.files.state(name), encode(state), durable=False)

    def _tell(self) -> None:
        problem = ""
        try:
            self.driver.find()
        except (ToolError, OSError) as error:
            problem = str(error)
        state = KeeperState(self._token, os.getpid(), problem)
        if state != self._told:
            if problem:
                logger.error("%s", problem)
            before, self._announced = self._announced, self.files.announce(state)
            if before >= 0:
                os.close(before)
            self._told = state

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self.files.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise KeeperError(
                    f"another keeper holds {self.files.lock}: one a node is enough, stop one of them"
                ) from None
            yield
        finally:
            os.close(fd)
