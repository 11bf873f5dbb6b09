"""What the agent tells about claims and when it looks at them again."""

import asyncio
from typing import Any

import msgspec
import pytest

from gpunode.agent import claim_status
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
                "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": "1"},
                "status": {"devices": [FOREIGN]},
            }
            for name in names
        }
        self.patches: list[tuple[str, Any]] = []
        self.reads = 0
        self.lists = 0
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
        if body["metadata"].get("resourceVersion", "1") != claim["metadata"]["resourceVersion"]:
            raise ApiError("PATCH", path, 409, "Conflict", "the object has been modified")
        claim["status"]["devices"] = [FOREIGN, *body["status"]["devices"]]
        return b"{}"

    def devices(self, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.claims[f"/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims/{name}"][
            "status"
        ]["devices"]
        return found

    async def list(self, path: str, kind: Any) -> Any:
        assert path == "/apis/resource.k8s.io/v1/resourceclaims"
        self.lists += 1
        if self.fail is not None:
            raise self.fail
        return [msgspec.convert(claim, kind) for claim in self.claims.values()], "1"


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
    return ClaimStatuses(api, DRIVER, "n", now=clock or Clock())  # type: ignore[arg-type]


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


async def test_what_a_released_claim_was_told_is_taken_back() -> None:
    api = FakeApi("a", "b")
    one = statuses(api)
    one.update(entries(entry("a", "g0"), entry("b", "g1")))
    assert await one.write()
    one.update(entries(entry("b", "g1")))
    one.update(health={"g0": SICK, "g1": HEALTHY})
    assert await one.write()
    assert api.devices("a") == [FOREIGN]
    assert [d["device"] for d in api.devices("b")] == ["d", "g1"]
    patches, reads = len(api.patches), api.reads
    assert await one.write()
    assert (len(api.patches), api.reads, api.lists) == (patches, reads, 1), "taken back twice"
    one.update(entries(entry("a", "g0"), entry("b", "g1")))
    assert await one.write()
    assert [d["device"] for d in api.devices("a")] == ["d", "g0"], "prepared again, for the next pod"


async def test_a_claim_prepared_again_in_between_keeps_its_status() -> None:
    api = FakeApi("a")
    one = statuses(api)
    held = entries(entry("a", "g0"))
    one.update(held)
    assert await one.write()
    one.update({})
    one.update(held)
    assert await one.write()
    assert [d["device"] for d in api.devices("a")] == ["d", "g0"]


async def test_a_released_claim_that_is_gone_or_another_by_now_is_left_alone() -> None:
    api = FakeApi("a", "b", "c")
    one = statuses(api)
    one.update(entries(*(entry(name, f"g-{name}") for name in "abc")))
    assert await one.write()
    paths = {name: f"/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims/{name}" for name in "abc"}
    del api.claims[paths["a"]]
    api.claims[paths["b"]]["metadata"]["uid"] = "of another claim"
    elsewhere = [FOREIGN, {"driver": DRIVER, "pool": "m", "device": "g9"}]
    api.claims[paths["c"]]["status"]["devices"] = elsewhere
    patches = len(api.patches)
    one.update({})
    assert await one.write()
    assert len(api.patches) == patches
    assert api.devices("c") == elsewhere, "allocated anew on another node, whose agent described it"


async def test_taking_back_is_tried_again_until_it_is_done() -> None:
    api = FakeApi("a")
    one = statuses(api)
    one.update(entries(entry("a", "g0")))
    assert await one.write()
    one.update({})
    for error in (UnreachableError("no answer"), ApiError("PATCH", "/", 409, "Conflict", "modified")):
        api.fail = error
        assert not await one.write()
        assert len(api.devices("a")) == 2
    api.fail = None
    assert await one.write()
    assert api.devices("a") == [FOREIGN]


async def test_what_a_killed_agent_left_is_taken_back_by_the_next() -> None:
    """Killed between the release of a claim and the word to the API server."""
    api = FakeApi("released", "held")
    killed = statuses(api)
    killed.update(entries(entry("released", "g0"), entry("held", "g1")))
    assert await killed.write()
    following = statuses(api)
    following.update(health={"g1": HEALTHY})
    assert await following.write()
    assert len(api.devices("released")) == 2, "nobody has said yet what is held"
    following.update(entries(entry("held", "g1")))
    api.fail = UnreachableError("no answer")
    assert not await following.write()
    api.fail = None
    assert await following.write()
    assert api.devices("released") == [FOREIGN]
    assert [d["device"] for d in api.devices("held")] == ["d", "g1"]
    assert await following.write()
    assert api.lists == 3, "once for each agent, and once that failed"


async def test_of_two_agents_only_the_one_in_charge_writes() -> None:
    api = FakeApi("a")
    charge = False
    one = ClaimStatuses(api, DRIVER, "n", lambda: charge)  # type: ignore[arg-type]
    one.update(entries(entry("a", "g0")))
    assert await one.write()
    assert not api.patches
    charge = True
    assert await one.write()
    assert len(api.patches) == 1


async def test_what_another_agent_wrote_meanwhile_is_put_right() -> None:
    """A rollout that is taken back: the newer agent, which sees more as a fault, leaves; nothing changed for us."""
    api, charge = FakeApi("a", "b"), True
    old = ClaimStatuses(api, DRIVER, "n", lambda: charge)  # type: ignore[arg-type]
    old.update(entries(entry("a", "g0")), {"g0": HEALTHY})
    assert await old.write()
    ours = api.devices("a")
    charge = False
    new = statuses(api)
    new.update(entries(entry("a", "g0"), entry("b", "g1")), {"g0": SICK})
    assert await new.write()
    assert api.devices("a") != ours
    charge = True  # and claim b was released, and the newer agent killed, before it took back what it had written
    old.forget()
    assert await old.write()
    healthy = [c["status"] for d in api.devices("a")[1:] for c in d["conditions"] if c["type"] == "Healthy"]
    assert healthy == ["True"]
    assert api.devices("b") == [FOREIGN]


async def test_a_write_that_lost_a_race_is_tried_again() -> None:
    api = FakeApi("a")
    one = statuses(api)
    one.update(entries(entry("a", "g0")))
    patch = api.patch

    async def raced(path: str, *_: Any) -> bytes:
        raise ApiError("PATCH", path, 409, "Conflict", "the object has been modified")

    api.patch = raced  # type: ignore[method-assign]
    assert not await one.write()
    api.patch = patch  # type: ignore[method-assign]
    assert await one.write()
    assert len(api.devices("a")) == 2


async def test_a_claim_that_is_refused_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_status, "_PASS_S", 0.01)
    monkeypatch.setattr(claim_status, "_BACKOFF_S", (30.0,))
    api = FakeApi("a", "b")
    patch, tries = api.patch, 0

    async def refusing(path: str, *more: Any) -> bytes:
        nonlocal tries
        if "/a/" not in path:
            return await patch(path, *more)
        tries += 1
        raise ApiError("PATCH", path, 422, "Invalid", "must be an allocated device in the claim")

    api.patch = refusing  # type: ignore[method-assign]
    one = statuses(api)
    one.update(entries(entry("a", "g0"), entry("b", "g1")))
    task = asyncio.create_task(one.run())
    for health, count in ((HEALTHY, 1), (SICK, 2), (HEALTHY, 3)):
        one.update(health={"g1": health})
        async with asyncio.timeout(5):
            while len(api.patches) < count:
                await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert tries == 1, "before its time"


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


async def test_another_agents_coming_or_leaving_brings_on_a_look() -> None:
    looks = Looks(findings())
    lookout = looks.lookout = Lookout(looks, lambda _: None, every_s=3600, soon_s=0, pause_s=0)
    task = asyncio.create_task(lookout.run())
    await looks.reach(1)
    await asyncio.sleep(0.05)
    assert looks.count == 1
    lookout.wake()
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
