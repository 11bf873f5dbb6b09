"""Keeps status.devices of the claims this node has prepared: what each device is, and how it is. The only writer of it.

Server-side apply, because a claim may have devices of several drivers, each the author of its own entries. The UID is
part of what is applied, so a claim that was deleted and made again under the same name is refused and left alone.

Entries of claims that are released are taken back: such a claim may stay allocated for a pod that is still to come.
What an agent that was killed left behind is found by one listing of the claims when another begins to write.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gpunode.kube.client import Api
from gpunode.kube.errors import ApiError, UnreachableError
from gpunode.kube.kinds import CLAIMS
from gpunode.kubelet.checkpoint import Entries, Entry
from gpunode.kubelet.health import DeviceReport
from gpunode.kubelet.status import condition_times, device_statuses
from gpunode.model.meta import ApiStruct, ObjectMeta
from gpunode.model.times import stamp_now

logger = logging.getLogger(__name__)
FIELD_MANAGER: Final = "gpunode-agent"
_AT_ONCE: Final = 4
# Between two passes: what changes more often is written once, so a flapping device costs one write a second and claim.
_PASS_S: Final = 1.0
_LOOK: Final = "the listing of claims"
_BACKOFF_S: Final = (1.0, 2.0, 5.0, 15.0, 60.0)

Statuses = list[dict[str, Any]]


class _Status(ApiStruct, frozen=True):
    devices: list[dict[str, Any]] = []


class _Claim(ApiStruct, frozen=True):
    """status.devices as it is now, nothing else."""

    metadata: ObjectMeta = ObjectMeta()
    status: _Status = _Status()


@dataclass(frozen=True)
class _Ref:
    """A claim to take our entries back from."""

    uid: str
    namespace: str
    name: str

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


class ClaimStatuses:
    """`update` says what is held and how it is; `run` carries it to the API server, only where it differs.

    pool: the node's, for a claim may be allocated anew elsewhere. in_charge: whether this agent is the one that writes,
    of two that serve the node. now: RFC 3339, for the transition times of conditions.
    """

    def __init__(
        self,
        api: Api,
        driver: str,
        pool: str,
        in_charge: Callable[[], bool] = lambda: True,
        now: Callable[[], str] | None = None,
    ) -> None:
        self._api = api
        self._driver = driver
        self._pool = pool
        self._in_charge = in_charge
        self._now = now or stamp_now
        self._entries: Entries = {}
        self._known = False  # whether anybody has said yet what is held
        self._looked = False
        self._released: dict[str, _Ref] = {}
        self._health: Mapping[str, DeviceReport] = {}
        self._told: dict[str, Statuses] = {}
        self._failed: set[str] = set()  # claims at the last pass, by UID
        self._wake = asyncio.Event()

    def update(self, entries: Entries | None = None, health: Mapping[str, DeviceReport] | None = None) -> None:
        """What this node holds now, by claim UID, or how its devices are; None leaves that as it was."""
        if entries is not None:
            gone = (entry for uid, entry in self._entries.items() if uid not in entries)
            released = self._released | {entry.uid: _Ref(entry.uid, entry.namespace, entry.name) for entry in gone}
            self._released = {uid: ref for uid, ref in released.items() if uid not in entries}
            self._entries = dict(entries)
            self._known = True
        self._health = self._health if health is None else health
        self._told = {uid: told for uid, told in self._told.items() if uid in self._entries}
        self._wake.set()

    def forget(self) -> None:
        """Another agent came or left: what the claims say is what it wrote last, and what it left behind is unknown."""
        self._told = {}
        self._looked = False
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled. Refusals are logged and tried again at growing intervals, never raised.

        What was refused keeps nothing else waiting.
        """
        loop = asyncio.get_running_loop()
        failures, retry_at = 0, 0.0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(retry_at if failures else None):
                    await self._wake.wait()
            self._wake.clear()
            again = not failures or loop.time() >= retry_at
            if await self.write(again=again):
                failures = 0
            elif again:
                retry_at = loop.time() + _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
                failures += 1
            await asyncio.sleep(_PASS_S)

    async def write(self, *, again: bool = True) -> bool:
        """One pass over all claims; False when some could not be written and should be tried again.

        again: also over those that could not be written at the last pass.
        """
        if not self._in_charge() or not self._known:
            return True
        if again:
            self._failed.clear()
        found = await self._look()
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(entry: Entry) -> bool:
            content = device_statuses(entry, self._driver, self._health, "")
            if self._told.get(entry.uid) == content:
                return True
            if entry.uid in self._failed:
                return False
            async with limit:
                written = await self._write(entry)
            if written:
                self._told[entry.uid] = content
            else:
                self._failed.add(entry.uid)
            return written

        async def released(ref: _Ref) -> bool:
            if ref.uid in self._failed:
                return False
            async with limit:
                taken = await self._take_back(ref)
            if not taken:
                self._failed.add(ref.uid)
            else:
                self._told.pop(ref.uid, None)
                if self._released.get(ref.uid) is ref:
                    del self._released[ref.uid]
            return taken

        held = (one(entry) for entry in self._entries.values())
        return all([found, *await asyncio.gather(*held, *(released(ref) for ref in self._released.values()))])

    async def _look(self) -> bool:
        """Once: which claims another agent described and never took that back. False when that is not known."""
        if self._looked or _LOOK in self._failed:
            return self._looked
        self._looked = True  # `forget` may come meanwhile
        try:
            claims, _ = await self._api.list(CLAIMS.path(), _Claim)
        except (ApiError, UnreachableError, msgspec.MsgspecError) as error:
            logger.warning("claims that were released while no agent was here are not known yet: %s", error)
            self._looked = False
            self._failed.add(_LOOK)
            return False
        for claim in claims:
            meta = claim.metadata
            if meta.uid not in self._entries and self._here(claim):
                self._released[meta.uid] = _Ref(meta.uid, meta.namespace, meta.name)
        return True

    def _here(self, claim: _Claim) -> bool:
        """Whether a claim has entries of ours."""
        return any(status.get("pool") == self._pool for status in _mine(claim.status.devices, self._driver))

    async def _take_back(self, ref: _Ref) -> bool:
        """Remove our entries, and nobody else's, from a claim that this node does not hold any more."""
        try:
            claim = await self._api.get(CLAIMS.path(ref.namespace, ref.name), _Claim)
            if claim.metadata.uid == ref.uid and self._here(claim):
                # With the version, because another node's agent, which has our manager's name, may be next to write.
                body = _body(ref, [], resourceVersion=claim.metadata.resource_version)
                await self._apply(ref, body)
        except ApiError as error:
            if error.not_found:
                return True
            logger.log(
                logging.INFO if error.raced else logging.WARNING,
                "status of claim %s, which was released, not taken back, will retry: %s", ref.key, error,
            )  # fmt: skip
            return False
        except (UnreachableError, msgspec.MsgspecError) as error:
            logger.info("status of claim %s, which was released, not taken back, will retry: %s", ref.key, error)
            return False
        return True

    async def _apply(self, claim: Entry | _Ref, body: dict[str, Any]) -> None:
        path = CLAIMS.path(claim.namespace, claim.name, "status")
        await self._api.patch(path, body, "apply", {"fieldManager": FIELD_MANAGER, "force": "true"})

    async def _write(self, entry: Entry) -> bool:
        path = CLAIMS.path(entry.namespace, entry.name)
        try:
            claim = await self._api.get(path, _Claim)
            if claim.metadata.uid != entry.uid:
                return True  # another claim by now: it is not ours to describe
            now = claim.status.devices
            wanted = device_statuses(
                entry, self._driver, self._health, self._now(), condition_times(_mine(now, self._driver))
            )
            if _mine(now, self._driver) != wanted:
                await self._apply(entry, _body(entry, wanted))
        except ApiError as error:
            if error.not_found:
                return True
            level = logging.INFO if error.raced else logging.WARNING
            logger.log(level, "status of claim %s not written, will retry: %s", entry.key, error)
            return False
        except (UnreachableError, msgspec.MsgspecError) as error:
            logger.info("status of claim %s not written, will retry: %s", entry.key, error)
            return False
        return True


def _mine(statuses: Statuses, driver: str) -> Statuses:
    return [status for status in statuses if status.get("driver") == driver]


def _body(claim: Entry | _Ref, devices: Statuses, **more: str) -> dict[str, Any]:
    return {
        "apiVersion": CLAIMS.group_version,
        "kind": CLAIMS.kind,
        "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid, **more},
        "status": {"devices": devices},
    }
