"""CDI files: one per claim, always what the checkpoint says.

Format: Container Device Interface specification 0.6 (github.com/cncf-tags/container-device-interface). The file of
a claim is a pure function of its checkpoint entry, so files are rewritten when they differ, made again when they are
missing and removed when no entry owns them. Nothing else about them is remembered.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from gpunode.files import write_atomic
from gpunode.kubelet.checkpoint import Entry, HeldDevice, State
from gpunode.kubelet.seams import Steps, no_step
from gpunode.model.errors import HardwareError
from gpunode.model.injection import DeviceNode, Mount

logger = logging.getLogger(__name__)

KIND: Final = "gpunode.dev/gpu"
CDI_VERSION: Final = "0.6.0"
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}(-[0-9a-f]{4}){2}-[0-9a-f]{12}")


def device_id(uid: str, held: HeldDevice) -> str:
    """The one CDI id of a prepared device; the kubelet shows it as resourceID in pod.status.

    Unique per claim, device and share: pod.status folds devices with equal ids into one row.
    Example: gpunode.dev/gpu=3f2a9c1e-77b0-gpu-0000-07-00-0
    """
    return f"{KIND}={_device_name(uid, held)}"


def _device_name(uid: str, held: HeldDevice) -> str:
    short = uid[:13] if _UUID.fullmatch(uid) else uid
    share = f"-{held.share_id[:13]}" if held.share_id else ""
    return f"{short}-{held.device}{share}"


class Hook(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A program that the container runtime runs, as the CDI specification has it."""

    hook_name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()


class CommonEdits(msgspec.Struct, frozen=True):
    """What every container with a device of ours gets once: the driver's libraries and what makes them usable."""

    env: tuple[tuple[str, str], ...] = ()
    nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    hooks: tuple[Hook, ...] = ()


NOTHING: Final = CommonEdits()


# What the toolkit sets, so that a runtime in legacy mode injects nothing a second time.
_HIDDEN: Final = "NVIDIA_VISIBLE_DEVICES=void"


class _WrittenEdits(msgspec.Struct, frozen=True, rename="camel"):
    env: list[Any] = []
    device_nodes: list[Any] = []


class _Written(msgspec.Struct, frozen=True, rename="camel"):
    """A file of ours, read again."""

    kind: str
    devices: list[Any]
    container_edits: _WrittenEdits


def spec(entry: Entry, common: CommonEdits = NOTHING) -> dict[str, Any]:
    """The CDI document of one claim. Claim-wide edits apply as soon as a container uses any of its devices."""
    control = {node.container_path: node for node in common.nodes}
    for held in entry.devices:
        control.update({node.container_path: node for node in held.nodes.control})
    visible = ",".join(dict.fromkeys(held.nodes.uuid for held in entry.devices if held.nodes.uuid))
    env = {"NVIDIA_VISIBLE_DEVICES": visible, "GPUNODE_CLAIM": entry.key} | dict(common.env)
    shared = _edits(control.values(), env, common.mounts)
    if common.hooks:
        shared["hooks"] = [msgspec.to_builtins(hook) for hook in common.hooks]
    return {
        "cdiVersion": CDI_VERSION,
        "kind": KIND,
        "devices": [
            {
                "name": _device_name(entry.uid, held),
                "containerEdits": _edits(held.nodes.nodes, held.nodes.env, held.nodes.mounts),
            }
            for held in entry.devices
        ],
        "containerEdits": shared,
    }


def _edits(nodes: Iterable[DeviceNode], env: Mapping[str, str], mounts: Iterable[Mount]) -> dict[str, Any]:
    edits: dict[str, Any] = {}
    if env:
        edits["env"] = [f"{name}={value}" for name, value in env.items()]
    device_nodes = [{"path": n.container_path, "hostPath": n.host_path, "permissions": "rw"} for n in nodes]
    if device_nodes:
        edits["deviceNodes"] = device_nodes
    binds = [{"hostPath": m.host_path, "containerPath": m.container_path, "options": list(m.options)} for m in mounts]
    if binds:
        edits["mounts"] = binds
    return edits


class CdiStore:
    """The files of one driver in a CDI directory. All methods block on the disk; callers hold the node lock.

    common: read at every write, so that a new driver's libraries reach the files at the next call. It raises
    HardwareError while they are not known: a container without them would start and only then fail. A file that was
    written when they were known goes on serving its claim meanwhile, and while the toolkit is away to be replaced.
    """

    def __init__(
        self,
        directory: Path,
        driver: str,
        step: Steps = no_step,
        common: Callable[[], CommonEdits] = lambda: NOTHING,
    ) -> None:
        self._common = common
        self._directory = directory
        self._step = step
        self._prefix = f"{KIND.replace('/', '-')}_{driver}_"

    def path(self, uid: str) -> Path:
        return self._directory / f"{self._prefix}{uid}.json"

    def known(self, uid: str) -> bool:
        """Whether there is a file for a claim, so that it was prepared. The UID is untrusted."""
        return uid.replace("-", "").isalnum() and self.path(uid).exists()

    def any(self) -> bool:
        """Whether there is a file of any claim."""
        return next(self._directory.glob(f"{self._prefix}*.json"), None) is not None

    def ensure(self, entry: Entry) -> bool:
        """Make the file of one completed entry right; True if it had to be written.

        Raises OSError, HardwareError.
        """
        path = self.path(entry.uid)
        there = b""
        with suppress(OSError):
            there = path.read_bytes()
        try:
            common = self._common()
        except HardwareError:
            if _serves(there, entry):
                return False
            raise
        wanted = msgspec.json.encode(spec(entry, common))
        if there == wanted or (common == NOTHING and _serves(there, entry)):
            return False
        self._directory.mkdir(parents=True, exist_ok=True)
        # Not durable: after a power cut the checkpoint says what belongs here, and /var/run is memory anyway.
        write_atomic(path, wanted, durable=False, step=self._step)
        return True

    def reconcile(self, entries: Mapping[str, Entry], *, keep_orphans: bool = False) -> tuple[int, int]:
        """Make the directory match the completed entries; returns (files written, orphans removed).

        Raises OSError, HardwareError: the first that happened, when everything else is done.

        keep_orphans: files without an entry stay, because they may belong to entries that were lost.
        """
        completed = [e for e in entries.values() if e.state is State.COMPLETED]
        wanted = {self.path(entry.uid).name for entry in completed}
        removed = 0
        if self._directory.is_dir() and not keep_orphans:
            for path in self._directory.iterdir():
                name = path.name
                ours = name.startswith(self._prefix) or (name.startswith("." + self._prefix) and name.endswith(".tmp"))
                if ours and name not in wanted:
                    self._step(f"unlink {name}")
                    path.unlink(missing_ok=True)
                    removed += 1
        written, failures = 0, []
        for entry in completed:
            try:
                written += self.ensure(entry)
            except (OSError, HardwareError) as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return written, removed


def _serves(file: bytes, entry: Entry) -> bool:
    """Whether a file that was written before gives the entry's devices, whichever libraries it gives besides."""
    try:
        there = msgspec.json.decode(file, type=_Written)
    except (ValueError, RecursionError):
        return False
    bare = spec(entry)
    shared = bare["containerEdits"]
    visible, claim = shared["env"]
    env, nodes = there.container_edits.env, there.container_edits.device_nodes
    return (
        (there.kind, there.devices) == (KIND, bare["devices"])
        and claim in env
        and (visible in env or _HIDDEN in env)
        and all(node in nodes for node in shared.get("deviceNodes", ()))
    )
