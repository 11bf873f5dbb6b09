"""kube-scheduler's own allocator as judge: ours finds devices for claims exactly where it does, what ours chooses
obeys its rules, and what ours writes beside the devices is what it would write."""

import json
import os
import random
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.allocate.pooling import build_pools
from tests.oracle import test_oracle_slices as build

from gpunode.allocate.allocator import allocate
from gpunode.allocate.ask import Failure, FailureKind
from gpunode.allocate.cel import Selectors
from gpunode.allocate.pools import NodeDevices, devices_on
from gpunode.allocate.usage import Usage
from gpunode.model.core import Node
from gpunode.model.meta import ObjectMeta
from gpunode.model.names import MANAGED_TAINT
from gpunode.model.quantity import parse_milli
from gpunode.model.resource import (
    Allocation,
    DeviceClass,
    DeviceTaint,
    DeviceTaintRule,
    DeviceTaintRuleSpec,
    DeviceTaintSelector,
    ResourceClaim,
    ResourceSlice,
)

SOURCE = Path(__file__).with_name("allocator") / "main.go"
DRIVERS = ("a.gpunode.dev", "b.gpunode.dev")
NODE = Node(metadata=ObjectMeta(name="n", labels={"zone": "z1"}))
NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
SELECTORS = (
    "true",
    'device.driver == "a.gpunode.dev"',
    'device.attributes["a.gpunode.dev"].?model.orValue("") == "x"',
    'device.attributes["a.gpunode.dev"].?rank.orValue(9) < 2',
    '"fast" in device.attributes["a.gpunode.dev"] && device.attributes["a.gpunode.dev"].fast',
    'device.capacity["a.gpunode.dev"].?memory.orValue(quantity("0")).compareTo(quantity("15Gi")) > 0',
    "!device.allowMultipleAllocations",
)
SELECT = Selectors()
FAILING = 'device.attributes["a.gpunode.dev"].model == "x"'
Json = dict[str, Any]
Judge = Callable[[Sequence[Json]], list[Json]]


