"""Processes that have a GPU open which no claim holds: when they count, and that they are told and forgotten."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from agent_ward import Heard, running, until

from gpunode.agent.inventory import HardwareWatch
from gpunode.agent.leftovers import HOST_DAEMONS, LeftoverWatch
from gpunode.hardware.board import load_board
from gpunode.hardware.discover import discover
from gpunode.hardware.fake import FakeMachine
from gpunode.hardware.fake.faults import Lost
from gpunode.hardware.rescan import Scanner
from gpunode.hardware.sample import sample_all
from gpunode.health.devices import device_map
from gpunode.health.policy import Policy
from gpunode.kubelet.checkpoint import Entries, Entry, HeldDevice, State
from gpunode.kubelet.processes import OpenDevices
from gpunode.kubelet.seams import Leftover
from gpunode.model.injection import DeviceNodes

NAMES = ["gpu-0000-07-00-0", "gpu-0000-0f-00-0"]


def claim(*devices: str) -> Entries:
    held = tuple(HeldDevice(name, "node-1", ("r",), DeviceNodes(uuid="u")) for name in devices)
    return {"u": Entry("u", "ns", "c", "boot", State.STARTED, held)}


class Seam:
    """The seam calls `users` what a Node calls a look."""

    def __init__(self, node: "Node") -> None:
        self._node = node

    def users(self, devices: Mapping[str, DeviceNodes]) -> Mapping[str, Sequence[Leftover]]:
        return self._node.look(devices)


@dataclass
class Node:
    """A fake machine, what claims hold on it, and who has its GPUs open (by GPU index)."""

    machine: FakeMachine
    claims: Entries = field(default_factory=dict)
    users: dict[int, list[Leftover]] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    broken: bool = False
    meanwhile: Entries | None = None

    def __post_init__(self) -> None:
        self.inventory = discover(self.machine.nvml, self.machine.roots, "node-1")
        self.watch = LeftoverWatch(Seam(self), self.entries, lambda: self.inventory, self.machine.roots)

    async def entries(self) -> Entries:
        if self.broken:
            raise TimeoutError("the lock is held")
        return self.claims

    def using(self) -> Iterator[tuple[str, list[Leftover]]]:
        for index, users in self.users.items():
            yield self.inventory.gpus[index].uuid, users

    def look(self, devices: Mapping[str, DeviceNodes]) -> Mapping[str, Sequence[Leftover]]:
        self.asked = [index for index, gpu in enumerate(self.inventory.gpus) if gpu.uuid in devices]
        if self.meanwhile is not None:
            self.claims = self.meanwhile
        return {uuid: users for uuid, users in self.using() if uuid in devices}

    async def found(self, looks: int = 2) -> list[tuple[int, ...] | None]:
        """After so many looks, of the first two GPUs."""
        for _ in range(looks):
            await self.watch.look()
        samples = self.watch.mark(sample_all(self.machine.nvml, self.inventory))
        return [one.leftover_pids for one in samples[:2]]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    machine = FakeMachine.create(load_board("dgx-a100-80"), "node-1", tmp_path / "fake")
    machine.nvml.nvmlInit()
    return Node(machine)


async def test_a_process_counts_from_its_second_look_on_and_once(node: Node) -> None:
    node.users = {0: [Leftover(7, "python"), Leftover(5, "python")]}
    assert await node.found(1) == [(), ()]
    node.users[0].append(Leftover(9, "newcomer"))
    assert await node.found(1) == [(5, 7), ()]
    assert await node.found(0) == [None, None], "nobody has looked since"
    node.users = {}
    assert await node.found(1) == [(), ()]


@pytest.mark.parametrize("held", [NAMES[0], f"{NAMES[0]}-mig-1g-10gb-0"])
async def test_a_gpu_that_a_claim_holds_whole_or_in_part_is_not_looked_at(node: Node, held: str) -> None:
    node.claims = claim(held)
    node.users = {0: [Leftover(7, "python")], 1: [Leftover(8, "python")]}
    assert await node.found() == [None, (8,)]
    assert 0 not in node.asked


async def test_a_claim_that_comes_or_goes_during_the_look_is_no_leftover(node: Node) -> None:
    node.users = {0: [Leftover(7, "python")]}
    assert await node.found(1) == [(), ()]
    node.meanwhile = claim(NAMES[0])
    assert await node.found(1) == [None, ()], "prepared while we looked"
    node.meanwhile = {}
    assert await node.found(1) == [None, ()], "released while we looked"
    assert await node.found(1) == [(), ()], "its last look was another claim's time"
    assert await node.found(1) == [(7,), ()]


@pytest.mark.parametrize("name", [*HOST_DAEMONS, "nvidia-persiste", "nvidia-cuda-mps"])
async def test_the_hosts_own_daemons_do_not_count(node: Node, name: str) -> None:
    node.users = {0: [Leftover(7, name), Leftover(8, "gpunode-train"), Leftover(9, "?")]}
    assert await node.found() == [(8, 9), ()]


def test_the_daemons_are_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "health.md").read_text()
    assert [name for name in HOST_DAEMONS if f"`{name}`" not in text] == []


async def test_who_cannot_know_what_is_held_says_nothing(node: Node) -> None:
    node.users = {0: [Leftover(7, "python")]}
    assert await node.found() == [(7,), ()]
    node.broken = True
    assert await node.found() == [None, None]


async def test_a_gpu_that_does_not_answer_has_no_leftovers(node: Node) -> None:
    node.users = {0: [Leftover(7, "python")], 1: [Leftover(8, "python")]}
    await node.found(1)
    node.machine.inject(Lost(device="0"))
    assert await node.found(1) == [None, (8,)]


@contextmanager
def holding(path: Path) -> Iterator[int]:
    """A process that has a device open; its pid."""
    script = "import sys; f = open(sys.argv[1], 'wb'); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.communicate()


async def test_a_leftover_is_told_with_its_pid_and_so_is_its_end(node: Node, tmp_path: Path) -> None:
    """Real processes on a real device; /dev/full stands in for the first GPU's node."""
    stand_in = node.machine.roots.dev / "nvidia0"
    stand_in.unlink()
    stand_in.symlink_to("/dev/full")
    heard = Heard()
    scanner = Scanner(node.machine.nvml, node.machine.roots, "node-1")
    leftovers = LeftoverWatch(OpenDevices(), node.entries, lambda: node.inventory, node.machine.roots, every_s=0.05)
    async with running(tmp_path / "h.json", heard, Policy(), device_map(node.inventory), "boot") as monitor:
        nvml, inventory = node.machine.nvml, node.inventory
        watch = HardwareWatch(scanner, nvml, inventory, monitor, lambda _: None, leftovers.mark)

        async def poll() -> None:
            while True:
                watch.wake()
                await asyncio.sleep(0.05)

        tasks = [asyncio.create_task(work) for work in (watch.run(), leftovers.run(), poll())]
        with holding(stand_in) as pid:
            await until(lambda: bool(heard.transitions))
        await until(lambda: len(heard.transitions) == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert heard.changes(NAMES[0]) == [("leftover-processes", "noted"), ("leftover-processes", "cleared")]
    assert f"pid {pid}" in heard.transitions[0].message
    assert monitor.state.devices[NAMES[0]].notes == {}
    assert [t.change for t in monitor.state.history] == ["noted", "cleared"]
