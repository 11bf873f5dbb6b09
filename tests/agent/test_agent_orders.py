"""Fault orders: what is refused, what is done, and scenarios that are played."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent_ward import until

from gpunode.agent.faults import FaultOrders
from gpunode.agent.machine import Machine, open_machine
from gpunode.agent.options import AgentOptions
from gpunode.agent.orders import new_order
from gpunode.hardware.board import load_board
from gpunode.hardware.fake import FakeMachine
from gpunode.hardware.fake.state import FakeState
from gpunode.health.scenario import load_scenario
from gpunode.kube.events import ObjectRef
from gpunode.kube.kinds import ConfigMap
from gpunode.model.faults import MAX_SCENARIO, FaultOrder, encode_orders, parse_orders
from gpunode.model.kmsg import parse_record
from gpunode.model.meta import ObjectMeta

GPU = "gpu-0000-07-00-0"
NODE = ObjectRef("v1", "Node", "node-1")


def scenario(*steps: str) -> str:
    lines = "".join(f"  - {{{step}}}\n" for step in steps)
    return f"name: test\ndescription: A test.\nsteps:\n{lines}"


def options(tmp_path: Path) -> AgentOptions:
    return AgentOptions(
        node="node-1",
        kubeconfig=None,
        driver="gpu.gpunode.dev",
        instance="",
        board=load_board("dgx-a100-80"),
        fake_root=tmp_path / "fake",
        kubelet_dir=tmp_path,
        cdi_dir=tmp_path,
        state_dir=tmp_path,
        metrics_port=0,
    )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return open_machine(options(tmp_path))


def lines(machine: Machine) -> list[str]:
    records = [parse_record(line) for line in machine.roots.kmsg.read_text().splitlines()]
    return [record.text for record in records if record]


async def carry_out(machine: Machine, order: FaultOrder) -> int:
    """To the end; how often a look was asked for."""
    looks: list[int] = []
    assert machine.execute is not None
    rest = await machine.execute(order, lambda: looks.append(1))
    if rest is not None:
        await rest
    return len(looks)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "not a JSON list"),
        ('[{"id": "a", "device": "g"}]', "give one of xid, recover and scenario"),
        ('[{"id": "a", "device": "g", "xid": 79, "recover": true}]', "give one of"),
        ('[{"id": "a", "device": "g", "scenario": "x", "recover": true}]', "give one of"),
        ('[{"id": "a", "xid": 79}]', "give a device"),
        ('[{"id": "a", "recover": true}]', "give a device"),
        ('[{"id": "A b", "device": "g", "xid": 79}]', "is not 1 to 64"),
        ('[{"id": "a", "device": "g", "xid": 1000}]', "is not between 1 and 999"),
        ('[{"id": "a", "device": "g", "xid": 79, "more": 1}]', "unknown field"),
        (msgspec.json.encode([{"id": "a", "scenario": "x" * (MAX_SCENARIO + 1)}]).decode(), "longer than"),
        (" " * 300_000, "longer than"),
    ],
)
def test_orders_that_are_refused(text: str, problem: str) -> None:
    orders, problems = parse_orders(text)
    assert orders == []
    assert problem in problems[0]


def test_a_bad_order_does_not_cost_the_others() -> None:
    orders, problems = parse_orders('[{"id": "a", "device": "g", "xid": 79}, 3, {"id": "b", "scenario": "x"}]')
    assert [order.id for order in orders] == ["a", "b"]
    assert len(problems) == 1


def test_the_newest_orders_that_fit_are_kept() -> None:
    orders = [FaultOrder(id=f"o{n}", scenario="x" * 20_000) for n in range(10)]
    kept, problems = parse_orders(encode_orders(orders))
    assert [order.id for order in kept] == ["o7", "o8", "o9"]
    assert problems == []
    many = [FaultOrder(id=f"o{n}", device="g", xid=79) for n in range(100)]
    assert [order.id for order in parse_orders(encode_orders(many))[0]] == [f"o{n}" for n in range(36, 100)]


async def test_an_xid_and_a_recovery(machine: Machine) -> None:
    assert await carry_out(machine, new_order(GPU, xid=79)) == 1
    assert any("Xid (PCI:0000:07:00): 79" in line for line in lines(machine))
    await carry_out(machine, new_order(GPU, recover=True))
    assert "GPU reset executed" in lines(machine)[-1]


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (new_order("gpu-none", xid=79), "no GPU 'gpu-none'"),
        (new_order(scenario="steps: ["), "not YAML"),
        (new_order(scenario=scenario("at: 0, do: burn, gpu: 0")), "burn"),
        (new_order(scenario=scenario("at: 0, do: lost, gpu: 8")), "GPU 8, the machine has 8"),
    ],
)
async def test_impossible_orders_say_what_is_wrong(machine: Machine, order: FaultOrder, words: str) -> None:
    with pytest.raises((LookupError, ValueError), match=words):
        await carry_out(machine, order)


async def test_a_scenario_is_played_in_order_and_at_its_times(machine: Machine) -> None:
    text = scenario(
        "at: 0.3, do: xid, gpu: 1, code: 31",
        "at: 0, do: storm, gpu: 0, code: 45, count: 2000, seconds: 0.2",
        "at: 0.1, do: off-the-bus, gpu: 2",
        "at: 0.3, do: link-down, gpu: 3, links: [1]",
    )
    began = asyncio.get_running_loop().time()
    assert await carry_out(machine, new_order(scenario=text)) >= 1
    assert asyncio.get_running_loop().time() - began >= 0.29
    codes = [line.split("): ")[1].split(",")[0] for line in lines(machine) if "Xid" in line]
    assert codes.count("45") == 2000
    assert 0 < codes.index("79") < len(codes) - 2
    assert codes[-1] == "31"


LONG = (
    "at: 0, do: xid, gpu: 0, code: 13",
    "at: 0.5, do: xid, gpu: 1, code: 31",
    "at: 0.5, do: storm, gpu: 1, code: 45, count: 30, seconds: 0.3",
    "at: 0.6, do: off-the-bus, gpu: 2",
    "at: 4, do: xid, gpu: 3, code: 43",
)


def codes(machine: Machine) -> list[int]:
    return [int(line.split("): ")[1].split(",")[0]) for line in lines(machine) if "Xid" in line]


async def cut_short(machine: Machine, after: float) -> None:
    """An agent that plays LONG from an order on and ends so many seconds later."""
    assert machine.execute is not None
    rest = await machine.execute(new_order(scenario=scenario(*LONG)), lambda: None)
    assert rest is not None
    task = asyncio.create_task(rest)
    await asyncio.sleep(after)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def resume(machine: Machine) -> int:
    """What the next agent does; how many scenarios went on."""
    rest = machine.resume(lambda: None)
    await asyncio.gather(*rest)
    return len(rest)


async def test_a_scenario_goes_on_after_a_restart_with_what_was_missed_and_what_is_to_come(tmp_path: Path) -> None:
    clock = asyncio.get_running_loop().time
    began = clock()
    first = open_machine(options(tmp_path))
    await cut_short(first, 0.2)
    assert codes(first) == [13]
    await asyncio.sleep(0.9)
    second = open_machine(options(tmp_path))
    task = asyncio.create_task(resume(second))
    while len(codes(second)) < 33 and clock() - began < 4:
        await asyncio.sleep(0.01)
    missed = codes(second)
    assert clock() - began < 3.9 and 43 not in missed, "what was missed happens at once"
    assert await task == 1
    assert clock() - began >= 3.99, "what is to come happens at its time"
    assert codes(second) == [*missed, 43]
    assert (missed[:2], missed.count(45), missed.count(79)) == ([13, 31], 30, 1)
    assert missed.index(79) > missed.index(45)
    assert await resume(open_machine(options(tmp_path))) == 0, "it is over"


async def test_a_restart_in_the_middle_of_a_storm_loses_and_doubles_nothing(tmp_path: Path) -> None:
    await cut_short(open_machine(options(tmp_path)), 0.65)
    for _ in range(3):
        machine = open_machine(options(tmp_path))
        task = asyncio.create_task(resume(machine))
        await asyncio.sleep(0.04)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    machine = open_machine(options(tmp_path))
    assert await resume(machine) == 1
    assert sorted(codes(machine)) == sorted([13, 31, *[45] * 30, 79, 43])


async def test_a_reboot_ends_a_scenario(tmp_path: Path) -> None:
    await cut_short(open_machine(options(tmp_path)), 0.2)
    FakeMachine.create(load_board("dgx-a100-80"), "node-1", tmp_path / "fake", boot_id="another")
    machine = open_machine(options(tmp_path))
    assert await resume(machine) == 0
    assert codes(machine) == []


async def test_a_scenario_that_is_not_understood_any_more_is_dropped(tmp_path: Path) -> None:
    fake = FakeMachine.create(load_board("dgx-a100-80"), "node-1", tmp_path / "fake")
    fake.begin("old", scenario("at: 0, do: what-was-once-possible"))
    assert await resume(open_machine(options(tmp_path))) == 0
    assert open_machine(options(tmp_path)).resume(lambda: None) == []


async def test_a_full_disk_neither_begins_a_scenario_nor_ends_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused for want of room does not begin with the next agent."""
    first = open_machine(options(tmp_path))
    assert first.execute is not None

    def full(_state: FakeState) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(FakeState, "save", full)
        with pytest.raises(OSError, match="No space"):
            await first.execute(new_order(scenario=scenario(*LONG)), lambda: None)
    await first.execute(new_order(device="0", xid=43), lambda: None)  # saves
    assert await resume(open_machine(options(tmp_path))) == 0

    fake = FakeMachine.create(load_board("dgx-a100-80"), "node-1", tmp_path / "fake")
    fake.begin("old", scenario("at: 0, do: what-was-once-possible"))
    last = open_machine(options(tmp_path))
    monkeypatch.setattr(FakeState, "save", full)
    assert await resume(last) == 0


