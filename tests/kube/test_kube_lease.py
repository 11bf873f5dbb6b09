"""The leader's lease when its holder ends in order."""

import asyncio
from typing import Any

import msgspec
import pytest

import gpunode.kube.lease as module
from gpunode.kube.errors import ApiError, UnreachableError
from gpunode.kube.lease import Lease, LeaseObject


class FakeApi:
    """One lease, with resourceVersions."""

    def __init__(self) -> None:
        self.lease: Any = None
        self.fail: Exception | None = None

    async def get(self, path: str, kind: type[LeaseObject]) -> LeaseObject:
        if self.fail is not None:
            raise self.fail
        if self.lease is None:
            raise ApiError("GET", path, 404, "NotFound", "not found")
        return msgspec.convert(self.lease, kind)

    async def create(self, path: str, body: Any) -> bytes:
        return self._store(body, 1)

    async def request(self, method: str, path: str, body: Any, **_: Any) -> bytes:
        assert (method, path.rsplit("/", 1)[1]) == ("PUT", "lead")
        version = int(self.lease["metadata"]["resourceVersion"])
        if body["metadata"]["resourceVersion"] != str(version):
            raise ApiError(method, path, 409, "Conflict", "modified")
        return self._store(body, version + 1)

    def _store(self, body: Any, version: int) -> bytes:
        self.lease = {**body, "metadata": {**body["metadata"], "resourceVersion": str(version)}}
        return b"{}"


async def test_who_ends_in_order_leaves_the_lease_to_the_next_at_once() -> None:
    api: Any = FakeApi()
    first, second = Lease(api, "ns", "lead", "first"), Lease(api, "ns", "lead", "second")
    await first.acquire()
    assert await second._try_take() == "first"
    await second.release()
    assert api.lease["spec"]["holderIdentity"] == "first", "it was not its own to give up"
    await first.release()
    assert api.lease["spec"]["holderIdentity"] is None
    await second.acquire()
    assert (api.lease["spec"]["holderIdentity"], api.lease["spec"]["leaseTransitions"]) == ("second", 1)


@pytest.mark.parametrize("error", [UnreachableError("away"), ApiError("GET", "/", 403, "Forbidden", "no")], ids=str)
async def test_a_server_that_is_away_is_no_reason_to_fail_at_the_end(error: Exception) -> None:
    api: Any = FakeApi()
    lease = Lease(api, "ns", "lead", "first")
    await lease.acquire()
    api.fail = error
    await lease.release()
    assert api.lease["spec"]["holderIdentity"] == "first"


async def test_a_server_that_does_not_answer_delays_the_end_by_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RELEASE_S", 0.05)
    api: Any = FakeApi()
    lease = Lease(api, "ns", "lead", "first")
    await lease.acquire()

    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    api.get = hang
    async with asyncio.timeout(5):
        await lease.release()
    assert api.lease["spec"]["holderIdentity"] == "first"
