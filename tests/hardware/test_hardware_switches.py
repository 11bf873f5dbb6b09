"""Which GPU is at which port of which NVSwitch: as NVML tells it, and where it does not."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from gpunode.hardware.board import load_board
from gpunode.hardware.discover import discover
from gpunode.hardware.fake import FakeMachine
from gpunode.hardware.fake.faults import LinkDown
from gpunode.hardware.rescan import Scanner
from gpunode.health.devices import DeviceMap, device_map
from gpunode.model.hardware import Inventory, Link, PciAddress, device_name

NODE = "node-1"
SPLITS = {"dgx-a100-80": [2] * 6, "hgx-h100": [4, 5, 5, 4]}


def booted(board: str, base: Path) -> FakeMachine:
    machine = FakeMachine.create(load_board(board), NODE, base)
    machine.nvml.nvmlInit()
    return machine


def found(machine: FakeMachine) -> Inventory:
    return discover(machine.nvml, machine.roots, NODE)


def names(inventory: Inventory) -> tuple[str, ...]:
    return tuple(device_name(gpu.pci) for gpu in inventory.gpus)


@pytest.mark.parametrize(("board", "split"), SPLITS.items())
def test_every_link_names_its_switch_and_a_port_is_of_one_gpu(board: str, split: list[int], tmp_path: Path) -> None:
    inventory = found(booted(board, tmp_path))
    for gpu in inventory.gpus:
        assert sorted(Counter(link.switch for link in gpu.links).values()) == sorted(split)
    devices = device_map(inventory)
    assert len(devices.switch_ports) == 8 * sum(split)
    for gpu in inventory.gpus:
        for link in gpu.links:
            assert link.switch is not None
            assert devices.behind_switch(link.switch, link.port) == (device_name(gpu.pci),)


def test_a_fault_of_a_whole_switch_or_of_a_port_that_nobody_is_at_reaches_all_behind_it(tmp_path: Path) -> None:
    inventory = found(booted("dgx-a100-80", tmp_path))
    switch = PciAddress(0, 0xC4, 0)
    devices = device_map(inventory)
    for link in (None, 35):
        assert devices.behind_switch(switch, link) == names(inventory)
        assert devices.behind_switch(replace(switch, function=1), link) == names(inventory)


def two_groups(inventory: Inventory) -> Inventory:
    """The first four GPUs behind other switches than the last four, as on a board of two halves."""

    def elsewhere(link: Link) -> Link:
        assert link.switch is not None
        return replace(link, switch=replace(link.switch, domain=1))

    halves = [
        gpu if n < 4 else replace(gpu, links=tuple(elsewhere(link) for link in gpu.links))
        for n, gpu in enumerate(inventory.gpus)
    ]
    return replace(inventory, gpus=tuple(halves))


def test_gpus_behind_other_switches_are_not_reached(tmp_path: Path) -> None:
    inventory = two_groups(found(booted("hgx-h100", tmp_path)))
    devices = device_map(inventory)
    assert devices.behind_switch(PciAddress(0, 6, 0), None) == names(inventory)[:4]
    assert devices.behind_switch(PciAddress(1, 6, 0), None) == names(inventory)[4:]
    # A switch that no GPU of the node is known to be at could be anybody's.
    assert devices.behind_switch(PciAddress(2, 6, 0), None) == names(inventory)


def without_ports(inventory: Inventory) -> DeviceMap:
    gpus = tuple(replace(g, links=tuple(replace(k, port=None) for k in g.links)) for g in inventory.gpus)
    return device_map(replace(inventory, gpus=gpus))


def test_a_driver_without_port_numbers_leaves_the_switch(tmp_path: Path) -> None:
    machine = booted("hgx-h100", tmp_path)
    machine.state.missing_fields.add(pynvml.NVML_FI_DEV_NVLINK_REMOTE_NVLINK_ID)
    inventory = found(machine)
    assert device_map(inventory) == without_ports(inventory)
    assert device_map(inventory).switch_ports == {}
    halves = device_map(two_groups(inventory))
    assert halves.behind_switch(PciAddress(0, 6, 0), 3) == names(inventory)[:4]


def test_a_driver_that_names_no_switch_leaves_all_gpus(tmp_path: Path) -> None:
    machine = booted("hgx-h100", tmp_path)
    machine.state.missing.add("nvmlDeviceGetNvLinkRemotePciInfo")
    inventory = found(machine)
    assert {link.peer for gpu in inventory.gpus for link in gpu.links} == {"switch"}
    assert {(link.switch, link.port) for gpu in inventory.gpus for link in gpu.links} == {(None, None)}
    assert device_map(inventory).behind_switch(PciAddress(0, 6, 0), 3) == names(inventory)


def test_a_port_that_all_gpus_claim_is_not_believed(tmp_path: Path) -> None:
    inventory = found(booted("hgx-h100", tmp_path))
    same = tuple(replace(g, links=tuple(replace(k, port=0) for k in g.links)) for g in inventory.gpus)
    devices = device_map(replace(inventory, gpus=same))
    assert devices.switch_ports == {}
    assert devices.behind_switch(PciAddress(0, 6, 0), 0) == names(inventory)


class Odd:
    """A driver that answers every question about a link's end with the same odd words."""

    def __init__(self, machine: FakeMachine, address: tuple[int, int, int], kind: int, value: int) -> None:
        self._machine, self._address, self._kind, self._value = machine, address, kind, value

    def __getattr__(self, name: str) -> object:
        return getattr(self._machine.nvml, name)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: object, link: int) -> object:
        info = pynvml.nvmlPciInfo_t()
        info.domain, info.bus, info.device = self._address
        return info

    def nvmlDeviceGetFieldValues(self, handle: object, fields: list[tuple[int, int]]) -> object:
        values = (pynvml.c_nvmlFieldValue_t * len(fields))()
        for value in values:
            value.valueType, value.value.ullVal = self._kind, self._value
        return values