@pytest.fixture(scope="session")
def judge() -> Judge:
    """Judges cases with kube-scheduler's allocator. Skips, with the reason, where it cannot be compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCE", SOURCE)
        program = build._built("1.37.2")

    def ask(cases: Sequence[Json]) -> list[Json]:
        text = "".join(json.dumps(case) + "\n" for case in cases)
        done = subprocess.run([str(program)], input=text, capture_output=True, text=True, timeout=600, check=True)
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(answers) == len(cases)
        return answers

    return ask


# -- random clusters and claims, as the API server would accept them ----------------------------------------------


class Maker:
    """Random published devices, classes and claims. Everything is small, so that every search is exhaustive."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice

    def chance(self, share: float) -> bool:
        return self.dice.random() < share

    def pools(self) -> list[Json]:
        made: list[Json] = []
        for driver, pool in (("a.gpunode.dev", "n"), ("a.gpunode.dev", "net"), ("b.gpunode.dev", "n")):
            if (pool == "n" and driver == DRIVERS[0]) or self.chance(0.25):
                made += self.pool(driver, pool)
        self.dice.shuffle(made)
        return made

    def pool(self, driver: str, name: str) -> list[Json]:
        counters = [{"name": "set", "counters": {"slices": {"value": str(self.dice.randint(1, 4))}}}]
        partitioned = self.chance(0.3)
        where: Json = {"nodeName": "n"} if name == "n" else self.reach()
        bodies: list[Json] = [{"sharedCounters": counters}] if partitioned else []
        numbers = iter(range(20))
        for _ in range(self.dice.randint(1, 2)):
            count = self.dice.randint(1, 4)
            bodies.append({"devices": [self.device(f"d{next(numbers)}", driver, partitioned) for _ in range(count)]})
        if self.chance(0.08):
            bodies.append({"devices": [self.device("d0", driver, False)]})  # twice: the pool is invalid
        if self.chance(0.05) and "devices" in bodies[-1]:
            unknown = [{"counterSet": "other", "counters": {"slices": {"value": "1"}}}]
            bodies[-1]["devices"][0]["consumesCounters"] = unknown
        announced = len(bodies) + self.chance(0.1)
        made = [
            {
                "metadata": {"name": f"{driver[0]}-{name}-{number}"},
                "spec": {
                    "driver": driver,
                    "pool": {"name": name, "generation": 2, "resourceSliceCount": announced},
                    **where,
                    **body,
                },
            }
            for number, body in enumerate(bodies)
        ]
        if self.chance(0.1):
            old = json.loads(json.dumps(made[-1]))
            old["metadata"]["name"] += "-old"
            old["spec"]["pool"].update(generation=1, resourceSliceCount=1)
            made.append(old)
        return made

    def reach(self) -> Json:
        value = self.dice.choice(("z1", "z2"))
        terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [value]}]}]
        return self.dice.choice(({"allNodes": True}, {"nodeSelector": {"nodeSelectorTerms": terms}}))

    def device(self, name: str, driver: str, partitioned: bool) -> Json:
        made: Json = {"name": name, "attributes": self.attributes(driver), "capacity": {}}
        if self.chance(0.7):
            made["capacity"]["memory"] = {"value": self.dice.choice(("10Gi", "20Gi", "40Gi"))}
        if self.chance(0.3):
            made["capacity"]["cores"] = {"value": self.dice.choice(("2", "4"))}
        if partitioned and self.chance(0.8):
            amount = str(self.dice.randint(0, 3))
            made["consumesCounters"] = [{"counterSet": "set", "counters": {"slices": {"value": amount}}}]
        if self.chance(0.2):
            made["allowMultipleAllocations"] = True
            if "memory" in made["capacity"] and self.chance(0.6):
                made["capacity"]["memory"]["requestPolicy"] = self.policy()
        if self.chance(0.15):
            made["taints"] = [self.taint() for _ in range(self.dice.randint(1, 2))]
        return made

    def attributes(self, driver: str) -> Json:
        given: Json = {}
        if self.chance(0.8):
            given["model"] = {"string": self.dice.choice("xy")}
        if self.chance(0.7):
            given["rank"] = {"int": self.dice.randint(0, 2)}
        if self.chance(0.4):
            given[f"{driver}/fast"] = {"bool": self.chance(0.5)}
        if self.chance(0.4):
            given["example.com/release"] = {"version": self.dice.choice(("1.0.0", "2.0.0"))}
        if self.chance(0.1):
            given["example.com/release"] = {"string": "1.0.0"}
        return given

    def policy(self) -> Json:
        if self.chance(0.4):
            return {"default": "5Gi", "validValues": ["2Gi", "5Gi", "9Gi"]}
        span: Json = {"min": "2Gi"}
        if self.chance(0.6):
            span["max"] = "10Gi"
        if self.chance(0.6):
            span["step"] = "2Gi"
        return {"default": self.dice.choice(("2Gi", "4Gi")), "validRange": span}

    def taint(self) -> Json:
        effect = self.dice.choice(("NoSchedule", "NoExecute", "None"))
        return {"key": f"example.com/{self.dice.choice('pq')}", "value": self.dice.choice("12"), "effect": effect}

    def toleration(self) -> Json:
        made: Json = self.dice.choice(
            ({"operator": "Exists"}, {"operator": "Equal", "value": self.dice.choice("12")}, {"operator": "Exists"})
        ).copy()
        if made["operator"] == "Equal" or self.chance(0.8):
            made["key"] = f"example.com/{self.dice.choice('pq')}"
        if self.chance(0.5):
            made["effect"] = self.dice.choice(("NoSchedule", "NoExecute"))
        return made

    def classes(self) -> list[Json]:
        config = [{"opaque": {"driver": DRIVERS[0], "parameters": {"from": "class"}}}]
        return [
            {"metadata": {"name": "any"}, "spec": {"config": config if self.chance(0.5) else []}},
            {
                "metadata": {"name": "own"},
                "spec": {"selectors": [{"cel": {"expression": self.dice.choice(SELECTORS)}}], "config": config * 2},
            },
        ]

    def claim(self, number: int) -> Json:
        requests = [self.request(f"r{n}") for n in range(self.dice.choice((1, 1, 1, 2, 2, 3)))]
        devices: Json = {"requests": requests}
        if self.chance(0.35):
            devices["constraints"] = [self.constraint(requests) for _ in range(self.dice.choice((1, 1, 2)))]
        if self.chance(0.3):
            devices["config"] = [self.config(requests) for _ in range(self.dice.randint(1, 2))]
        uid = f"00000000-0000-4000-8000-{self.dice.getrandbits(40):012d}"
        return {"metadata": {"name": f"c{number}", "namespace": "t", "uid": uid}, "spec": {"devices": devices}}

    def config(self, requests: list[Json]) -> Json:
        names = self.some_names(requests) if self.chance(0.6) else []
        return {"requests": names, "opaque": {"driver": DRIVERS[0], "parameters": {"of": names}}}

    def some_names(self, requests: list[Json]) -> list[str]:
        names = [r["name"] for r in requests]
        names += [f"{r['name']}/{s['name']}" for r in requests for s in r.get("firstAvailable", ())]
        return self.dice.sample(names, self.dice.randint(1, len(names)))

    def constraint(self, requests: list[Json]) -> Json:
        kind = self.dice.choice(("matchAttribute", "matchAttribute", "distinctAttribute"))
        name = self.dice.choice(("a.gpunode.dev/model", "a.gpunode.dev/rank", "example.com/release"))
        made: Json = {kind: name}
        if self.chance(0.5):
            made["requests"] = self.some_names(requests)
        return made

    def request(self, name: str) -> Json:
        if self.chance(0.25):
            subs = [self.wish() | {"name": f"s{n}"} for n in range(self.dice.randint(1, 3))]
            return {"name": name, "firstAvailable": subs}
        exactly = self.wish()
        if self.chance(0.12):
            exactly["adminAccess"] = True
        return {"name": name, "exactly": exactly}

    def wish(self) -> Json:
        made: Json = {"deviceClassName": self.dice.choice(("any", "any", "own"))}
        if self.chance(0.01):
            made["deviceClassName"] = "absent"
        if self.chance(0.15):
            made["allocationMode"] = "All"
        else:
            count = 33 if self.chance(0.01) else self.dice.choice((1, 1, 1, 2, 2, 3))
            made |= {"allocationMode": "ExactCount", "count": count}
        if self.chance(0.35):
            expression = FAILING if self.chance(0.06) else self.dice.choice(SELECTORS)
            made["selectors"] = [{"cel": {"expression": expression}}]
        if self.chance(0.25):
            made["tolerations"] = [self.toleration()]
        if self.chance(0.25):
            key = self.dice.choice(("memory",) * 6 + ("cores", "a.gpunode.dev/memory"))
            amount = self.dice.choice(("1", "4")) if key == "cores" else self.dice.choice(("1Gi", "3Gi", "8Gi", "15Gi"))
            made["capacity"] = {"requests": {key: amount}}
        return made


