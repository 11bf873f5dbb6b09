"""What agent and keeper tell each other, as files below `<kubelet>/plugins/<driver>/mps`.

| path | written by | content |
|---|---|---|
| `wanted/<device>.json` | agent | a daemon that is to run; named after the first of its devices |
| `daemons/<device>/state.json` | keeper | what has become of it |
| `daemons/<device>/tmp`, `daemons/<device>/shm` | keeper | tmpfs: the daemon's /tmp and /dev/shm |
| `keeper.json` | keeper | who it is, and what keeps it from working; locked as long as it lives |
| `keeper.lock` | keeper | held by the one that there can be |

Sets of devices never overlap, so the first device's name is the name of the whole set. Every file has one writer, and
is replaced as a whole.

A keeper may be older than its agent, as only a person restarts it. It skips fields that it does not know, and says what
it started a daemon for; the agent takes no daemon for ready that was started for anything else than it wants.
"""

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

MAX_BYTES: Final = 64 * 1024
MAX_FILES: Final = 1024
MESSAGE_LIMIT: Final = 400
# Where daemon and clients meet; the first is CUDA's own default.
PIPE: Final = "/tmp/nvidia-mps"  # noqa: S108
SHM: Final = "/dev/shm"  # noqa: S108
LOG: Final = "/tmp/nvidia-log"  # noqa: S108
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
T = TypeVar("T")

Uuid = Annotated[str, Meta(pattern=r"^(GPU|MIG)-[0-9A-Za-z/-]{1,120}$")]
DeviceName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]


class Wanted(msgspec.Struct, frozen=True, omit_defaults=True):
    """A daemon for these devices, name to UUID as CUDA calls them.

    exclusive: UUIDs of the whole GPUs among them, whose compute mode was changed. thread_percentage, memory_bytes: of
    every client. stop: it is to end; what was changed for it is about to be set back.
    """

    devices: Annotated[dict[DeviceName, Uuid], Meta(min_length=1, max_length=64)]
    exclusive: tuple[Uuid, ...] = ()
    thread_percentage: Annotated[int, Meta(ge=1, le=100)] | None = None
    memory_bytes: Annotated[int, Meta(gt=0, lt=1 << 60)] | None = None
    stop: bool = False

    @property
    def name(self) -> str:
        return min(self.devices)

    @property
    def uuids(self) -> tuple[str, ...]:
        """In the order of the device names, which is the order in which CUDA counts them."""
        return tuple(self.devices[name] for name in sorted(self.devices))


class Phase(StrEnum):
    """stopped: the keeper was told to end. failed: it is tried again after a while."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


class DaemonState(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of a wanted daemon. wanted: what it was started for. keeper: token of who says so.

    since: when this phase began, seconds since the epoch. restarts: how often it was started again. refused: it
    answers, but does not take the settings, which is no fault of a device.
    """

    phase: Phase
    wanted: Wanted | None
    keeper: str
    message: str = ""
    pid: int = 0
    since: float = 0.0
    restarts: int = 0
    refused: bool = False


class KeeperState(msgspec.Struct, frozen=True):
    """token: new at every start. problem: why it cannot keep daemons, "" when it can."""

    token: str
    pid: int
    problem: str = ""


@dataclass(frozen=True)
class MpsFiles:
    """Paths below the driver's MPS directory."""

    root: Path

    @property
    def wanted_dir(self) -> Path:
        return self.root / "wanted"

    @property
    def daemons_dir(self) -> Path:
        return self.root / "daemons"

    @property
    def lock(self) -> Path:
        return self.root / "keeper.lock"

    @property
    def keeper(self) -> Path:
        return self.root / "keeper.json"

    def wanted(self, name: str) -> Path:
        return self.wanted_dir / f"{name}.json"

    def daemon(self, name: str) -> Path:
        return self.daemons_dir / name

    def state(self, name: str) -> Path:
        return self.daemon(name) / "state.json"

    def names_wanted(self) -> list[str]:
        """Names that have a file, readable or not. Raises OSError."""
        return sorted(name.removesuffix(".json") for name in _names(self.wanted_dir) if name.endswith(".json"))

    def names_kept(self) -> list[str]:
        """Names that the keeper has a directory of. Raises OSError."""
        return sorted(_names(self.daemons_dir))

    def announce(self, state: KeeperState) -> int:
        """Say who keeps daemons here, for as long as the descriptor that this returns is open. Raises OSError."""
        temporary = self.root / ".keeper.json.tmp"
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            # On the file itself, before it has its name: what it says and that its writer lives cannot disagree.
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.write(fd, encode(state))
            temporary.replace(self.keeper)
        except OSError:
            os.close(fd)
            raise
        return fd

    def living_keeper(self) -> KeeperState | None:
        """Who keeps daemons here; None when its process has ended. Raises ValueError, OSError."""
        for _ in range(3):  # one that says something new puts another file there
            try:
                file = self.keeper.open("rb")
            except FileNotFoundError:
                return None
            with file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return msgspec.json.decode(file.read(MAX_BYTES), type=KeeperState)
        return None


def _names(directory: Path) -> Iterator[str]:
    try:
        with os.scandir(directory) as found:
            names = [entry.name for _, entry in zip(range(MAX_FILES), found, strict=False)]
    except FileNotFoundError:
        return
    for name in names:
        if _NAME.fullmatch(name.removesuffix(".json")):
            yield name


def encode(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def read(path: Path, type_: type[T]) -> T | None:
    """Content of a file; None when it is not there. Raises ValueError when it is none of ours, OSError.

    A link or a directory is none of ours: one in the way of one file must not hide the others.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise ValueError("it is no file") from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError("it is no file")
    with os.fdopen(fd, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES} bytes")
    try:
        return msgspec.json.decode(data, type=type_)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def printable(text: str) -> str:
    """A tool's words as one line of bounded length, the end of them where they are long."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words[-MESSAGE_LIMIT:]
