"""Keeps a node's ResourceSlices in the API server as the planner wants them; their only writer."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from gpunode.kube.cache import Cache
from gpunode.kube.client import Api, decode
from gpunode.kube.errors import ApiError, UnreachableError
from gpunode.kube.events import ObjectRef, Recorder
from gpunode.kube.kinds import NODES, SLICES
from gpunode.model.resource import ResourceSlice
from gpunode.slices.changes import Changes, changes
from gpunode.slices.linter import drop_bad

logger = logging.getLogger(__name__)
_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

# From the node's existing slices to those it should have; None while there is nothing to say yet.
Plan = Callable[[Sequence[ResourceSlice]], tuple[ResourceSlice, ...] | None]


class Publisher:
    """Watches the node's own slices and repairs whatever differs: kubelet wipes them at each of its starts.

    `published` is set while the API server holds what the last plan asked for. Stopping does not unpublish.
    """

    def __init__(self, api: Api, recorder: Recorder, about: ObjectRef, driver: str, plan: Plan) -> None:
        self.published = asyncio.Event()
        self._api = api
        self._recorder = recorder
        self._about = about
        self._plan = plan
        self._wake = asyncio.Event()
        selector = f"spec.nodeName={about.name},spec.driver={driver}"
        self._cache: Cache[ResourceSlice] = Cache(
            api, SLICES, params={"fieldSelector": selector}, on_change=lambda *_: self._wake.set()
        )

    def poke(self) -> None:
        """The planner's inputs changed: plan again soon."""
        self._wake.set()

    async def run(self) -> None:
        """Reconcile until cancelled. API errors are retried with backoff, never raised."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._cache.run())
            tasks.create_task(self._reconcile_forever())

    async def _reconcile_forever(self) -> None:
        await self._cache.synced.wait()
        failures = 0
        while True:
            self._wake.clear()
            try:
                await self._reconcile()
                failures = 0
            except (ApiError, UnreachableError) as error:
                self.published.clear()
                raced = isinstance(error, ApiError) and error.raced
                logger.log(logging.INFO if raced else logging.ERROR, "slices not published, will retry: %s", error)
                if isinstance(error, ApiError) and not raced:
                    await self._recorder.emit(self._about, "SlicePublishFailed", str(error), "Warning", "Publish")
                await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1
                continue
            await self._wake.wait()

    async def _reconcile(self) -> None:
        existing = sorted(self._cache.items.values(), key=lambda s: s.metadata.name)
        wanted = self._plan(existing)
        if wanted is None:
            return
        good, problems = drop_bad(wanted)
        for problem in problems:
            await self._recorder.emit(self._about, "DeviceNotPublished", str(problem), "Warning", "Publish")
        todo = changes(good, existing)
        if todo:
            self.published.clear()
            if todo.create:
                await self._find_owner()
            await self._write(todo)
        self.published.set()

    async def _find_owner(self) -> None:
        """The Node as it is now. Raises ApiError while there is none: slices owned by a Node that is gone would be
        collected as fast as they are made."""
        node = await self._api.get(NODES.path(name=self._about.name), NODES.type)
        if node.metadata.uid != self._about.uid:
            logger.info("Node %s was made anew; its slices belong to it from now on", self._about.name)
            self._about = replace(self._about, uid=node.metadata.uid)

    async def _write(self, todo: Changes) -> None:
        """Creates and updates first, so that a pool that grows or moves never has fewer slices than before."""
        for slice_ in todo.create:
            self._seen(await self._api.create(SLICES.path(), self._body(slice_)))
        for slice_ in todo.update:
            path = SLICES.path(name=slice_.metadata.name)
            self._seen(await self._api.request("PUT", path, self._body(slice_)))
        for slice_ in todo.delete:
            await self._api.delete(
                SLICES.path(name=slice_.metadata.name),
                {"preconditions": {"uid": slice_.metadata.uid}},
            )
        logger.info("slices: %d created, %d updated, %d deleted", len(todo.create), len(todo.update), len(todo.delete))

    def _seen(self, data: bytes) -> None:
        self._cache.observe(decode(data, ResourceSlice))

    def _body(self, slice_: ResourceSlice) -> dict[str, object]:
        """The whole object: this agent is the only author of it, so nothing of another's can be lost."""
        metadata: dict[str, object] = {
            "name": slice_.metadata.name,
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": self._about.name, "uid": self._about.uid}],
        }
        if slice_.metadata.resource_version:
            metadata["resourceVersion"] = slice_.metadata.resource_version
        return {
            "apiVersion": SLICES.group_version,
            "kind": SLICES.kind,
            "metadata": metadata,
            "spec": msgspec.to_builtins(slice_.spec),
        }
