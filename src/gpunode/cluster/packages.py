"""Programs that come from the distribution: found, or installed with apt-get where that is possible."""

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpunode.cluster.errors import ClusterError

_SEARCH: Final = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_CNI_DIRECTORIES: Final = ("/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni")
# Program -> Debian package.
_PROGRAMS: Final = {
    "runc": "runc",
    "busybox": "busybox-static",
    "iptables": "iptables",
    "iptables-restore": "iptables",
    "ip": "iproute2",
    "openssl": "openssl",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
}
_CNI_PACKAGE: Final = "containernetworking-plugins"


@dataclass(frozen=True, slots=True)
class HostTools:
    """Where the distribution's parts are: runc, a static busybox, and the directory of the CNI plugins."""

    runc: str
    busybox: Path
    cni_plugins: str


def find() -> HostTools:
    """Raises ClusterError naming the packages that are missing."""
    packages = missing()
    if packages:
        raise ClusterError(f"not installed: {', '.join(packages)}; run `gpunode cluster build` as root to install them")
    return HostTools(_program("runc") or "", Path(_program("busybox") or ""), _cni_plugins() or "")


def missing() -> tuple[str, ...]:
    """Debian packages that are needed and not there."""
    absent = {package for program, package in _PROGRAMS.items() if _program(program) is None}
    if _cni_plugins() is None:
        absent.add(_CNI_PACKAGE)
    busybox = _program("busybox")
    if busybox is not None and _is_dynamic(Path(busybox)):
        absent.add("busybox-static")
    return tuple(sorted(absent))


def install(report: Callable[[str], None]) -> None:
    """Installs what is missing.

    Raises ClusterError if apt-get is absent or fails, or if this user may not install.
    """
    packages = missing()
    if not packages:
        return
    names = " ".join(packages)
    if shutil.which("apt-get") is None:
        raise ClusterError(f"this machine has no apt-get: install the equivalents of {names} and try again")
    if os.geteuid() != 0:
        raise ClusterError(f"installing {names} takes root: run `apt-get install {names}` as root, or this as root")
    report(f"Installing {names}")
    _apt("update")
    _apt("install", "--yes", "--no-install-recommends", *packages)
    if still := missing():
        raise ClusterError(f"apt-get installed the packages, but {', '.join(still)} is still not found")


def _apt(*args: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    argv = ["apt-get", "--quiet", *args]
    result = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    if result.returncode != 0:
        last = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:]
        raise ClusterError(f"`apt-get {args[0]}` failed, is there a network? {' '.join(last)}")


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *_SEARCH)))


def _cni_plugins() -> str | None:
    needed = ("bridge", "host-local")
    for directory in _CNI_DIRECTORIES:
        if all(os.access(Path(directory, plugin), os.X_OK) for plugin in needed):
            return directory
    return None


def _is_dynamic(program: Path) -> bool:
    """Whether an ELF file asks for a dynamic loader, which no one-file image has."""
    return b"/ld-linux" in program.read_bytes() or b"/ld-musl" in program.read_bytes()
