"""A watch cache: list once, then follow. Holds decoded values by key and tells listeners what changed."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from gpunode.kube.client import Api, Bookmark
from gpunode.kube.errors import ApiError, UnreachableError
from gpunode.kube.kinds import Kind
from gpunode.model.meta import ObjectMeta

logger = logging.getLogger(__name__)


class HasMeta(Protocol):
    @property
    def metadata(self) -> ObjectMeta: ...


T = TypeVar("T", bound=HasMeta)
_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)


class Cache(Generic[T]):
    """`items` is the collection as last seen; it is only valid once `synced` is set.

    `on_change(key, new)` is called in the event loop after each change; `new` is None when the object is gone.
    """

    def __init__(
        self,
        api: Api,
        kind: Kind[T],
        *,
        namespace: str = "",
        params: Mapping[str, str] | None = None,
        on_change: Callable[[str, T | None], None] | None = None,
    ) -> None:
        self.items: dict[str, T] = {}
        self.synced = asyncio.Event()
        self.kind = kind
        self._api = api
        self._path = kind.path(namespace)
        self._params = dict(params or {})
        self._on_change = on_change
        self._decoder = msgspec.json.Decoder(kind.type)
        self._version = ""

    def observe(self, item: T) -> None:
        """Take in an object that a write of ours just returned, so that the next decision already sees it.

        Unless the watch is past that version and does not know the object: it was deleted before our answer came, and
        taking it in would keep it for ever, since its deletion will not be told again.
        """
        if item.metadata.key in self.items or _number(self._version) < _version(item):
            self._take(item.metadata.key, item)

    async def run(self) -> None:
        """Follow the collection until cancelled. Never raises for an unreachable or refusing server: retries."""
        failures = 0
        while True:
            try:
                if not self._version:
                    await self._relist()
                await self._follow()
                failures = 0
            except ApiError as error:
                self._version = ""
                if not error.gone:
                    logger.warning("cannot watch %s, will retry: %s", self.kind.plural, error)
                    failures += 1
            except (UnreachableError, msgspec.MsgspecError) as error:
                logger.info("watch of %s interrupted, will resume: %s", self.kind.plural, error)
                if isinstance(error, msgspec.MsgspecError):
                    self._version = ""
                failures += 1
            if failures:
                delay = _BACKOFF_S[min(failures, len(_BACKOFF_S)) - 1]
                await asyncio.sleep(delay * (0.75 + random.random() / 2))  # noqa: S311 - jitter, not a secret

    async def _relist(self) -> None:
        found, version = await self._api.list(self._path, self.kind.type, self._params)
        fresh = {item.metadata.key: item for item in found}
        for key in [key for key in self.items if key not in fresh]:
            self._set(key, None)
        for key, item in fresh.items():
            known = self.items.get(key)
            if known is None or known.metadata.resource_version != item.metadata.resource_version:
                self._set(key, item)
        self._version = version
        self.synced.set()

    async def _follow(self) -> None:
        async for event in self._api.watch(self._path, {**self._params, "resourceVersion": self._version}):
            if event.type == "BOOKMARK":
                self._version = msgspec.json.decode(event.object, type=Bookmark).metadata.resource_version
                continue
            item = self._decoder.decode(event.object)
            self._version = item.metadata.resource_version
            if event.type == "DELETED":
                self._set(item.metadata.key, None)
            else:
                self._take(item.metadata.key, item)

    def _take(self, key: str, item: T) -> None:
        """Store unless a newer version is known already (events trail behind our own writes)."""
        known = self.items.get(key)
        if known is None or _version(item) > _version(known):
            self._set(key, item)

    def _set(self, key: str, item: T | None) -> None:
        if item is None:
            self.items.pop(key, None)
        else:
            self.items[key] = item
        if self._on_change is not None:
            self._on_change(key, item)


@asynccontextmanager
async def following(*caches: Cache[Any], within_s: float = 30.0) -> AsyncIterator[None]:
    """Run caches beside the block, which begins once all of them have listed. Raises TimeoutError."""
    tasks = [asyncio.create_task(cache.run()) for cache in caches]
    try:
        async with asyncio.timeout(within_s):
            for cache in caches:
                await cache.synced.wait()
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _version(item: HasMeta) -> int:
    """resourceVersions compare as integers (KEP-5504); anything else counts as oldest."""
    return _number(item.metadata.resource_version)


def _number(version: str) -> int:
    return int(version) if version.isdigit() else 0
