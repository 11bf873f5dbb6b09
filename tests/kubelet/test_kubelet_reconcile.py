"""The second look, the black-hole guard, metrics, leftover processes, status.devices."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kubelet_fakes import GPUS, PARTITIONS, FakeApi, Machine, claim, gpu_config, gpu_nodes, make_engine, ref, result
from prometheus_client import CollectorRegistry

from gpunode.kubelet.checkpoint import Entry, HeldDevice, State
from gpunode.kubelet.config import Interval, Mps, TimeSlicing
from gpunode.kubelet.errors import ClaimError
from gpunode.kubelet.guard import BlackHoleGuard
from gpunode.kubelet.health import DeviceReport
from gpunode.kubelet.metrics import KubeletMetrics
from gpunode.kubelet.prepare import PrepareEngine
from gpunode.kubelet.processes import OpenDevices, own_nodes
from gpunode.kubelet.reconcile import Findings, SecondLook
from gpunode.kubelet.seams import Leftover
from gpunode.kubelet.status import condition_times, device_statuses
from gpunode.model.injection import DeviceNode, DeviceNodes
from gpunode.model.resource import ResourceClaim


class FakeProcesses:
    """Processes by device UUID."""

    def __init__(self) -> None:
        self.users: dict[str, list[Leftover]] = {}

    def using(self, devices: Sequence[DeviceNodes]) -> Sequence[Leftover]:
        return [user for d in devices for user in self.users.get(d.uuid, [])]


class Node:
    """An engine, a second look at it, and a clock."""

    def __init__(self, tmp: Path, *claims: ResourceClaim) -> None:
        self.api = FakeApi(*claims)
        self.machine = Machine(tmp)
        self.registry = CollectorRegistry()
        self.metrics = KubeletMetrics(self.registry)
        self.processes = FakeProcesses()
        self.tripped: dict[str, str] = {}
        self.guard = BlackHoleGuard(self.tripped.__setitem__, self.tripped.pop)  # type: ignore[arg-type]
        self.now = 1000.0
        self.engine: PrepareEngine = make_engine(
            tmp, self.api, devices=self.machine.devices, partitioner=self.machine.partitioner,
            sharing=self.machine.sharing, notify=self.machine.notices.append, metrics=self.metrics, guard=self.guard,
            clock=lambda: self.now,
        )  # fmt: skip
        self.second_look = SecondLook(
            self.engine, self.api, self.machine.notices.append, self.processes, self.metrics, clock=lambda: self.now
        )

    async def prepare(self, *claims: ResourceClaim) -> list[Any]:
        answer = await self.engine.prepare([ref(c) for c in claims])
        return [answer[c.metadata.uid] for c in claims]

    async def look(self, after_s: float = 0) -> Findings:
        self.now += after_s
        return await self.second_look.run()

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


async def test_nothing_is_touched_while_all_is_well(tmp_path: Path) -> None:
    one = claim(1, GPUS[0], PARTITIONS[0])
    node = Node(tmp_path, one)
    await node.prepare(one)
    before = node.machine.check()
    findings = await node.look(3600)
    assert (findings.held, findings.released, findings.leftovers) == (frozenset(), (), {})
    assert node.machine.check() == before
    assert node.machine.notices == []


@pytest.mark.parametrize("how", ["deleted", "re-created", "deallocated", "allocated elsewhere"])
async def test_a_claim_that_is_gone_holds_its_device_and_is_released_after_the_grace(tmp_path: Path, how: str) -> None:
    one, two = claim(1, GPUS[0]), claim(2, GPUS[1])
    node = Node(tmp_path, one, two)
    await node.prepare(one, two)
    match how:
        case "deleted":
            node.api.claims.pop(("ns", "claim-1"))
        case "re-created":
            node.api.put(claim(7, GPUS[3], name="claim-1"))
        case "deallocated":
            node.api.put(claim(1, allocation=None))
        case _:
            node.api.put(claim(1, {**result(GPUS[0]), "pool": "node-2", "device": GPUS[5]}))
    assert (await node.look()).held == {GPUS[0]}
    assert node.metric("gpunode_kubelet_held_devices") == 1
    rival = node.api.put(claim(3, GPUS[0]))
    assert isinstance((await node.prepare(rival))[0], ClaimError)
    assert (await node.look(599)).released == ()
    findings = await node.look(2)
    assert findings.released == (one.metadata.uid,) and findings.held == frozenset()
    assert [(n.reason, n.claim) for n in node.machine.notices] == [
        ("ClaimReleased", ("ns", "claim-1", one.metadata.uid))
    ]
    assert set(node.machine.check()) == {two.metadata.uid}
    assert not isinstance((await node.prepare(rival))[0], ClaimError)


async def test_an_api_server_that_does_not_answer_releases_nothing(tmp_path: Path) -> None:
    one = claim(1, GPUS[0])
    node = Node(tmp_path, one)
    await node.prepare(one)
    node.api.fail = ConnectionError("away")
    node.processes.users = {"GPU-0": [Leftover(7, "python")]}  # the pod's own process, not a leftover
    for _ in range(3):
        findings = await node.look(3600)
        assert (findings.held, findings.released, findings.leftovers) == (frozenset(), (), {})


async def test_what_is_held_stays_so_while_the_api_server_does_not_answer(tmp_path: Path) -> None:
    one = claim(1, GPUS[0])
    node = Node(tmp_path, one)
    await node.prepare(one)
    node.api.put(claim(1, allocation=None))
    assert (await node.look()).held == {GPUS[0]}
    node.api.fail = ConnectionError("away")
    for _ in range(2):
        findings = await node.look(3600)
        assert (findings.held, findings.released) == ({GPUS[0]}, ())
    node.api.fail = None
    node.api.put(one)
    assert (await node.look()).held == frozenset()


async def test_a_claim_that_came_back_starts_its_grace_again(tmp_path: Path) -> None:
    one = claim(1, GPUS[0])
    node = Node(tmp_path, one)
    await node.prepare(one)
    gone = node.api.put(claim(1, allocation=None))
    await node.look()
    node.api.put(one)
    assert (await node.look(500)).held == frozenset()
    node.api.put(gone)
    await node.look(500)
    assert (await node.look(500)).released == ()


async def test_a_claim_the_kubelet_just_asked_for_is_not_released(tmp_path: Path) -> None:
    one = claim(1, GPUS[0])
    node = Node(tmp_path, one)
    await node.prepare(one)
    deallocated = node.api.put(claim(1, allocation=None))
    await node.look()
    node.api.put(one)
    node.now += 601
    await node.prepare(one)  # allocated again to the same device while the look has not noticed yet
    node.api.put(deallocated)
    assert (await node.look()).released == ()
    assert len(node.machine.check()) == 1


async def test_leftover_processes_are_told_and_keep_the_device(tmp_path: Path) -> None:
    one = claim(1, GPUS[0])
    node = Node(tmp_path, one)
    await node.prepare(one)
    node.api.claims.clear()
    node.processes.users = {"GPU-0": [Leftover(7, "python", "pod-a")]}
    await node.look()
    findings = await node.look(10_000)
    assert findings.released == () and findings.held == {GPUS[0]}
    assert "python (pid 7, pod pod-a)" in node.machine.notices[-1].message
    assert node.machine.notices[-1].devices == (GPUS[0],)
    node.processes.users.clear()
    assert (await node.look(1)).released == (one.metadata.uid,)


async def test_a_process_that_outlives_unprepare_is_told_before_the_device_is_given_out(tmp_path: Path) -> None:
    one = claim(1, GPUS[0])
    node = Node(tmp_path, one)
    await node.prepare(one)
    await node.look()
    node.processes.users = {"GPU-0": [Leftover(7, "python")]}
    await node.engine.unprepare([ref(one)])
    assert (await node.look()).held == {GPUS[0]}
    assert (await node.look()).held == {GPUS[0]}
    node.processes.users.clear()
    assert (await node.look()).held == frozenset()


async def test_repairs_are_counted(tmp_path: Path) -> None:
    one = claim(1, GPUS[0])
    node = Node(tmp_path, one)
    await node.prepare(one)
    next((tmp_path / "cdi").iterdir()).unlink()
    await node.look()
    assert node.metric("gpunode_kubelet_repairs_total", what="cdi-written") == 1
    node.machine.check()


async def test_three_claims_that_hardware_fails_trip_the_guard_and_one_success_clears_it(tmp_path: Path) -> None:
    claims = [claim(n, PARTITIONS[0], GPUS[0]) for n in range(1, 4)]
    node = Node(tmp_path, *claims)
    node.machine.partitioner.broken.add(PARTITIONS[0])
    for _ in range(5):  # one claim tried again and again says nothing about the device
        await node.prepare(claims[0])
    await node.engine.recover()
    assert node.tripped == {}
    await node.prepare(claims[1])
    await node.prepare(claims[2])
    assert list(node.tripped) == [PARTITIONS[0]]  # and not the healthy GPU of the same claim
    assert "Unknown Error" in node.tripped[PARTITIONS[0]]
    assert node.guard.devices == {PARTITIONS[0]}
    assert (node.metric("gpunode_kubelet_claim_failures_total", call="prepare", kind="hardware") or 0) >= 3
    node.machine.partitioner.broken.clear()
    await node.engine.recover()
    await node.prepare(claims[2])
    assert node.tripped == {} and node.guard.devices == frozenset()


async def test_refused_claims_never_trip_the_guard(tmp_path: Path) -> None:
    holder = claim(99, GPUS[0])
    held = [claim(n, GPUS[0]) for n in range(1, 10)]
    bad = [claim(n, GPUS[1], config=[gpu_config("nonsense")]) for n in range(10, 20)]
    node = Node(tmp_path, holder, *held, *bad)
    await node.prepare(holder)
    answers = await node.prepare(*held, *bad)
    assert all(isinstance(a, ClaimError) for a in answers)
    assert node.tripped == {}


async def test_metrics_count_calls_and_what_the_node_holds(tmp_path: Path) -> None:
    one = claim(1, GPUS[0], GPUS[1])
    node = Node(tmp_path, one)
    await node.prepare(one)
    await node.prepare(claim(2, GPUS[0]))
    await node.engine.unprepare([ref(claim(5))])
    assert node.metric("gpunode_kubelet_call_seconds_count", call="prepare") == 2
    assert node.metric("gpunode_kubelet_call_seconds_count", call="unprepare") == 1
    assert node.metric("gpunode_kubelet_claim_failures_total", call="prepare", kind="not-found") == 1
    assert node.metric("gpunode_kubelet_prepared_claims") == 1
    assert node.metric("gpunode_kubelet_prepared_devices") == 2


def test_an_open_device_is_found_by_number_with_its_process(tmp_path: Path) -> None:
    """/dev/full stands in for a GPU; the child opens it under another name, as a container would."""
    alias = tmp_path / "renamed"
    alias.symlink_to("/dev/full")
    device = DeviceNodes(uuid="GPU-0", nodes=(DeviceNode("/dev/full", "/dev/nvidia0"),))
    script = "import sys; f = open(sys.argv[1], 'wb'); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(alias)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin and child.stdout
    with child:
        child.stdout.readline()
        users = {u.pid: u for u in OpenDevices().using([device])}
        assert users[child.pid].command.startswith("python")
        child.stdin.close()
    assert child.pid not in {u.pid for u in OpenDevices().using([device])}
    assert OpenDevices().using([DeviceNodes(uuid="x", nodes=(DeviceNode("/no/such", "/dev/nvidia0"),))]) == []


def test_the_pod_of_a_process_is_read_from_its_cgroup(tmp_path: Path) -> None:
    proc = tmp_path / str(os.getppid())
    (proc / "fd").mkdir(parents=True)
    (proc / "fd" / "3").symlink_to("/dev/full")
    (proc / "cgroup").write_text(
        "0::/kubepods.slice/kubepods-pod3f2a9c1e_77b0_4000_8000_000000000001.slice/cri-containerd-x.scope\n"
    )
    device = DeviceNodes(uuid="GPU-0", nodes=(DeviceNode("/dev/full", "/dev/nvidia0"),))
    (user,) = OpenDevices(tmp_path).using([device])
    assert (user.pid, user.pod_uid) == (os.getppid(), "3f2a9c1e-77b0-4000-8000-000000000001")


def test_a_partition_is_not_blamed_for_its_gpus_users() -> None:
    nodes = (DeviceNode("/dev/nvidia0", "/dev/nvidia0"), DeviceNode("/dev/nvidia-caps/nvidia-cap12", "/dev/x"))
    assert own_nodes(DeviceNodes(uuid="MIG", parent="gpu-0", nodes=nodes)) == ["/dev/nvidia-caps/nvidia-cap12"]
    assert own_nodes(DeviceNodes(uuid="GPU", nodes=nodes[:1])) == ["/dev/nvidia0"]


def test_status_devices_say_how_a_device_is_shared() -> None:
    def phrase(sharing: TimeSlicing | Mps | None, **more: Any) -> str:
        held = HeldDevice(GPUS[0], "node-1", ("r",), gpu_nodes(0), sharing=sharing, **more)
        entry = Entry("u", "ns", "c", "b", State.STARTED, (held,))
        (status,) = device_statuses(entry, "gpu.gpunode.dev", {}, "2026-01-01T00:00:00Z")
        assert [(c["type"], c["status"]) for c in status["conditions"]] == [("Prepared", "False")]
        assert status["data"].get("adminAccess", False) == more.get("admin", False)
        return str(status["data"].get("sharing", ""))

    assert phrase(None) == phrase(None, admin=True) == ""
    assert phrase(TimeSlicing(Interval.LONG)) == "time slicing, interval Long"
    assert phrase(Mps(25, 1024)) == "MPS, each process at most 25 % of threads and 1024 bytes of memory"
    assert phrase(Mps(25, 1024), share_id="s") == phrase(Mps(25, 1024))
    assert phrase(Mps(), share_id="s").startswith("MPS; share is accounting only")
    assert phrase(Mps(25), share_id="s").startswith("MPS, each process at most 25 % of threads; share is accounting")
    assert phrase(TimeSlicing(), share_id="s").startswith("time slicing, interval Default; share is accounting only")


async def test_a_second_look_that_cannot_rebuild_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def away() -> list[ResourceClaim]:
        raise ConnectionError("API server away")

    machine = Machine(tmp_path)
    machine.paths.checkpoint("gpu.gpunode.dev").write_bytes(b"broken")
    api = FakeApi()
    engine = make_engine(tmp_path, api, allocated=away, notify=machine.notices.append)
    findings = await SecondLook(engine, api, machine.notices.append).run()
    assert findings.repairs.lost and "API server away" in caplog.text
    assert (await SecondLook(engine, api, machine.notices.append).run()).repairs.lost


async def test_status_devices_say_what_a_person_wants_to_know(tmp_path: Path) -> None:
    share = "0f0f0f0f-0001-4000-8000-000000000000"
    one = claim(1, GPUS[0], result(GPUS[1], shareID=share, consumedCapacity={"memory": "10Gi"}))
    node = Node(tmp_path, one)
    await node.prepare(one)
    entry: Entry = node.machine.check()[one.metadata.uid]
    health = {GPUS[0]: DeviceReport(False, "XID 79"), GPUS[1]: DeviceReport(True)}
    first, second = device_statuses(entry, "gpu.gpunode.dev", health, "2026-01-01T00:00:00Z")
    assert (first["driver"], first["pool"], first["device"]) == ("gpu.gpunode.dev", "node-1", GPUS[0])
    assert "shareID" not in first and second["shareID"] == share
    assert [(c["type"], c["status"], c["reason"]) for c in first["conditions"]] == [
        ("Prepared", "True", "Prepared"),
        ("Healthy", "False", "Unhealthy"),
    ]
    assert first["data"] == {"uuid": "GPU-0", "pciBusID": "0000:00:00.0", "deviceNodes": ["/dev/nvidia0"]}
    assert second["data"]["consumedCapacity"] == {"memory": "10Gi"}
    assert "accounting only" in second["data"]["sharing"]
    health[GPUS[0]] = DeviceReport(True)
    again = device_statuses(entry, "gpu.gpunode.dev", health, "2026-01-02T00:00:00Z", condition_times([first, second]))
    times = {c["type"]: c["lastTransitionTime"] for c in again[0]["conditions"]}
    assert times == {"Prepared": "2026-01-01T00:00:00Z", "Healthy": "2026-01-02T00:00:00Z"}
