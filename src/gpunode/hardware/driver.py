"""Where the NVIDIA driver is installed, and how its library and tools are reached from a container.

The agent's image holds nothing of the driver. The host's file system is mounted into its container; the driver lies in
it at / (packages), at /run/nvidia/driver (the GPU operator's driver container) or at /home/kubernetes/bin/nvidia (GKE).
"""

import ctypes
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import pynvml

from gpunode.files import within
from gpunode.hardware.nvml import Nvml

logger = logging.getLogger(__name__)

LIBRARY: Final = "libnvidia-ml.so.1"
# Where drivers are installed on the host, most usual first.
DRIVER_DIRS: Final = ("/", "/run/nvidia/driver", "/home/kubernetes/bin/nvidia")
_LIBRARY_DIRS: Final = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64/nvidia",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
)
_TOOL_DIRS: Final = ("usr/bin", "usr/local/bin", "bin", "usr/sbin", "sbin", "usr/local/nvidia/toolkit")


@dataclass(frozen=True)
class DriverRoot:
    """host: the host's file system as this process sees it ("/" outside a container). driver: directory of the
    driver's installation on the host; "" tries the usual ones, each time anew, since a driver may come later."""

    host: Path = Path("/")
    driver: str = ""

    def installed(self) -> str:
        """The driver's directory on the host; "" where it is not known."""
        return next((place.directory for place in self._places() if place.library() is not None), "")

    def directory(self) -> Path:
        """The driver's directory as this process sees it; the host's root where the driver is not known."""
        return self.host / (self.driver or self.installed()).lstrip("/")

    def library(self) -> Path | None:
        """The driver's NVML as this process sees it; None where the loader has to find it, or nothing is there."""
        if self.host == Path("/") and not self.driver:
            return None
        return next((path for place in self._places() if (path := place.library()) is not None), None)

    def command(self, tool: str, *, host_paths: bool = False) -> list[str] | None:
        """How to begin the command line of a tool of the driver or the container toolkit; None where it is missing.

        It runs with the root that it is installed under, so that it finds its libraries. host_paths: it takes and
        prints paths of the host, so it runs in the host's root wherever it is installed.
        """
        if self.host == Path("/") and (found := shutil.which(tool)) is not None:
            return [found]
        on_host = _Place(self.host, "/")
        places = [on_host, *self._places()] if host_paths else [*self._places(), on_host]
        for place in places:
            for folder in _TOOL_DIRS:
                if place.file(f"{folder}/{tool}") is not None:
                    return place.enter(f"/{folder}/{tool}", host_paths=host_paths)
        return None

    def _places(self) -> Iterator["_Place"]:
        for directory in (self.driver,) if self.driver else DRIVER_DIRS:
            yield _Place(self.host, directory)


@dataclass(frozen=True)
class _Place:
    """A directory of the host that a driver may be installed under."""

    host: Path
    directory: str

    @property
    def root(self) -> Path:
        """As this process sees it."""
        return self.host / self.directory.lstrip("/")

    def library(self) -> Path | None:
        """NVML, if it is here."""
        return next((path for folder in _LIBRARY_DIRS if (path := self.file(f"{folder}/{LIBRARY}")) is not None), None)

    def file(self, path: str) -> Path | None:
        """A file below the directory as this process sees it, which may be where absolute links of the host lead.

        Debian's packages for one install the driver behind such links, /etc/alternatives.
        """
        try:
            found = within(self.root, path) if self._is_root() else within(self.host, f"{self.directory}/{path}")
            return found if found.is_file() else None
        except OSError:  # a mount that went away, links that go in circles
            return None

    def enter(self, tool: str, *, host_paths: bool) -> list[str]:
        """GKE's directory holds the driver and nothing else, so its tools run in the host's root."""
        if self.root == Path("/"):
            return [tool]
        if self._is_root() and not (host_paths and self.directory != "/"):
            return ["chroot", str(self.root), tool]
        directory = self.directory.rstrip("/")
        libraries = ":".join(f"{directory}/{folder}" for folder in _LIBRARY_DIRS if (self.root / folder).is_dir())
        begin = [] if self.host == Path("/") else ["chroot", str(self.host)]
        return [*begin, "/usr/bin/env", f"LD_LIBRARY_PATH={libraries}", f"{directory}{tool}"]

    def _is_root(self) -> bool:
        """Whether a process could have it as its root."""
        try:
            return self.directory == "/" or (self.root / "dev").is_dir()
        except OSError:
            return False


class _Loaded:
    """pynvml, with the library loaded from where the driver is.

    pynvml asks the loader for the bare name; one that is loaded already under that SONAME is what it gets.
    """

    def __init__(self, root: DriverRoot) -> None:
        self._root = root
        self._library: ctypes.CDLL | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:  # noqa: N802 - pynvml's name
        path = self._root.library() if self._library is None else None
        if path is not None:
            try:
                self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                logger.error("%s cannot be loaded: %s", path, error)
        pynvml.nvmlInit()


def load_nvml(root: DriverRoot = DriverRoot()) -> Nvml:
    """The real NVML. Its library is looked for when nvmlInit is called, so a driver may come later."""
    return cast(Nvml, _Loaded(root))
