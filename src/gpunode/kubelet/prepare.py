"""Preparing and releasing claims: the asynchronous shell around the node's book (`gpunode.kubelet.ledger`)."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from gpunode.kubelet.cdi import CdiStore, device_id
from gpunode.kubelet.checkpoint import CheckpointFile, Entries, Entry
from gpunode.kubelet.effects import Effects
from gpunode.kubelet.errors import ClaimError, ErrorKind
from gpunode.kubelet.guard import BlackHoleGuard
from gpunode.kubelet.ledger import Asked, Ledger, LostEntriesError, Repairs
from gpunode.kubelet.lock import NodeLock
from gpunode.kubelet.metrics import KubeletMetrics
from gpunode.kubelet.resolve import ClaimRef, Node, check_live
from gpunode.kubelet.seams import Allocated, ClaimReader, Notice, Notify, Partitioner, SharingControl, Steps, no_step
from gpunode.model.injection import DeviceNodes
from gpunode.model.resource import ResourceClaim

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_CLAIMS_PER_CALL: Final = 1024
_READS_AT_ONCE: Final = 16
_MAX_NOTICES: Final = 256
_REMEMBER_ASKED_S: Final = 300.0
_READ_TIMEOUT_S: Final = 20.0  # the kubelet gives up on a call after 45 s


@dataclass(frozen=True)
class PreparedDevice:
    """One line of the answer to the kubelet. No requests would mean all of them, so there is at least one."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None


Prepared = tuple[PreparedDevice, ...]


def log_notice(notice: Notice) -> None:
    """The default of `notify`."""
    logger.error("%s: %s", notice.reason, notice.message)


