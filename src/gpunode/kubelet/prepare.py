"""Preparing and releasing claims.

The checkpoint is the only memory; CDI files follow from it. Per call: read the claims live, take the node lock, load
the checkpoint (another instance may have written it), decide each claim on its own, then write once. A claim whose
preparation changes hardware is written as `started` before the change and `completed` after it; a claim that only
hands out device nodes has no state in between and is written once. CDI files are written last: after a kill the
kubelet asks again, and both that and the next start rebuild them.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from gpunode.kubelet.cdi import CdiStore, device_id
from gpunode.kubelet.checkpoint import CheckpointFile, Entries, Entry, State
from gpunode.kubelet.errors import ClaimError, ErrorKind
from gpunode.kubelet.files import NodeLock
from gpunode.kubelet.resolve import ClaimRef, Node, check_live, conflict, resolve, same_devices
from gpunode.model.injection import DeviceNodes
from gpunode.model.resource import ResourceClaim

logger = logging.getLogger(__name__)


class ClaimReader(Protocol):
    """Where live claims come from."""

    async def get(self, namespace: str, name: str) -> ResourceClaim:
        """The claim as the API server has it now. Raises LookupError when it is gone, other errors when unknown."""
        ...


@dataclass(frozen=True)
class PreparedDevice:
    """One line of the answer to the kubelet. No requests would mean all of them, so there is at least one."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None


Prepared = tuple[PreparedDevice, ...]
Problem = Callable[[str], None]


def _log_problem(message: str) -> None:
    logger.error("%s", message)


class PrepareEngine:
    """Prepares and releases claims of one driver on one node. `problem` is told what a person should know."""

    def __init__(
        self,
        node: Node,
        claims: ClaimReader,
        devices: Callable[[], Mapping[str, DeviceNodes]],
        checkpoint: CheckpointFile,
        cdi: CdiStore,
        lock: NodeLock,
        problem: Problem = _log_problem,
    ) -> None:
        self._node = node
        self._claims = claims
        self._devices = devices
        self._checkpoint = checkpoint
        self._cdi = cdi
        self._lock = lock
        self._problem = problem

    async def recover(self) -> None:
        """Bring the node in line with the checkpoint: to be called before the first prepare. Raises OSError."""
        async with self._lock.held():
            await asyncio.to_thread(self._recover)

    async def prepare(self, refs: Sequence[ClaimRef]) -> dict[str, Prepared | ClaimError]:
        """Prepare each claim independently; the answer has an item for every UID asked about. Never raises ClaimError.

        Idempotent: a claim prepared before gets the same answer, and its CDI file again if it was lost.
        """
        live = await asyncio.gather(*(self._read(ref) for ref in refs))
        try:
            async with self._lock.held():
                return await asyncio.to_thread(self._prepare, list(zip(refs, live, strict=True)))
        except (OSError, TimeoutError) as error:
            return {ref.uid: _storage(error) for ref in refs}

    async def unprepare(self, refs: Sequence[ClaimRef]) -> dict[str, ClaimError | None]:
        """Release each claim independently; a claim nobody knows is released already."""
        try:
            async with self._lock.held():
                return await asyncio.to_thread(self._unprepare, refs)
        except (OSError, TimeoutError) as error:
            return {ref.uid: _storage(error) for ref in refs}

    async def entries(self) -> Entries:
        """What the node holds now, by claim UID. Raises OSError, TimeoutError."""
        async with self._lock.held():
            return await asyncio.to_thread(self._load)

    async def _read(self, ref: ClaimRef) -> ResourceClaim | ClaimError:
        try:
            ref.checked()
            claim = await self._claims.get(ref.namespace, ref.name)
            check_live(ref, claim)
            return claim
        except ClaimError as error:
            return error
        except LookupError:
            return ClaimError(ErrorKind.NOT_FOUND, f"claim {ref.key} does not exist")
        except Exception as error:  # the reader's transport may raise anything; the kubelet tries again
            return ClaimError(ErrorKind.API, f"cannot read claim {ref.key}: {type(error).__name__}: {error}"[:1024])

    def _load(self) -> Entries:
        loaded = self._checkpoint.load()
        for message in loaded.problems:
            self._problem(message)
        return loaded.entries

    def _recover(self) -> None:
        entries = self._load()
        kept = {uid: e for uid, e in entries.items() if e.boot_id == self._node.boot_id}
        if len(kept) != len(entries):
            logger.info("forgetting %d claims of an earlier boot", len(entries) - len(kept))
            self._checkpoint.save(kept)
        self._cdi.reconcile(kept)

    def _prepare(
        self, asked: Iterable[tuple[ClaimRef, ResourceClaim | ClaimError]]
    ) -> dict[str, Prepared | ClaimError]:
        before = self._load()
        entries = {uid: e for uid, e in before.items() if e.boot_id == self._node.boot_id}
        devices = self._devices()
        answer: dict[str, Prepared | ClaimError] = {}
        for ref, live in asked:
            try:
                if isinstance(live, ClaimError):
                    raise live
                entry = self._decide(ref, live, entries, devices)
            except ClaimError as error:
                answer[ref.uid] = error
                continue
            except Exception as error:  # one claim's surprise must not fail the others of the call
                logger.exception("preparing claim %s failed", ref.key)
                answer[ref.uid] = ClaimError(ErrorKind.INTERNAL, f"claim {ref.key}: {error!r}"[:1024])
                continue
            entries[entry.uid] = entry
            answer[ref.uid] = prepared(entry)
        if entries != before:
            self._checkpoint.save(entries)
        self._cdi.reconcile(entries)
        return answer

    def _decide(
        self, ref: ClaimRef, live: ResourceClaim, entries: Entries, devices: Mapping[str, DeviceNodes]
    ) -> Entry:
        known = entries.get(ref.uid)
        try:
            entry = resolve(ref, live, self._node, devices)
        except ClaimError as error:
            # A device that fell off the bus after it was given out: the pod already has it, say the same again.
            if known is None or known.state is not State.COMPLETED or error.kind is not ErrorKind.UNKNOWN_DEVICE:
                raise
            return known
        if known is not None and not same_devices(known, entry):
            raise ClaimError(
                ErrorKind.HELD, f"claim {ref.key} was allocated anew before its old devices were released here"
            )
        if refusal := conflict(entry, entries.values()):
            raise refusal
        return msgspec.structs.replace(entry, state=State.COMPLETED)

    def _unprepare(self, refs: Sequence[ClaimRef]) -> dict[str, ClaimError | None]:
        entries = self._load()
        kept = {uid: e for uid, e in entries.items() if uid not in {ref.uid for ref in refs}}
        self._cdi.reconcile({uid: e for uid, e in kept.items() if e.boot_id == self._node.boot_id})
        if kept != entries:
            self._checkpoint.save(kept)
        return {ref.uid: None for ref in refs}


def prepared(entry: Entry) -> Prepared:
    """The kubelet's answer for a completed entry."""
    return tuple(
        PreparedDevice(d.requests, d.pool, d.device, (device_id(entry.uid, d),), d.share_id) for d in entry.devices
    )


def _storage(error: OSError | TimeoutError) -> ClaimError:
    kind = ErrorKind.BUSY if isinstance(error, TimeoutError) and error.errno is None else ErrorKind.STORAGE
    return ClaimError(kind, f"cannot use the plugin's own files: {error}"[:1024])
