"""The node's book of prepared claims: every change of it, in an order that a kill at any point cannot spoil.

A claim that needs hardware changed is written as `started`, then changed, then written as `completed`; releasing it
runs the other way. A claim that only hands out what is there is written once. CDI files are written last and removed
first thing after the book, which is enough because they follow from it. After a kill the kubelet asks again, and
`repair` runs before anything else: what is `started` then was never handed out and is undone.

Everything here blocks; `gpunode.kubelet.prepare` runs it in one thread and reads claims before.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from gpunode.kubelet.cdi import CdiStore
from gpunode.kubelet.checkpoint import CheckpointFile, Entries, Entry, Loaded, State
from gpunode.kubelet.effects import Effects, needed
from gpunode.kubelet.errors import ClaimError, ErrorKind
from gpunode.kubelet.lock import NodeLock
from gpunode.kubelet.resolve import ClaimRef, Node, conflict, resolve, results_of, same_devices
from gpunode.kubelet.seams import Notice, Notify
from gpunode.model.errors import HardwareError
from gpunode.model.injection import DeviceNodes
from gpunode.model.resource import ResourceClaim

logger = logging.getLogger(__name__)

Asked = Sequence[tuple[ClaimRef, ResourceClaim | ClaimError]]


class LostEntriesError(Exception):
    """The checkpoint was damaged, and `adopt` has not been called since."""


@dataclass(frozen=True)
class Repairs:
    """What a look at the node put right: CDI files written and removed, strays in hardware removed (by device name),
    claims rolled back.

    lost: the book lost entries, which `adopt` brings back from live claims.
    """

    files_written: int = 0
    files_removed: int = 0
    strays_removed: tuple[str, ...] = ()
    rolled_back: int = 0
    lost: bool = False


@dataclass(frozen=True)
class Ledger:
    """The persistent state of one driver on one node, shared with other instances through `lock`."""

    node: Node
    devices: Callable[[], Mapping[str, DeviceNodes]]
    checkpoint: CheckpointFile
    cdi: CdiStore
    lock: NodeLock
    effects: Effects
    notify: Notify

    def prepare(self, asked: Asked, *, tolerate_loss: bool) -> tuple[dict[str, Entry | ClaimError], Entries]:
        """Answer every claim, and the entries afterwards.

        Raises OSError, TimeoutError when nothing could be done, and LostEntriesError, unless tolerated, when the book
        may lack claims that hold a device asked for.
        """
        with self.lock.held():
            loaded, entries = self._load()
            if loaded.lost and not tolerate_loss:
                raise LostEntriesError
            answer = self._decide_all(asked, entries)
            # A claim that has nothing of ours is answered and not remembered.
            decided = [e for e in answer.values() if isinstance(e, Entry) and e.devices]
            entries |= {entry.uid: entry for entry in decided}
            if entries != loaded.entries:
                self.checkpoint.save(entries, lost=loaded.lost)
            started = [entry for entry in decided if entry.state is State.STARTED]
            for entry in started:
                answer[entry.uid] = self._finish(entry, entries)
            if started:
                self.checkpoint.save(entries, lost=loaded.lost)
            for uid, result in answer.items():
                if isinstance(result, Entry) and result.devices:
                    answer[uid] = self._file(result)
            self._reconcile_files(entries, loaded.lost)
            return answer, entries

    def unprepare(self, refs: Iterable[ClaimRef]) -> tuple[dict[str, ClaimError | None], Entries]:
        """Release every claim; one that is not in the book is released. Raises OSError, TimeoutError."""
        with self.lock.held():
            loaded, entries = self._load()
            answer: dict[str, ClaimError | None] = {ref.uid: None for ref in refs}
            mine = [entries[uid] for uid in answer if uid in entries]
            undo = [replace(entry, state=State.STARTED) for entry in mine if needed(entry)]
            for entry in mine:
                del entries[entry.uid]
            entries |= {entry.uid: entry for entry in undo}
            if entries != loaded.entries:
                self.checkpoint.save(entries, lost=loaded.lost)
            self._reconcile_files(entries, loaded.lost)
            for entry in undo:
                answer[entry.uid] = self._undo(entry, entries)
            if undo:
                self.checkpoint.save(entries, lost=loaded.lost)
            return answer, entries

    def repair(self) -> tuple[Repairs, Entries]:
        """Put right what differs between book, CDI files and partitions. Raises OSError, TimeoutError.

        Nobody holds the lock, so a claim that is `started` was interrupted, or could not be undone before: undo it.
        """
        with self.lock.held():
            loaded, entries = self._load()
            interrupted = [e for e in entries.values() if e.state is State.STARTED]
            undone = sum(self._undo(entry, entries) is None for entry in interrupted)
            if entries != loaded.entries:
                self.checkpoint.save(entries, lost=loaded.lost)
            written, removed = self._reconcile_files(entries, loaded.lost)
            strays = () if loaded.lost else self._remove_strays(entries)
            return Repairs(written, removed, strays, undone, loaded.lost), entries

    def adopt(self, claims: Iterable[ResourceClaim]) -> tuple[list[str], Entries]:
        """Bring back lost entries from live claims; returns their UIDs. Raises OSError, TimeoutError.

        Claims without a device of this node are skipped.
        Sharing is set again, partitions that exist are adopted; a claim whose partition is gone is left out. Where the
        hardware refuses, the loss stays on record and the next call tries again.
        """
        with self.lock.held():
            loaded, entries = self._load()
            devices = self.devices()
            back: list[str] = []
            waiting: list[ResourceClaim] = []
            refused = False
            # Where two claims were given one device, the one with a CDI file was prepared and may be running.
            ordered = sorted(claims, key=self._likely_running)
            for turn in (ordered, waiting):
                for claim in turn:
                    try:
                        if self._bring_back(claim, entries, devices):
                            back.append(claim.metadata.uid)
                    except ClaimError as error:
                        if turn is ordered and error.kind is ErrorKind.UNKNOWN_DEVICE:
                            waiting.append(claim)  # admin access to a partition whose owner comes later
                            continue
                        logger.warning("cannot bring back a lost claim: %s", error)
                        refused = refused or error.kind is ErrorKind.HARDWARE
            if back or loaded.lost:
                self.checkpoint.save(entries, lost=refused)
            self._reconcile_files(entries, lost=refused)
            if not refused:
                self._remove_strays(entries)
            return back, entries

    def _bring_back(self, claim: ResourceClaim, entries: Entries, devices: Mapping[str, DeviceNodes]) -> bool:
        """Enter one claim that is not in the book; False if there is no reason to. Raises ClaimError."""
        meta = claim.metadata
        here = any(r.pool == self.node.pool for r in results_of(claim, self.node.driver))
        if meta.uid in entries or not here:
            return False
        entry = resolve(ClaimRef(meta.namespace, meta.name, meta.uid).checked(), claim, self.node, devices)
        if not entry.devices or conflict(entry, entries.values()) or not self.effects.intact(entry):
            return False
        self.effects.supported(entry)
        entries[entry.uid] = self.effects.apply(_with_watched_partitions(entry, entries.values()))
        return True

    def load(self) -> Loaded:
        """What the book says now. Raises OSError, TimeoutError."""
        with self.lock.held():
            return self._load()[0]

    def _likely_running(self, claim: ResourceClaim) -> tuple[bool, str, str]:
        """Sort key: has a CDI file, then by age of the allocation."""
        allocation = claim.status.allocation
        at = (allocation.allocation_timestamp or "") if allocation else ""
        return (not self.cdi.known(claim.metadata.uid), at, claim.metadata.uid)

    def _load(self) -> tuple[Loaded, Entries]:
        """The file as it is, and its entries of this boot: devices of an earlier one are nobody's."""
        loaded = self.checkpoint.load()
        if loaded.missing and self.cdi.any():
            self.checkpoint.save({}, lost=True)
            loaded = Loaded({}, ("the checkpoint is gone, but CDI files of prepared claims are there",), lost=True)
        for message in loaded.problems:
            self.notify(Notice("CheckpointDamaged", message))
        return loaded, {uid: e for uid, e in loaded.entries.items() if e.boot_id == self.node.boot_id}

    def _decide_all(self, asked: Asked, entries: Entries) -> dict[str, Entry | ClaimError]:
        devices = self.devices()
        answer: dict[str, Entry | ClaimError] = {}
        taken = dict(entries)
        for ref, live in asked:
            try:
                if isinstance(live, ClaimError):
                    raise live
                entry = self._decide(ref, live, taken, devices)
            except ClaimError as error:
                answer[ref.uid] = error
                continue
            except Exception as error:  # one claim's surprise must not fail the others of the call
                logger.exception("preparing claim %s failed", ref.key)
                answer[ref.uid] = ClaimError(ErrorKind.INTERNAL, f"claim {ref.key}: {error!r}")
                continue
            taken[entry.uid] = answer[ref.uid] = entry
        return answer

    def _decide(
        self, ref: ClaimRef, live: ResourceClaim, entries: Entries, devices: Mapping[str, DeviceNodes]
    ) -> Entry:
        """The entry to write before anything is done: completed if there is nothing to do."""
        known = entries.get(ref.uid)
        try:
            entry = resolve(ref, live, self.node, devices)
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
        try:
            entry = _with_watched_partitions(entry, entries.values())
        except ClaimError:
            # The same for a partition that it was looking at and that went with its owner.
            if known is None or known.state is not State.COMPLETED:
                raise
            return known
        self.effects.supported(entry)
        if not needed(entry):
            return replace(entry, state=State.COMPLETED)
        # What was completed stays so: its partition has its nodes, and containers may be using it.
        if known is None or known.state is not State.COMPLETED or not self.effects.intact(known):
            return entry
        self.effects.confirm(known)
        return known

    def _finish(self, entry: Entry, entries: Entries) -> Entry | ClaimError:
        """From started to completed, or back to nothing. What cannot be undone stays started, for the next try."""
        try:
            completed = self.effects.apply(entry)
        except ClaimError as error:
            if failure := self._undo(entry, entries):
                logger.warning("could not roll back: %s", failure)
            return error
        entries[entry.uid] = completed
        return completed

    def _undo(self, entry: Entry, entries: Entries) -> ClaimError | None:
        try:
            self.effects.undo(entry, entries.values())
        except ClaimError as error:
            return error
        entries.pop(entry.uid, None)
        return None

    def _file(self, entry: Entry) -> Entry | ClaimError:
        try:
            self.cdi.ensure(entry)
        except OSError as error:
            return ClaimError(ErrorKind.STORAGE, f"claim {entry.key}: cannot write its CDI file: {error}")
        except HardwareError as error:  # of the driver as a whole: no device is at fault
            return ClaimError(ErrorKind.HARDWARE, f"claim {entry.key}: {error}")
        return entry

    def _reconcile_files(self, entries: Entries, lost: bool) -> tuple[int, int]:
        """Other claims' files are put right on the way; failing at that is not this claim's fault."""
        try:
            return self.cdi.reconcile(entries, keep_orphans=lost)
        except (OSError, HardwareError) as error:
            self.notify(Notice("CdiFilesUnrepaired", f"cannot put the CDI directory right: {error}"))
            return 0, 0

    def _remove_strays(self, entries: Entries) -> tuple[str, ...]:
        removed: list[str] = []
        try:
            for device in self.effects.remove_strays(entries.values()):
                removed.append(device)
        except Exception as error:  # a driver's surprise must not end the repair
            self.notify(Notice("HardwareUnrepaired", f"cannot undo what no claim on this node owns: {error}"))
        return tuple(removed)


def _with_watched_partitions(entry: Entry, others: Iterable[Entry]) -> Entry:
    """Admin access to a partition is to the one another claim had made. Raises ClaimError when there is none."""
    made = {
        d.device: d.nodes
        for other in others
        if other.uid != entry.uid and other.state is State.COMPLETED
        for d in other.devices
        if d.nodes.dynamic
    }
    devices = []
    for held in entry.devices:
        if held.admin and held.nodes.dynamic:
            if held.device not in made:
                raise ClaimError(
                    ErrorKind.UNKNOWN_DEVICE,
                    f"claim {entry.key}: partition {held.device} does not exist now, so there is nothing to look at",
                )
            held = replace(held, nodes=made[held.device])  # noqa: PLW2901
        devices.append(held)
    return replace(entry, devices=tuple(devices))