# -- one case ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Raw objects for the judge, and the same decoded for us."""

    raw: Json
    devices: NodeDevices
    ours: tuple[Allocation, ...] | Failure


def decoded(slices: Iterable[Json]) -> tuple[NodeDevices, Callable[..., Usage]]:
    rules = {
        d: DeviceTaintRule(
            spec=DeviceTaintRuleSpec(
                taint=DeviceTaint(key=MANAGED_TAINT, value="true", effect="NoSchedule"),
                device_selector=DeviceTaintSelector(driver=d),
            )
        )
        for d in DRIVERS
    }
    published = {s["metadata"]["name"]: msgspec.convert(s, ResourceSlice) for s in slices}
    pools = build_pools(published, rules, frozenset(DRIVERS))
    return devices_on(NODE, pools.values()), lambda results=(): Usage(pools, results)


def make_case(seed: int) -> Case:
    """What is held already was given out by ourselves, one claim after the other."""
    maker = Maker(random.Random(seed))
    slices, classes = maker.pools(), maker.classes()
    devices, usage_of = decoded(slices)
    table = {c["metadata"]["name"]: msgspec.convert(c, DeviceClass) for c in classes}
    usage = usage_of()

    def served(claims: list[Json]) -> tuple[Allocation, ...] | Failure:
        wanted = tuple(msgspec.convert(c, ResourceClaim) for c in claims)
        return allocate(wanted, devices, usage, table, SELECT, NOW)

    held: list[Json] = []
    for number in range(maker.dice.choice((0, 0, 1, 2))):
        before = served([maker.claim(100 + number)])
        if not isinstance(before, Failure):
            held += [msgspec.to_builtins(r) for a in before for r in a.devices.results]
    claims = [maker.claim(n) for n in range(maker.dice.choice((1, 1, 2)))]
    raw = {"node": plain_node(), "slices": slices, "classes": classes, "held": held, "claims": claims}
    return Case(raw, devices, served(claims))


