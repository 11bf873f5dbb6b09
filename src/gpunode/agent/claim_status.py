"""Keeps status.devices of the claims this node has prepared: what each device is, and how it is. The only writer of it.

Server-side apply, because a claim may have devices of several drivers, each the author of its own entries. The UID is
part of what is applied, so a claim that was deleted and made again under the same name is refused and left alone.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from gpunode.kube.client import Api
from gpunode.kube.errors import ApiError, UnreachableError
from gpunode.kube.kinds import CLAIMS
from gpunode.kubelet.checkpoint import Entries, Entry
from gpunode.kubelet.health import DeviceReport
from gpunode.kubelet.status import condition_times, device_statuses
from gpunode.model.meta import ApiStruct
from gpunode.model.times import stamp_now

logger = logging.getLogger(__name__)
FIELD_MANAGER: Final = "gpunode-agent"
_AT_ONCE: Final = 4
# Between two passes: what changes more often is written once, so a flapping device costs one write a second and claim.
_PASS_S: Final = 1.0
_BACKOFF_S: Final = (1.0, 2.0, 5.0, 15.0, 60.0)

Statuses = list[dict[str, Any]]


class _Status(ApiStruct, frozen=True):
    devices: list[dict[str, Any]] = []


class _Claim(ApiStruct, frozen=True):
    """status.devices as it is now, nothing else."""

    status: _Status = _Status()


class ClaimStatuses:
    """`update` says what is held and how it is; `run` carries it to the API server, only where it differs.

    now: RFC 3339, for the transition times of conditions.
    """

    def __init__(self, api: Api, driver: str, now: Callable[[], str] | None = None) -> None:
        self._api = api
        self._driver = driver
        self._now = now or stamp_now
        self._entries: Entries = {}
        self._health: Mapping[str, DeviceReport] = {}
        self._told: dict[str, Statuses] = {}
        self._wake = asyncio.Event()

    def update(self, entries: Entries | None = None, health: Mapping[str, DeviceReport] | None = None) -> None:
        """What this node holds now, by claim UID, or how its devices are; None leaves that as it was."""
        self._entries = self._entries if entries is None else dict(entries)
        self._health = self._health if health is None else health
        self._told = {uid: told for uid, told in self._told.items() if uid in self._entries}
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled. Refusals are logged and tried again at growing intervals, never raised."""
        failures = 0
        while True:
            await self._wake.wait()
            self._wake.clear()
            if await self.write():
                failures = 0
                await asyncio.sleep(_PASS_S)
                continue
            await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
            failures += 1
            self._wake.set()

    async def write(self) -> bool:
        """One pass over all claims; False when some could not be written and should be tried again."""
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(entry: Entry) -> bool:
            content = device_statuses(entry, self._driver, self._health, "")
            if self._told.get(entry.uid) == content:
                return True
            async with limit:
                written = await self._write(entry)
            if written:
                self._told[entry.uid] = content
            return written

        return all(await asyncio.gather(*(one(entry) for entry in self._entries.values())))

    async def _write(self, entry: Entry) -> bool:
        path = CLAIMS.path(entry.namespace, entry.name)
        try:
            now = (await self._api.get(path, _Claim)).status.devices
            wanted = device_statuses(
                entry, self._driver, self._health, self._now(), condition_times(_mine(now, self._driver))
            )
            if _mine(now, self._driver) != wanted:
                await self._api.patch(
                    CLAIMS.path(entry.namespace, entry.name, "status"),
                    _body(entry, wanted),
                    "apply",
                    {"fieldManager": FIELD_MANAGER, "force": "true"},
                )
        except ApiError as error:
            if error.raced:
                return True  # gone, or another claim by now: it is not ours to describe
            logger.warning("status of claim %s not written: %s", entry.key, error)
            return False
        except (UnreachableError, msgspec.MsgspecError) as error:
            logger.info("status of claim %s not written, will retry: %s", entry.key, error)
            return False
        return True


def _mine(statuses: Statuses, driver: str) -> Statuses:
    return [status for status in statuses if status.get("driver") == driver]


def _body(entry: Entry, devices: Statuses) -> dict[str, Any]:
    return {
        "apiVersion": CLAIMS.group_version,
        "kind": CLAIMS.kind,
        "metadata": {"name": entry.name, "namespace": entry.namespace, "uid": entry.uid},
        "status": {"devices": devices},
    }
