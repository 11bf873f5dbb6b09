"""What changes between a decision and its writes, with an API server that answers as it is told."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from gpunode.controller.commit import Committer
from gpunode.controller.world import World
from gpunode.kube.cache import Cache, following
from gpunode.kube.client import WatchEvent
from gpunode.kube.events import Recorder
from gpunode.kube.kinds import PODS, Served
from gpunode.model.core import Pod, PodSpec, SchedulingGate
from gpunode.model.gang import Assignment, ClaimAllocation, Place
from gpunode.model.meta import ObjectMeta
from gpunode.model.names import CLAIM_FINALIZER, PLACEMENT_GATE
from gpunode.model.resource import Allocation, ResourceClaim


@dataclass
class FakeApi:
    """Answers every patch with the object as it would be, one version on; `during` runs before each answer."""

    during: Callable[[str], None] = lambda path: None
    sent: list[tuple[str, Any]] = field(default_factory=list)
    events: asyncio.Queue[WatchEvent] = field(default_factory=asyncio.Queue)

    async def list(self, path: str, kind: type[Any], params: object = None) -> tuple[list[Any], str]:
        return [], "10"

    async def watch(self, path: str, params: object) -> AsyncIterator[WatchEvent]:
        while True:
            yield await self.events.get()

    async def create(self, path: str, body: object) -> bytes:
        return b"{}"

    async def patch(self, path: str, body: Any, kind: str = "merge", params: object = None) -> bytes:
        self.sent.append((path, body))
        self.during(path)
        name = path.split("/")[-2] if path.endswith("/status") else path.rsplit("/", maxsplit=1)[-1]
        status = body.get("status", {}) if isinstance(body, dict) else {}
        meta = {"name": name, "namespace": "t", "uid": f"uid-{name}", "resourceVersion": "99"}
        return json.dumps({"metadata": meta, "status": {k: v for k, v in status.items() if v}}).encode()


def pod(name: str, uid: str, version: str = "5", deleted: str | None = None) -> Pod:
    meta = ObjectMeta(name=name, namespace="t", uid=uid, resource_version=version, deletion_timestamp=deleted)
    return Pod(metadata=meta, spec=PodSpec(scheduling_gates=(SchedulingGate(PLACEMENT_GATE),)))


def world_of(api: FakeApi) -> tuple[World, Committer, Place]:
    """Two gated pods with a claim each, and the decision to place both."""
    world = World(api, Served(None, None))  # type: ignore[arg-type]
    for name in ("p0", "p1"):
        world.caches.pods.observe(pod(name, f"uid-{name}"))
        meta = ObjectMeta(name=f"c-{name}", namespace="t", resource_version="5", finalizers=(CLAIM_FINALIZER,))
        world.caches.claims.observe(ResourceClaim(metadata=meta))
    committer = Committer(api, world, Recorder(api, "test", "test"))  # type: ignore[arg-type]
    assignments = tuple(
        Assignment(f"t/{n}", "node", (ClaimAllocation(f"t/c-{n}", Allocation()),), f"uid-{n}") for n in ("p0", "p1")
    )
    return world, committer, Place("podgroup/t/g", "d", assignments)


async def test_a_decision_is_written_claims_first() -> None:
    api = FakeApi()
    _, committer, place = world_of(api)
    assert await committer.apply([place]) == 0
    kinds = ["claim" if "/resourceclaims/" in path else "pod" for path, _ in api.sent if path.count("pods") < 2]
    assert kinds[:4] == ["claim", "claim", "pod", "pod"]


@pytest.mark.parametrize(
    "now",
    [None, pod("p1", "uid-other"), pod("p1", "uid-p1", "6", "2026-11-29T12:00:00Z")],
    ids=["gone", "new", "going"],
)
async def test_nothing_is_written_for_a_member_that_is_not_the_one_decided_on(now: Pod | None) -> None:
    api = FakeApi()
    world, committer, place = world_of(api)
    world.caches.pods._set("t/p1", now)
    assert await committer.apply([place]) == 1
    assert api.sent == []


async def test_allocations_are_taken_back_when_a_member_goes_while_they_are_written() -> None:
    api = FakeApi()
    world, committer, place = world_of(api)

    def leave(path: str) -> None:
        if path.endswith("c-p1/status"):
            world.caches.pods._set("t/p1", None)

    api.during = leave
    assert await committer.apply([place]) == 1
    assert not [path for path, _ in api.sent if "/pods/" in path], "no gate was opened"
    bodies = [body["status"]["allocation"] is None for path, body in api.sent if "/resourceclaims/" in path]
    assert bodies == [False, False, True, True]


async def test_an_answer_that_comes_after_the_deletion_does_not_bring_the_object_back() -> None:
    api = FakeApi()
    cache: Cache[Pod] = Cache(api, PODS)  # type: ignore[arg-type]
    async with following(cache):
        for kind, version in (("ADDED", "11"), ("DELETED", "13")):
            event = msgspec.json.encode(pod("p0", "u", version))
            api.events.put_nowait(WatchEvent(type=kind, object=msgspec.Raw(event)))
        while cache._version != "13":
            await asyncio.sleep(0)
        cache.observe(pod("p0", "u", "12"))
        assert not cache.items
        cache.observe(pod("p0", "u2", "14"))
        assert cache.items, "a newer one is news"
