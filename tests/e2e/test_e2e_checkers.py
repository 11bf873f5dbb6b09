"""The checkers themselves: a checker that cannot fail proves nothing."""

from msgspec import convert

from gpunode.model.core import Job, Pod
from gpunode.model.resource import ResourceClaim
from tests.e2e.checkers import DoubleAllocations, GangWatch, SuspendWatch


def claim(name: str, *devices: str, admin: bool = False) -> ResourceClaim:
    results = [
        {"request": "r", "driver": "d", "pool": "n", "device": device, **({"adminAccess": True} if admin else {})}
        for device in devices
    ]
    status = {"allocation": {"devices": {"results": results}}} if devices else {}
    return convert({"metadata": {"name": name, "namespace": "x"}, "status": status}, ResourceClaim)


def test_two_claims_on_one_device_are_a_violation() -> None:
    watch = DoubleAllocations()
    watch.on_claim("x/a", claim("a", "g0", "g1"))
    watch.on_claim("x/b", claim("b", "g1"))
    assert watch.violations == ["d/n/g1 is in x/a and x/b"]


def test_a_device_may_move_from_claim_to_claim() -> None:
    watch = DoubleAllocations()
    watch.on_claim("x/a", claim("a", "g0"))
    watch.on_claim("x/a", claim("a"))
    watch.on_claim("x/b", claim("b", "g0"))
    watch.on_claim("x/b", None)
    watch.on_claim("x/c", claim("c", "g0"))
    watch.on_claim("x/d", claim("d", "g0", admin=True))
    assert not watch.violations


def pod(name: str, node: str = "", phase: str = "Pending", ending: bool = False) -> Pod:
    metadata = {"name": name, "ownerReferences": [{"kind": "Job", "name": "train", "uid": "u"}]}
    if ending:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return convert({"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": phase}}, Pod)


def test_a_gang_that_stays_partly_placed_is_seen() -> None:
    watch = GangWatch("train", 2)
    watch.on_pod("a", pod("a"))
    assert watch.still_partial_s() == 0
    watch.on_pod("a", pod("a", "n0"))
    assert watch.still_partial_s() > 0
    watch.on_pod("b", pod("b", "n1"))
    assert watch.still_partial_s() == 0
    assert len(watch.partial_s) == 1
    watch.on_pod("a", pod("a", "n0", ending=True))
    assert watch.still_partial_s() > 0


def test_a_finished_member_keeps_its_place() -> None:
    watch = GangWatch("train", 2)
    watch.on_pod("a", pod("a", "n0", "Succeeded"))
    watch.on_pod("b", pod("b", "n1", "Running"))
    assert watch.still_partial_s() == 0


def test_suspensions_are_counted_once_each() -> None:
    watch = SuspendWatch()
    for suspended in (False, True, True, False, True):
        watch.on_job("x/j", convert({"spec": {"suspend": suspended}}, Job))
    assert watch.suspensions == {"x/j": 2}
    assert watch.suspended == {"x/j"}