def plain_node() -> Json:
    return {"metadata": {"name": NODE.metadata.name, "labels": dict(NODE.metadata.labels)}}


def only(case: Case, allocations: tuple[Allocation, ...]) -> Json:
    """The same question with no devices but those we chose, and no alternatives but those we chose."""
    results = [r for a in allocations for r in a.devices.results]
    chosen = {(r.driver, r.pool, r.device) for r in results}
    held = {(h["driver"], h["pool"], h["device"]) for h in case.raw["held"]}
    raw: Json = json.loads(json.dumps(case.raw))
    for slice_ in raw["slices"]:
        spec = slice_["spec"]
        if "devices" in spec:
            pool = (spec["driver"], spec["pool"]["name"])
            # What is held stays, since it consumes counters.
            spec["devices"] = [d for d in spec["devices"] if (*pool, d["name"]) in held | chosen]
    for claim, allocation in zip(raw["claims"], allocations, strict=True):
        names = {r.request for r in allocation.devices.results}
        for request in claim["spec"]["devices"]["requests"]:
            if "firstAvailable" in request:
                kept_subs = [s for s in request["firstAvailable"] if f"{request['name']}/{s['name']}" in names]
                request["firstAvailable"] = kept_subs
    return raw


def uses_all(raw: Json) -> bool:
    return '"All"' in json.dumps(raw["claims"])


def check_choice(case: Case, allocations: tuple[Allocation, ...]) -> None:
    """I1 and the shape of an allocation, without help from either allocator."""
    published = {
        (s["spec"]["driver"], s["spec"]["pool"]["name"], d["name"]): d
        for s in case.raw["slices"]
        for d in s["spec"].get("devices", ())
        if s["spec"]["pool"]["generation"] == 2
    }
    whole = {(h["driver"], h["pool"], h["device"]) for h in case.raw["held"] if not h.get("shareID")}
    taken: dict[tuple[str, str, str], dict[str, int]] = {}
    for h in case.raw["held"]:
        if h.get("shareID") and not h.get("adminAccess"):
            for name, text in h.get("consumedCapacity", {}).items():
                amounts = taken.setdefault((h["driver"], h["pool"], h["device"]), {})
                amounts[name] = amounts.get(name, 0) + parse_milli(text)
    whole -= {(h["driver"], h["pool"], h["device"]) for h in case.raw["held"] if h.get("adminAccess")}
    for claim, allocation in zip(case.raw["claims"], allocations, strict=True):
        assert 0 < len(allocation.devices.results) <= 32
        own: set[tuple[str, str, str, str]] = set()
        for r in allocation.devices.results:
            device = (r.driver, r.pool, r.device)
            shareable = published[device].get("allowMultipleAllocations", False)
            assert (r.share_id is not None) == shareable
            assert (*device, r.request) not in own, "one request has a device twice"
            own.add((*device, r.request))
            if shareable:
                for name, text in r.consumed_capacity.items():
                    amounts = taken.setdefault(device, {})
                    amounts[name] = amounts.get(name, 0) + parse_milli(text)
                    limit = published[device]["capacity"][name]["value"]
                    assert amounts[name] <= parse_milli(limit), "more capacity than there is"
            elif not r.admin_access:
                assert device not in whole, "a device twice"
                whole.add(device)
        for request in claim["spec"]["devices"]["requests"]:
            check_count(request, [r.request for r in allocation.devices.results])