@pytest.mark.parametrize(
    ("address", "kind", "value", "end"),
    [
        ((0, 6, 0), pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 7, (PciAddress(0, 6, 0), 7)),
        ((0, 6, 0), pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 7, (PciAddress(0, 6, 0), 7)),
        ((0, 6, 0), pynvml.NVML_VALUE_TYPE_DOUBLE, 7, (PciAddress(0, 6, 0), None)),
        ((0, 6, 0), pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 0xFFFFFFFF, (PciAddress(0, 6, 0), None)),
        ((0, 6, 0), pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG, 2**64 - 1, (PciAddress(0, 6, 0), None)),
        ((0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 7, (None, None)),
        ((0xFFFF, 0xFF, 0xFF), pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 7, (None, None)),
        ((0, 0, 0), pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 7, (None, None)),
    ],
)
def test_only_what_can_be_an_end_is_one(
    address: tuple[int, int, int], kind: int, value: int, end: tuple[PciAddress | None, int | None], tmp_path: Path
) -> None:
    machine = booted("hgx-h100", tmp_path)
    inventory = discover(Odd(machine, address, kind, value), machine.roots, NODE)  # type: ignore[arg-type]
    assert len(inventory.gpus) == 8
    assert {(link.switch, link.port) for gpu in inventory.gpus for link in gpu.links} == {end}


def test_a_link_that_went_down_is_still_known_by_its_port(tmp_path: Path) -> None:
    machine = booted("dgx-a100-80", tmp_path)
    scanner = Scanner(machine.nvml, machine.roots, NODE)
    before = scanner.scan().inventory
    assert before is not None
    machine.inject(LinkDown(device="2", link=0), LinkDown(device="2", link=1))
    after = scanner.scan().inventory
    assert after is not None
    assert not after.gpus[2].links[0].active
    assert device_map(after).switch_ports == device_map(before).switch_ports
    assert device_map(after).behind_switch(PciAddress(0, 0xC4, 0), 4) == (names(before)[2],)


def test_a_link_that_was_down_from_the_start_may_be_at_any_switch(tmp_path: Path) -> None:
    machine = booted("dgx-a100-80", tmp_path)
    machine.inject(LinkDown(device="2", link=0), LinkDown(device="2", link=1))
    inventory = found(machine)
    assert inventory.gpus[2].links[0].switch is None
    assert device_map(inventory).behind_switch(PciAddress(0, 0xC4, 0), 4) == names(inventory)
    assert device_map(inventory).behind_switch(PciAddress(0, 0xC4, 0), 6) == (names(inventory)[3],)


@pytest.mark.parametrize("board", ["hgx-b200", "gb200-nvl72", "a100-nvlink-pairs", "l4"])
def test_boards_whose_switches_have_no_address_say_nothing_of_ports(board: str, tmp_path: Path) -> None:
    inventory = found(booted(board, tmp_path))
    assert device_map(inventory).switch_ports == {}
    assert device_map(inventory).behind_switch(PciAddress(0, 6, 0), 1) == names(inventory)
