"""What the agent tells about claims and when it looks at them again."""

import asyncio
from typing import Any

import msgspec
import pytest

from gpunode.agent.claim_status import ClaimStatuses
from gpunode.agent.claims import LiveClaims, Lookout
from gpunode.kube.errors import ApiError, UnreachableError
from gpunode.kubelet.checkpoint import Entries, Entry, HeldDevice, State
from gpunode.kubelet.health import DeviceReport
from gpunode.kubelet.ledger import Repairs
from gpunode.kubelet.reconcile import Findings
from gpunode.model.injection import DeviceNodes

DRIVER = "gpu.gpunode.dev"
FOREIGN = {"driver": "other.example.com", "pool": "p", "device": "d", "conditions": []}


class FakeApi:
    """Claims by path as JSON; applies status.devices the way the API server merges entries of several authors."""

    def __init__(self, *names: str) -> None:
        self.claims: dict[str, Any] = {
            f"/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims/{name}": {
                "metadata": {"name": name, "uid": f"uid-{name}"},
                "status": {"devices": [FOREIGN]},
            }
            for name in names
        }
        self.patches: list[tuple[str, Any]] = []
        self.reads = 0
        self.fail: Exception | None = None

    async def get(self, path: str, kind: Any) -> Any:
        self.reads += 1
        if self.fail is not None:
            raise self.fail
        if path not in self.claims:
            raise ApiError("GET", path, 404, "NotFound", "not found")
        return msgspec.convert(self.claims[path], kind)

    async def patch(self, path: str, body: Any, kind: str, params: dict[str, str]) -> bytes:
        assert (kind, params) == ("apply", {"fieldManager": "gpunode-agent", "force": "true"})
        claim = self.claims[path.removesuffix("/status")]
        assert path.endswith("/status")
        self.patches.append((body["metadata"]["name"], body))
        if body["metadata"]["uid"] != claim["metadata"]["uid"]:
            raise ApiError("PATCH", path, 409, "Conflict", "uid mismatch")
        claim["status"]["devices"] = [FOREIGN, *body["status"]["devices"]]
        return b"{}"

    def devices(self, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.claims[f"/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims/{name}"][
            "status"
        ]["devices"]
        return found


def entry(name: str, *devices: str, uid: str = "") -> Entry:
    held = tuple(HeldDevice(d, "n", ("gpus",), DeviceNodes(uuid=f"GPU-{d}")) for d in devices)
    return Entry(uid or f"uid-{name}", "ns", name, "boot", State.COMPLETED, held)


def entries(*of: Entry) -> Entries:
    return {e.uid: e for e in of}


class Clock:
    def __init__(self) -> None:
        self.seconds = 0

    def __call__(self) -> str:
        return f"2026-01-01T00:00:{self.seconds:02d}Z"


def statuses(api: FakeApi, clock: Clock | None = None) -> ClaimStatuses:
    return ClaimStatuses(api, DRIVER, clock or Clock())  # type: ignore[arg-type]


HEALTHY, SICK = DeviceReport(True), DeviceReport(False, "XID 79")


async def test_a_status_is_written_once_and_again_when_health_changes() -> None:
    api, clock = FakeApi("a", "b"), Clock()
    one = statuses(api, clock)
    one.update(entries(entry("a", "g0", "g1"), entry("b", "g2")), {"g0": HEALTHY, "g1": HEALTHY})
    assert await one.write()
    assert await one.write()
    assert [name for name, _ in api.patches] == ["a", "b"]
    assert [d["device"] for d in api.devices("a")] == ["d", "g0", "g1"], "the other driver's entry stays"

    clock.seconds = 9
    one.update(health={"g0": HEALTHY, "g1": SICK})
    assert await one.write()
    assert [name for name, _ in api.patches] == ["a", "b", "a"]
    times = {
        (d["device"], c["type"]): (c["status"], c["lastTransitionTime"][-3:-1])
        for d in api.devices("a")[1:]
        for c in d["conditions"]
    }
    assert times == {
        ("g0", "Prepared"): ("True", "00"), ("g0", "Healthy"): ("True", "00"),
        ("g1", "Prepared"): ("True", "00"), ("g1", "Healthy"): ("False", "09"),
    }  # fmt: skip


async def test_a_restarted_agent_writes_nothing_that_is_there_already() -> None:
    api = FakeApi("a")
    first = statuses(api)
    first.update(entries(entry("a", "g0")), {"g0": HEALTHY})
    await first.write()
    later = Clock()
    later.seconds = 30
    second = statuses(api, later)
    second.update(entries(entry("a", "g0")), {"g0": HEALTHY})
    assert await second.write()
    assert len(api.patches) == 1


async def test_a_claim_of_another_uid_and_one_that_is_gone_are_left_alone() -> None:
    api = FakeApi("a")
    one = statuses(api)
    one.update(entries(entry("a", "g0", uid="uid-before"), entry("gone", "g1")))
    assert await one.write()
    assert api.devices("a") == [FOREIGN]
    reads = api.reads
    assert await one.write()
    assert api.reads == reads, "asked again about claims that are not ours"


@pytest.mark.parametrize(
    "error", [UnreachableError("no answer"), ApiError("GET", "/", 422, "Invalid", "forbidden")], ids=["away", "refused"]
)
async def test_what_could_not_be_written_is_tried_again(error: Exception) -> None:
    api = FakeApi("a")
    one = statuses(api)
    one.update(entries(entry("a", "g0")))
    api.fail = error
    assert not await one.write()
    api.fail = None
    assert await one.write()
    assert len(api.patches) == 1


async def test_statuses_follow_updates_while_running() -> None:
    api = FakeApi("a")
    one = statuses(api)
    task = asyncio.create_task(one.run())
    one.update(entries(entry("a", "g0")))
    async with asyncio.timeout(5):
        while not api.patches:
            await asyncio.sleep(0.01)
    task.cancel()
    assert api.devices("a")[1]["device"] == "g0"


def findings(*held: str) -> Findings:
    return Findings(Repairs(), frozenset(held), (), {})


class Looks:
    """Answers of `look`, one after the other, the last again and again."""

    def __init__(self, *answers: Findings | Exception) -> None:
        self.answers = list(answers)
        self.count = 0
        self.lookout: Lookout | None = None

    async def __call__(self) -> Findings:
        self.count += 1
        if self.lookout is not None:
            self.lookout.called({})  # as its repairs do
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def reach(self, count: int) -> None:
        async with asyncio.timeout(5):
            while self.count < count:
                await asyncio.sleep(0.005)


async def test_a_look_follows_the_kubelets_calls_and_tells_changes_once() -> None:
    looks = Looks(findings(), findings("g0"), OSError("disk"), findings("g0"), findings())
    told: list[frozenset[str]] = []
    lookout = looks.lookout = Lookout(looks, told.append, every_s=3600, soon_s=0, pause_s=0)
    task = asyncio.create_task(lookout.run())
    await looks.reach(1)
    await asyncio.sleep(0.05)
    assert looks.count == 1, "a look brought on the next one"
    for count in range(2, 6):
        lookout.called({})
        await looks.reach(count)
        await asyncio.sleep(0.01)
    task.cancel()
    assert told == [frozenset(), frozenset({"g0"}), frozenset()]


async def test_a_call_during_a_look_is_not_forgotten() -> None:
    looks = Looks(findings())
    lookout = looks.lookout = Lookout(looks, lambda _: None, every_s=3600, soon_s=0, pause_s=0)
    lookout.called(entries(entry("a", "g0")))
    task = asyncio.create_task(lookout.run())
    await looks.reach(2)
    task.cancel()


async def test_a_look_comes_by_itself_too() -> None:
    looks = Looks(findings())
    task = asyncio.create_task(Lookout(looks, lambda _: None, every_s=0.01, soon_s=0, pause_s=0).run())
    await looks.reach(3)
    task.cancel()


async def test_claims_of_this_node_are_told_from_others() -> None:
    def claim(name: str, driver: str, pool: str) -> dict[str, Any]:
        result = {"request": "r", "driver": driver, "pool": pool, "device": "g0"}
        return {"metadata": {"name": name}, "status": {"allocation": {"devices": {"results": [result]}}}}

    class Api:
        async def list(self, path: str, kind: Any) -> Any:
            found = [claim("mine", DRIVER, "n"), claim("next", DRIVER, "m"), claim("other", "x", "n"), {}]
            return [msgspec.convert(c, kind) for c in found], "1"

        async def get(self, path: str, kind: Any) -> Any:
            raise ApiError("GET", path, 404 if path.endswith("gone") else 500, "Any", "any")

    claims = LiveClaims(Api(), DRIVER, "n")  # type: ignore[arg-type]
    assert [c.metadata.name for c in await claims.allocated()] == ["mine"]
    with pytest.raises(LookupError, match="ns/gone"):
        await claims.get("ns", "gone")
    with pytest.raises(ApiError):
        await claims.get("ns", "unknown")
