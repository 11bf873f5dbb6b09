"""The second look: what the node holds, compared with what the API server and the machine say.

Prepare and unprepare are the kubelet's to call, but it forgets: a pod removed by force while the kubelet was down is
never unprepared. Its devices stay reserved here, and are reported as held, until nothing on the node uses them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gpunode.kubelet.checkpoint import Entries, Entry
from gpunode.kubelet.ledger import Repairs
from gpunode.kubelet.metrics import KubeletMetrics
from gpunode.kubelet.prepare import PrepareEngine
from gpunode.kubelet.resolve import results_of
from gpunode.kubelet.seams import ClaimReader, Leftover, Notice, Notify, Processes
from gpunode.model.errors import HardwareError
from gpunode.model.injection import DeviceNodes
from gpunode.model.resource import ResourceClaim

logger = logging.getLogger(__name__)

GRACE_S: Final = 600.0
_READS_AT_ONCE: Final = 8
_READ_TIMEOUT_S: Final = 20.0


class Verdict(StrEnum):
    """What the API server says about a claim that the node holds."""

    LIVE = "live"
    GONE = "gone"
    DEALLOCATED = "deallocated"
    UNKNOWN = "unknown"


_STALE: Final = (Verdict.GONE, Verdict.DEALLOCATED)


@dataclass(frozen=True)
class Findings:
    """Result of one look. held: devices that no live claim has but the node has not let go of."""

    repairs: Repairs
    held: frozenset[str]
    released: tuple[str, ...]
    leftovers: Mapping[str, Sequence[Leftover]]


def verdict(entry: Entry, live: ResourceClaim | None, driver: str) -> Verdict:
    """Judge one entry; `live` is None when the API server has no claim of that name."""
    if live is None or live.metadata.uid != entry.uid:
        return Verdict.GONE
    mine = {(r.device, r.share_id) for r in results_of(live, driver)}
    return Verdict.LIVE if mine >= {(d.device, d.share_id) for d in entry.devices} else Verdict.DEALLOCATED


class SecondLook:
    """Call `run` every minute, and soon after a claim was released.

    processes: who has devices open; None where that cannot be known (then only time releases a claim that is gone).
    """

    def __init__(
        self,
        engine: PrepareEngine,
        claims: ClaimReader,
        notify: Notify,
        processes: Processes | None = None,
        metrics: KubeletMetrics | None = None,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._claims = claims
        self._notify = notify
        self._processes = processes
        self._metrics = metrics
        self._grace_s = grace_s
        self._clock = clock
        self._reads = asyncio.Semaphore(_READS_AT_ONCE)
        self._gone_since: dict[str, float] = {}
        self._stale: frozenset[str] = frozenset()
        self._known: dict[str, DeviceNodes] = {}
        self._lingering: dict[str, DeviceNodes] = {}
        self._troubles: dict[str, str] = {}

    async def run(self) -> Findings:
        """Compare and repair once. Raises OSError, TimeoutError when the plugin's own files cannot be used."""
        repairs = await self._engine.recover()
        if repairs.lost and (failure := await self._engine.adopt_lost()):
            logger.warning("%s", failure)
        entries = await self._entries()
        await self._watch_sharing(entries)
        verdicts = await self._judge(entries)
        leftovers = await self._leftovers(entries, verdicts)
        released = await self._release(entries, verdicts, leftovers)
        # What was gone stays so in our eyes while nobody can say otherwise.
        self._stale = frozenset(
            uid for uid, v in verdicts.items() if v in _STALE or (v is Verdict.UNKNOWN and uid in self._stale)
        )
        held = {
            d.device
            for uid, entry in entries.items()
            if uid in self._stale and uid not in released
            for d in entry.devices
            if not d.admin
        }
        findings = Findings(repairs, frozenset(held | set(self._lingering)), released, leftovers)
        self._tell(findings)
        return findings

    async def _entries(self) -> Entries:
        boot = self._engine.ledger.node.boot_id
        return {uid: e for uid, e in (await self._engine.entries()).items() if e.boot_id == boot}

    async def _watch_sharing(self, entries: Entries) -> None:
        """Tell, once, of claims whose sharing has stopped working under their containers."""
        effects = self._engine.ledger.effects
        try:
            found = await self._engine.run(lambda: effects.troubles(entries.values()))
        except HardwareError as error:
            logger.warning("whether sharing works cannot be told: %s", error)
            return
        for uid, why in found.items():
            if self._troubles.get(uid) != why:
                entry = entries[uid]
                self._notify(Notice("SharingNotWorking", why, (entry.namespace, entry.name, uid)))
        self._troubles = found

    async def _judge(self, entries: Entries) -> dict[str, Verdict]:
        driver = self._engine.ledger.node.driver

        async def one(entry: Entry) -> Verdict:
            try:
                async with self._reads, asyncio.timeout(_READ_TIMEOUT_S):
                    live: ResourceClaim | None = await self._claims.get(entry.namespace, entry.name)
            except LookupError:
                live = None
            except Exception as error:  # not knowing is not knowing that it is gone
                logger.info("cannot read claim %s: %s", entry.key, error)
                return Verdict.UNKNOWN
            return verdict(entry, live, driver)

        return dict(zip(entries, await asyncio.gather(*map(one, entries.values())), strict=True))

    async def _leftovers(self, entries: Entries, verdicts: Mapping[str, Verdict]) -> dict[str, Sequence[Leftover]]:
        """Processes on devices that nobody should be using: of claims that are gone, and of claims just released."""
        now = {d.device: d.nodes for e in entries.values() for d in e.devices}
        released = {name: nodes for name, nodes in (self._known | self._lingering).items() if name not in now}
        self._known = now
        if self._processes is None:
            return {}
        stale = {d.device: d.nodes for uid, e in entries.items() if verdicts[uid] in _STALE for d in e.devices}
        live = {d.device for uid, e in entries.items() if verdicts[uid] not in _STALE for d in e.devices}
        found: dict[str, Sequence[Leftover]] = {}
        for name, nodes in (released | stale).items():
            if name not in live and (users := await asyncio.to_thread(self._processes.using, [nodes])):
                found[name] = users
        self._lingering = {name: nodes for name, nodes in released.items() if name in found}
        return found

    async def _release(
        self, entries: Entries, verdicts: Mapping[str, Verdict], leftovers: Mapping[str, Sequence[Leftover]]
    ) -> tuple[str, ...]:
        now = self._clock()
        gone = [uid for uid, v in verdicts.items() if v in _STALE]
        self._gone_since = {uid: self._gone_since.get(uid, now) for uid in gone}
        released = []
        for uid in gone:
            entry, since = entries[uid], self._gone_since[uid]
            if now - since < self._grace_s or any(d.device in leftovers for d in entry.devices):
                continue
            if await self._engine.release(entry, unless_asked_since=since):
                released.append(uid)
                message = f"claim {entry.key} has been {verdicts[uid]} for {now - since:.0f} s and was never unprepared"
                self._notify(Notice("ClaimReleased", message, (entry.namespace, entry.name, uid)))
        return tuple(released)

    def _tell(self, findings: Findings) -> None:
        for device, users in findings.leftovers.items():
            who = ", ".join(f"{u.command} (pid {u.pid}{', pod ' + u.pod_uid if u.pod_uid else ''})" for u in users[:5])
            self._notify(Notice("LeftoverProcesses", f"{device} is still open in {who}", devices=(device,)))
        repairs = findings.repairs
        counts = {
            "cdi-written": repairs.files_written,
            "cdi-removed": repairs.files_removed,
            "stray-removed": len(repairs.strays_removed),
            "rolled-back": repairs.rolled_back,
            "released": len(findings.released),
        }
        if changed := {what: count for what, count in counts.items() if count}:
            logger.info("second look repaired: %s", changed)
        if self._metrics is not None:
            self._metrics.second_look(len(findings.held), changed)
