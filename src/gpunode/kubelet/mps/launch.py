"""Run a driver tool where its MPS clients will find it: `launch.py ROOT TMP SHM TOOL [ARGUMENT ...]`.

ROOT: the driver's root directory. TMP and SHM become its /tmp and /dev/shm, for this process alone, so that daemon and
clients use the same paths, /tmp/nvidia-mps and /dev/shm, and many daemons run side by side. TOOL: a path within ROOT.

Runs as a script of its own, with the standard library only, and becomes the tool: same process, same pid.
"""

import ctypes
import os
import signal
import sys

# linux/sched.h, linux/mount.h, linux/prctl.h
_CLONE_NEWNS = 0x20000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_SLAVE = 2, 4, 4096, 16384, 1 << 19
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def mount_tmpfs(path: str, options: str) -> None:
    """Raises OSError."""
    flags = _MS_NOSUID | _MS_NODEV
    _check(_LIBC.mount(b"tmpfs", os.fsencode(path), b"tmpfs", ctypes.c_ulong(flags), options.encode()), path)


def unmount(path: str) -> None:
    """Take a mount away, never the one that a link leads to; who uses it keeps it. Raises OSError."""
    _check(_LIBC.umount2(os.fsencode(path), _MNT_DETACH | _UMOUNT_NOFOLLOW), path)


def _bind(source: str, target: str) -> None:
    flags = ctypes.c_ulong(_MS_BIND)
    _check(_LIBC.mount(os.fsencode(source), os.fsencode(target), None, flags, None), target)


def _check(result: int, path: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


def _enter(root: str, tmp: str, shm: str) -> None:
    _check(_LIBC.unshare(_CLONE_NEWNS), "a mount namespace")
    # Mounts here stay here; what the host unmounts goes here too, so that nothing of a pod is kept by us.
    _check(_LIBC.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None), "/")
    _bind(tmp, os.path.join(root, "tmp"))  # noqa: PTH118
    _bind(shm, os.path.join(root, "dev/shm"))  # noqa: PTH118
    os.chroot(root)
    os.chdir("/")


def main(arguments: list[str]) -> None:
    """Does not return. What cannot be done is one line on stderr, and exit status 1."""
    root, tmp, shm, tool, *rest = arguments
    parent = os.getppid()
    # No daemon survives its keeper: nobody would stop it, and the next keeper starts its own.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    try:
        _enter(root, tmp, shm)
        os.execve(tool, [tool, *rest], dict(os.environ))  # noqa: S606
    except OSError as error:
        sys.exit(f"{error.filename or tool}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
