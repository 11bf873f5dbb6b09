"""What this node has prepared, in one file that survives kill -9.

The file is two lines: a header `{"version":1,"checksum":"<sha256 of the second line>"}` and the body. It is only
ever replaced as a whole (write beside it, fsync, rename, fsync the directory), so a reader sees the state before
or after a change and nothing between. Entries are decoded one by one: one that cannot be read costs its own claim
and no other. Unknown fields are skipped, so that a newer file can be read by an older program.
"""

import hashlib
import logging
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from gpunode.files import write_atomic
from gpunode.kubelet.config import Sharing
from gpunode.kubelet.seams import Steps, no_step
from gpunode.model.injection import DeviceNodes

logger = logging.getLogger(__name__)

VERSION: Final = 1
MAX_BYTES: Final = 16 * 2**20
QUARANTINED: Final = 8


class State(StrEnum):
    """started: hardware may have been changed for the claim. completed: everything is in place."""

    STARTED = "started"
    COMPLETED = "completed"


class HeldDevice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One allocated device of a claim. `requests` are base request names (without a chosen alternative)."""

    device: str
    pool: str
    requests: tuple[str, ...]
    nodes: DeviceNodes
    admin: bool = False
    share_id: str | None = None
    consumed: dict[str, str] = {}
    sharing: Sharing | None = None


class Entry(msgspec.Struct, frozen=True):
    """One claim on this node."""

    uid: str
    namespace: str
    name: str
    boot_id: str
    state: State
    devices: tuple[HeldDevice, ...]

    @property
    def key(self) -> str:
        """`namespace/name`"""
        return f"{self.namespace}/{self.name}"


Entries = dict[str, Entry]


class _Header(msgspec.Struct):
    version: int
    checksum: str


class _Body(msgspec.Struct):
    claims: dict[str, msgspec.Raw]
    lost: bool = False


class _BodyOut(msgspec.Struct, omit_defaults=True):
    claims: Entries
    lost: bool = False


@dataclass(frozen=True)
class Loaded:
    """Entries by claim UID, and what was wrong with the file, one sentence each (empty when all is well).

    lost: now or earlier entries were dropped that live claims may bring back; kept in the file until they did.
    missing: there is no file.
    """

    entries: Entries = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    lost: bool = False
    missing: bool = False


class CheckpointFile:
    """The file at `path`. All methods block on the disk; callers hold the node lock."""

    def __init__(self, path: Path, step: Steps = no_step) -> None:
        self._path = path
        self._step = step

    def peek(self) -> Loaded:
        """What the file says, changing nothing; for whoever only looks. Raises OSError."""
        raw = self._bytes()
        return Loaded(missing=True) if raw is None else decode(raw, str(self._path))

    def load(self) -> Loaded:
        """Read the file; damage is kept aside as `<name>.damaged-<n>`, repaired and reported, never raised.

        Raises OSError only where the disk itself refuses.
        """
        raw = self._bytes()
        if raw is None:
            return Loaded(missing=True)
        loaded = decode(raw, str(self._path))
        if not loaded.problems:
            return loaded
        aside = self._keep_copy(raw)
        self.save(loaded.entries, lost=True)
        return replace(loaded, problems=tuple(f"{problem}; kept as {aside.name}" for problem in loaded.problems))

    def _bytes(self) -> bytes | None:
        try:
            with self._path.open("rb") as file:
                return file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return None

    def save(self, entries: Entries, *, lost: bool = False) -> None:
        """Replace the file durably. Raises OSError."""
        body = msgspec.json.encode(_BodyOut(entries, lost))
        header = msgspec.json.encode(_Header(VERSION, hashlib.sha256(body).hexdigest()))
        write_atomic(self._path, header + b"\n" + body, durable=True, step=self._step)

    def _keep_copy(self, raw: bytes) -> Path:
        """For a person to look at, under the first free name; the oldest is overwritten once there are eight."""
        names = [self._path.with_name(f"{self._path.name}.damaged-{n}") for n in range(QUARANTINED)]
        free = next((n for n in names if not n.exists()), None)
        target = free if free is not None else min(names, key=lambda n: n.stat().st_mtime_ns)
        write_atomic(target, raw, durable=False)
        return target


def decode(raw: bytes, where: str) -> Loaded:
    """Entries of a checkpoint file's bytes, as far as they can be read. `where` names the file in problems. Pure."""
    try:
        body = _verified(raw)
    except ValueError as error:
        return Loaded({}, (f"checkpoint {where} is damaged: {error}",), lost=True)
    entries: Entries = {}
    problems = []
    for uid, item in body.claims.items():
        try:
            entry = msgspec.json.decode(item, type=Entry)
            if entry.uid != uid:
                raise ValueError(f"entry says it is claim {entry.uid[:64]!r}")
            entries[uid] = entry
        except (ValueError, RecursionError) as error:
            problems.append(f"checkpoint {where}: entry of claim {uid[:64]!r} is unreadable: {error}")
    return Loaded(entries, tuple(problems), lost=body.lost or bool(problems))


def _verified(raw: bytes) -> _Body:
    """Raises ValueError naming what is wrong."""
    if len(raw) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES} bytes")
    head, newline, body = raw.partition(b"\n")
    if not newline:
        raise ValueError("no header line, probably cut short")
    try:
        header = msgspec.json.decode(head, type=_Header)
    except msgspec.DecodeError as error:
        raise ValueError(f"header: {error}") from error
    if header.version != VERSION:
        raise ValueError(f"version {header.version}, this program reads {VERSION}")
    if hashlib.sha256(body).hexdigest() != header.checksum:
        raise ValueError("checksum does not match")
    try:
        return msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"body: {error}") from error