def test_real_hardware_has_nothing_to_go_on_with(machine: Machine) -> None:
    assert Machine(machine.nvml, machine.roots).resume(lambda: None) == ()


@pytest.mark.parametrize("name", ["link-down", "remap-failed", "lost-silently", "mig-partition", "fabric-degraded"])
async def test_scenarios_travel_as_orders(machine: Machine, name: str) -> None:
    """As `gpunode faults play` sends them."""
    order = new_order(scenario=msgspec.json.encode(load_scenario(name)).decode())
    (decoded,), problems = parse_orders(encode_orders([order]))
    assert problems == []
    await carry_out(machine, decoded)


class FakeRecorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    async def emit(self, _about: object, reason: str, note: str, *_: object) -> None:
        self.events.append((reason, note))


class FakeApi:
    """Serves one ConfigMap, once."""

    def __init__(self, text: str) -> None:
        self._config = ConfigMap(metadata=ObjectMeta(name="gpunode-faults"), data={"node-1": text})

    async def list(self, *_: object) -> tuple[list[ConfigMap], str]:
        return [self._config], "1"

    async def watch(self, *_: object) -> AsyncIterator[Any]:
        await asyncio.sleep(3600)
        yield None


async def obey(text: str, done: Path, execute: Callable[[FaultOrder], Any], events: int) -> list[tuple[str, str]]:
    """Follow the ConfigMap until so many Events were written."""
    recorder = FakeRecorder()
    orders = FaultOrders(FakeApi(text), recorder, NODE, done, execute)  # type: ignore[arg-type]
    task = asyncio.create_task(orders.run())
    try:
        await until(lambda: len(recorder.events) >= events)
        await asyncio.sleep(0.05)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return recorder.events