def check_count(request: Json, names: list[str]) -> None:
    options = {request["name"]: request["exactly"]} if "exactly" in request else {
        f"{request['name']}/{s['name']}": s for s in request["firstAvailable"]
    }  # fmt: skip
    (used,) = {n for n in names if n in options}
    if options[used]["allocationMode"] == "ExactCount":
        assert names.count(used) == options[used]["count"]


def excused(case: Json, answer: Json) -> bool:
    """The differences that gpunode.allocate.allocator names (or the clock stopped the search)."""
    claims = json.dumps(case["claims"])
    admin_counters = '"adminAccess": true' in claims and "consumesCounters" in json.dumps(case["slices"])
    return admin_counters or answer["timedOut"] or "a claim constraint would not be satisfied" in answer["error"]


def compare(cases: Sequence[Case], judge: Judge) -> dict[str, int]:
    """Fails with the seed's case where ours and kube-scheduler's answers differ; counts what was seen."""
    counts = {"allocated": 0, "refused": 0, "selector": 0, "excused": 0}
    again: list[tuple[Case, Json]] = []
    for case, answer in zip(cases, judge([c.raw for c in cases]), strict=True):
        told = json.dumps({"case": case.raw, "upstream": answer, "ours": msgspec.to_builtins(case.ours)}, default=str)
        if isinstance(case.ours, Failure):
            if case.ours.kind is FailureKind.SELECTOR:
                # Any failing selector ends a claim here, wherever the search would have met it.
                counts["selector"] += 1
                assert answer["selector"], told
                continue
            counts["refused"] += 1
            assert answer["allocations"] is None, told
            continue
        check_choice(case, case.ours)
        if answer["allocations"] is None:
            assert excused(case.raw, answer), told
            counts["excused"] += 1
            continue
        counts["allocated"] += 1
        check_written(case.ours, answer["allocations"], told)
        again.append((case, only(case, case.ours)))
    fewer = [(case, raw) for case, raw in again if not uses_all(raw)]
    for (case, raw), answer in zip(fewer, judge([raw for _, raw in fewer]), strict=True):
        told = json.dumps({"case": raw, "upstream": answer, "ours": msgspec.to_builtins(case.ours)})
        assert answer["allocations"] is not None or excused(raw, answer), told
    return counts


def check_written(ours: tuple[Allocation, ...], theirs: list[Json], told: str) -> None:
    """All that is written beside the choice of devices, where both chose the same alternatives.

    The first request gets the first alternative with which all the others find devices too; those of later requests
    depend on the devices chosen before.
    """
    assert ours[0].devices.results[0].request == theirs[0]["devices"]["results"][0]["request"], told
    for mine, raw in zip(ours, theirs, strict=True):
        upstream = msgspec.convert(raw, Allocation)
        if [r.request for r in mine.devices.results] != [r.request for r in upstream.devices.results]:
            continue
        assert mine.devices.config == upstream.devices.config, told
        for a, b in zip(mine.devices.results, upstream.devices.results, strict=True):
            assert (a.tolerations, a.admin_access) == (b.tolerations, b.admin_access), told
            if (a.driver, a.pool, a.device) == (b.driver, b.pool, b.device):
                amounts = [{n: parse_milli(q) for n, q in r.consumed_capacity.items()} for r in (a, b)]
                assert amounts[0] == amounts[1], told


def test_ours_allocates_exactly_where_kube_scheduler_does(judge: Judge) -> None:
    counts = compare([make_case(seed) for seed in range(2000)], judge)
    assert min(counts[kind] for kind in ("allocated", "refused", "selector")) > 10, counts


@pytest.mark.soak
def test_ours_allocates_exactly_where_kube_scheduler_does_at_length(
    judge: Judge, record_property: Callable[[str, object], None]
) -> None:
    first = int(os.environ.get("GPUNODE_SEED", "1")) * 1_000_000
    for start in range(first, first + 60_000, 5_000):
        counts = compare([make_case(seed) for seed in range(start, start + 5_000)], judge)
        for kind, count in counts.items():
            record_property(kind, count)
