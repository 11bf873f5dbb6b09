"""The publisher where its Node goes and comes back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from gpunode.kube.errors import ApiError
from gpunode.kube.events import ObjectRef, Recorder
from gpunode.model.meta import ObjectMeta
from gpunode.model.resource import Pool, ResourceSlice, ResourceSliceSpec
from gpunode.slices import publisher
from gpunode.slices.publisher import Publisher

DRIVER, NODE = "gpu.gpunode.dev", "n"


class FakeApi:
    """One Node, or none, and slices that vanish with it, as the garbage collector has it."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.slices: dict[str, Any] = {}
        self.created: list[str] = []
        self.asked = 0
        self.version = 1
        self._events: asyncio.Queue[Any] = asyncio.Queue()

    async def list(self, path: str, kind: Any, params: Any) -> Any:
        return [], "1"

    async def watch(self, path: str, params: Any) -> AsyncIterator[Any]:
        while True:
            yield await self._events.get()

    async def get(self, path: str, kind: Any) -> Any:
        assert path == f"/api/v1/nodes/{NODE}"
        self.asked += 1
        if not self.uid:
            raise ApiError("GET", path, 404, "NotFound", "not found")
        return msgspec.convert({"metadata": {"name": NODE, "uid": self.uid}}, kind)

    async def create(self, path: str, body: Any) -> bytes:
        self.version += 1
        (owner,) = body["metadata"]["ownerReferences"]
        body["metadata"] |= {"resourceVersion": str(self.version), "uid": f"u{self.version}"}
        self.created.append(owner["uid"])
        self.slices[body["metadata"]["name"]] = body
        self._tell("ADDED", body)
        return msgspec.json.encode(body)

    def lose_node(self) -> None:
        self.uid = ""
        for slice_ in self.slices.values():
            self.version += 1
            slice_["metadata"]["resourceVersion"] = str(self.version)
            self._tell("DELETED", slice_)
        self.slices.clear()

    def _tell(self, kind: str, body: Any) -> None:
        event = {"type": kind, "object": body}
        from gpunode.kube.client import WatchEvent

        self._events.put_nowait(msgspec.json.decode(msgspec.json.encode(event), type=WatchEvent))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.005)


async def test_slices_belong_to_the_node_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_BACKOFF_S", (0.01,))
    api: Any = FakeApi("first")
    wanted = ResourceSlice(ResourceSliceSpec(DRIVER, Pool(NODE, 1, 1), node_name=NODE), ObjectMeta(name="n-0"))
    about = ObjectRef("v1", "Node", NODE, uid="first")
    one = Publisher(api, Recorder(api, "agent", NODE), about, DRIVER, lambda _: (wanted,))
    task = asyncio.create_task(one.run())
    try:
        await until(one.published.is_set)
        asked = api.asked
        api.lose_node()
        await until(lambda: api.asked > asked + 3)
        assert (api.created, one.published.is_set()) == (["first"], False), "made for a Node that is gone"
        api.uid = "second"
        await until(one.published.is_set)
        assert api.created == ["first", "second"]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