async def test_each_order_is_carried_out_once_over_restarts(tmp_path: Path) -> None:
    text = encode_orders([FaultOrder(id="a", device="g", xid=79), FaultOrder(id="b", device="g", recover=True)])
    carried: list[str] = []

    async def execute(order: FaultOrder) -> None:
        carried.append(order.id)

    events = await obey(text, tmp_path / "done", execute, 2)
    assert [note for _, note in events] == ["order a: xid 79 on g", "order b: recovery on g"]
    orders = [*parse_orders(text)[0], FaultOrder(id="c", device="g", xid=31)]
    await obey(encode_orders(orders), tmp_path / "done", execute, 1)
    assert carried == ["a", "b", "c"]


async def test_an_order_for_a_scenario_is_taken_once_and_played_to_its_end_over_restarts(tmp_path: Path) -> None:
    """The parts of two agents one after the other: orders and machine."""
    order = new_order(scenario=scenario("at: 0, do: xid, gpu: 0, code: 13", "at: 1.5, do: xid, gpu: 1, code: 43"))
    text = encode_orders([order])

    async def follow(machine: Machine, events: int) -> None:
        async def execute(given: FaultOrder) -> Any:
            assert machine.execute is not None
            return await machine.execute(given, lambda: None)

        await obey(text, tmp_path / "done", execute, events)

    first = open_machine(options(tmp_path))
    await follow(first, 1)
    assert codes(first) == [13]
    second = open_machine(options(tmp_path))
    rest = [asyncio.create_task(one) for one in second.resume(lambda: None)]
    await follow(second, 0)
    await asyncio.gather(*rest)
    assert codes(second) == [13, 43]


async def test_what_goes_wrong_is_an_event_and_the_next_order_counts(tmp_path: Path) -> None:
    async def execute(order: FaultOrder) -> None:
        if order.id != "good":
            raise {"lookup": LookupError, "value": ValueError, "disk": OSError}[order.id](f"no {order.id}")

    text = encode_orders([FaultOrder(id=i, device="g", xid=1) for i in ("lookup", "value", "disk", "good")])
    events = await obey(text[:-1] + ', {"id": 3}]', tmp_path / "done", execute, 5)
    assert sorted(reason for reason, _ in events) == ["FaultInjected"] + ["FaultOrderRefused"] * 4


async def test_a_disk_that_is_full_refuses_orders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def execute(order: FaultOrder) -> None:
        raise AssertionError("not remembered, so not to be done")

    events = await obey(encode_orders([FaultOrder(id="a", device="g", xid=1)]), tmp_path / "file" / "x", execute, 1)
    assert [reason for reason, _ in events] == ["FaultOrderRefused"]


async def test_a_scenario_does_not_hold_up_the_next_order(tmp_path: Path) -> None:
    played: list[str] = []

    async def play() -> None:
        await asyncio.sleep(3600)

    async def execute(order: FaultOrder) -> Any:
        played.append(order.id)
        return play() if order.scenario else None

    orders = [FaultOrder(id="long", scenario="x"), FaultOrder(id="next", device="g", xid=1)]
    await obey(encode_orders(orders), tmp_path / "done", execute, 2)
    assert played == ["long", "next"]