class PrepareEngine:
    """Prepares and releases claims of one driver on one node.

    allocated: read to rebuild a damaged checkpoint; until that worked nothing is prepared. Without it damage is
    reported and the node goes on. notify: told what a person should know. changed: told the entries after every call.
    Both are called on the event loop.

    One call at a time touches the book, in a thread of its own, so a call that the kubelet abandons still ends in
    order and keeps the lock until it has.
    """

    def __init__(
        self,
        node: Node,
        claims: ClaimReader,
        devices: Callable[[], Mapping[str, DeviceNodes]],
        checkpoint: CheckpointFile,
        cdi: CdiStore,
        lock: NodeLock,
        *,
        allocated: Allocated | None = None,
        partitioner: Partitioner | None = None,
        sharing: SharingControl | None = None,
        notify: Notify = log_notice,
        changed: Callable[[Entries], None] | None = None,
        metrics: KubeletMetrics | None = None,
        guard: BlackHoleGuard | None = None,
        clock: Callable[[], float] = time.monotonic,
        step: Steps = no_step,
    ) -> None:
        effects = Effects(partitioner, sharing, step)
        self._notices: deque[Notice] = deque(maxlen=_MAX_NOTICES)
        self._notify = notify
        self.ledger = Ledger(node, devices, checkpoint, cdi, lock, effects, self._notices.append)
        self._claims = claims
        self._allocated = allocated
        self._changed = changed
        self._metrics = metrics
        self._guard = guard
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kubelet-ledger")
        self._clock = clock
        self._asked: dict[str, float] = {}
        self._reads = asyncio.Semaphore(_READS_AT_ONCE)

    async def recover(self) -> Repairs:
        """Bring the node in line with the checkpoint; call it before serving, and now and then.

        Raises OSError, TimeoutError.
        """
        repairs, entries = await self.run(self.ledger.repair)
        self.report(entries)
        return repairs

    async def adopt_lost(self) -> ClaimError | None:
        """Bring back from live claims what a damaged checkpoint lost; returns why that is not possible now.

        Raises OSError, TimeoutError.
        """
        if self._allocated is None:
            return None
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                claims = await self._allocated()
        except Exception as error:  # whatever the transport raises; the kubelet tries again
            message = f"the checkpoint was damaged, and listing this node's claims to rebuild it failed: {error!r}"
            return ClaimError(ErrorKind.API, message)
        back, entries = await self.run(lambda: self.ledger.adopt(claims))
        message = f"the checkpoint was damaged; {len(back)} claims were brought back from the API server"
        self._tell(Notice("CheckpointRebuilt", message))
        self.report(entries)
        return None

    async def prepare(self, refs: Sequence[ClaimRef]) -> dict[str, Prepared | ClaimError]:
        """Prepare each claim independently; the answer has an item for every UID asked about.

        Idempotent: a claim prepared before gets the same answer, and its CDI file again if it was lost.
        """
        began = self._clock()
        self._asked |= {ref.uid: began for ref in refs}
        answer: dict[str, Prepared | ClaimError] = {}
        outcome: Mapping[str, Entry | ClaimError]
        try:
            asked = await self._read_all(refs)
            outcome = await self._prepare(asked)
        except Exception as error:
            outcome = {ref.uid: _failed(error) for ref in refs}
        for uid, result in outcome.items():
            answer[uid] = result if isinstance(result, ClaimError) else prepared(result)
            self._judge(uid, result)
        self._count("prepare", began, [r for r in outcome.values() if isinstance(r, ClaimError)])
        return answer

    async def _prepare(self, asked: Asked) -> dict[str, Entry | ClaimError]:
        """Raises OSError, TimeoutError."""
        try:
            answer, entries = await self.run(lambda: self.ledger.prepare(asked, tolerate_loss=self._allocated is None))
        except LostEntriesError:
            if (failure := await self.adopt_lost()) is not None:
                return {ref.uid: failure for ref, _ in asked}
            answer, entries = await self.run(lambda: self.ledger.prepare(asked, tolerate_loss=True))
        self.report(entries)
        return answer

    async def unprepare(self, refs: Sequence[ClaimRef]) -> dict[str, ClaimError | None]:
        """Release each claim independently; a claim nobody knows is released already."""
        began = self._clock()
        answer: dict[str, ClaimError | None]
        try:
            answer, entries = await self.run(lambda: self.ledger.unprepare(refs))
            self.report(entries)
        except Exception as failure:
            answer = {ref.uid: _failed(failure) for ref in refs}
        for uid, error in answer.items():
            if error is not None:
                self._judge(uid, error)
        self._count("unprepare", began, [e for e in answer.values() if e is not None])
        return answer

    async def release(self, entry: Entry, unless_asked_since: float) -> bool:
        """Release a claim on our own account, unless the kubelet asked for it after that time (of our clock).

        Returns whether the book no longer has it. Raises OSError, TimeoutError.
        """
        ref = ClaimRef(entry.namespace, entry.name, entry.uid)

        def work() -> tuple[dict[str, ClaimError | None], Entries] | None:
            return None if self._asked.get(ref.uid, 0.0) > unless_asked_since else self.ledger.unprepare([ref])

        if (done := await self.run(work)) is None:
            return False
        self.report(done[1])
        return done[0][ref.uid] is None

    async def entries(self) -> Entries:
        """What the book says now, by claim UID, earlier boots included. Raises OSError, TimeoutError."""
        return (await self.run(self.ledger.load)).entries

    async def run(self, work: Callable[[], T]) -> T:
        """Run a method of the ledger in its thread, then pass on what it had to tell."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            while self._notices:
                self._tell(self._notices.popleft())

    def _tell(self, notice: Notice) -> None:
        try:
            self._notify(notice)
        except Exception:  # the callback belongs to the agent; the kubelet still gets its answer
            logger.exception("telling the agent about %s failed", notice.reason)

    def report(self, entries: Entries) -> None:
        """Tell metrics and the agent what the node holds."""
        recent = self._clock() - _REMEMBER_ASKED_S
        self._asked = {uid: at for uid, at in self._asked.items() if uid in entries or at > recent}
        if self._metrics is not None:
            self._metrics.holding(len(entries), sum(len(e.devices) for e in entries.values()))
        if self._changed is not None:
            try:
                self._changed(entries)
            except Exception:  # the callback belongs to the agent; the kubelet still gets its answer
                logger.exception("telling the agent about prepared claims failed")

    def close(self) -> None:
        """Wait for the call in progress; later calls raise RuntimeError. Blocks."""
        self._thread.shutdown(wait=True)

    async def _read_all(self, refs: Sequence[ClaimRef]) -> Asked:
        unique = list({ref.uid: ref for ref in refs}.values())
        if len(unique) > MAX_CLAIMS_PER_CALL:
            error = ClaimError(ErrorKind.REQUEST, f"claims has {len(unique)} items, at most {MAX_CLAIMS_PER_CALL}")
            return [(ref, error) for ref in unique]
        live = await asyncio.gather(*(self._read(ref) for ref in unique))
        return list(zip(unique, live, strict=True))

    async def _read(self, ref: ClaimRef) -> ResourceClaim | ClaimError:
        try:
            ref.checked()
            async with self._reads, asyncio.timeout(_READ_TIMEOUT_S):
                claim = await self._claims.get(ref.namespace, ref.name)
            check_live(ref, claim)
            return claim
        except ClaimError as error:
            return error
        except LookupError:
            return ClaimError(ErrorKind.NOT_FOUND, f"claim {ref.key} does not exist")
        except Exception as error:  # the reader's transport may raise anything; the kubelet tries again
            return ClaimError(ErrorKind.API, f"cannot read claim {ref.key}: {type(error).__name__}: {error}")

    def _judge(self, uid: str, result: Entry | ClaimError) -> None:
        if self._guard is None:
            return
        if isinstance(result, Entry):
            self._guard.succeeded(d.device for d in result.devices)
        elif result.kind is ErrorKind.HARDWARE:
            self._guard.failed(result.devices, uid, result.message)

    def _count(self, call: str, began: float, failures: Sequence[ClaimError]) -> None:
        if self._metrics is not None:
            self._metrics.called(call, self._clock() - began, [failure.kind for failure in failures])
        for failure in failures:
            logger.warning("%s: %s (%s)", call, failure.message, failure.kind)


def prepared(entry: Entry) -> Prepared:
    """The kubelet's answer for a completed entry."""
    return tuple(
        PreparedDevice(d.requests, d.pool, d.device, (device_id(entry.uid, d),), d.share_id) for d in entry.devices
    )


def _failed(error: Exception) -> ClaimError:
    """A whole call that failed, told to each of its claims; the kubelet tries again."""
    if not isinstance(error, OSError):
        logger.error("a call of the kubelet failed", exc_info=error)
        return ClaimError(ErrorKind.INTERNAL, f"the plugin failed: {error!r}")
    kind = ErrorKind.BUSY if isinstance(error, TimeoutError) else ErrorKind.STORAGE
    return ClaimError(kind, f"cannot use the plugin's own files: {error}")
