"""MIG, static and dynamic, and sharing: on every board, within every limit, and never more than the GPU has."""

import random
from collections import Counter
from ctypes import byref
from dataclasses import replace
from pathlib import Path

import msgspec
import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunode.hardware.board import board_names, load_board
from gpunode.hardware.discover import discover
from gpunode.hardware.fake import FakeMachine
from gpunode.model.hardware import Gpu, Inventory, MigProfile, PciAddress, device_name
from gpunode.model.health import Action, DeviceHealth, Dimension, Finding, Level, NodeHealth
from gpunode.model.quantity import parse
from gpunode.model.resource import Device, ResourceSlice
from gpunode.slices.changes import changes
from gpunode.slices.describe import nvlink_domains
from gpunode.slices.linter import lint
from gpunode.slices.partitions import consumption, counter_set
from gpunode.slices.planner import GpuMode, SliceConfig, plan

MIG_BOARDS = [name for name in board_names() if load_board(name).mig_profiles]
NODE = "node-3"


def config(mode: GpuMode = "dynamic") -> SliceConfig:
    return SliceConfig("gpu.gpunode.dev", NODE, mode=mode)


@pytest.fixture
def h100(tmp_path: Path) -> FakeMachine:
    machine = FakeMachine.create(load_board("hgx-h100"), NODE, tmp_path)
    machine.nvml.nvmlInit()
    return machine


def inventory_of(board: str, base: Path) -> Inventory:
    machine = FakeMachine.create(load_board(board), NODE, base)
    machine.nvml.nvmlInit()
    return discover(machine.nvml, machine.roots, NODE)


def served(slices: tuple[ResourceSlice, ...]) -> tuple[ResourceSlice, ...]:
    return tuple(msgspec.json.decode(msgspec.json.encode(s), type=ResourceSlice) for s in slices)


def devices(slices: tuple[ResourceSlice, ...]) -> dict[str, Device]:
    return {d.name: d for s in slices for d in s.spec.devices}


def make_instance(machine: FakeMachine, gpu: int, profile: str, start: int) -> None:
    """As `nvidia-smi mig -cgi ... -C` does."""
    nvml, kind = machine.nvml, machine.state.profile(profile)
    handle = nvml.nvmlDeviceGetHandleByIndex(gpu)
    nvml.nvmlDeviceSetMigMode(handle, pynvml.NVML_DEVICE_MIG_ENABLE)
    place = pynvml.c_nvmlGpuInstancePlacement_t(start, kind.size)
    instance = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, kind.id, byref(place))
    whole = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}[kind.slices]
    nvml.nvmlGpuInstanceCreateComputeInstance(instance, whole)


@pytest.mark.parametrize("mode", ["none", "static", "dynamic", "shared"])
@pytest.mark.parametrize("board", board_names())
def test_every_board_in_every_mode_is_valid_and_complete(board: str, mode: GpuMode, tmp_path: Path) -> None:
    inventory = inventory_of(board, tmp_path)
    slices = plan(inventory, NodeHealth(), config(mode))
    assert lint(slices) == ()
    assert {s.spec.pool.resource_slice_count for s in slices} == {len(slices)}
    assert len({s.metadata.name for s in slices}) == len(slices)
    divided = mode == "dynamic" and board in MIG_BOARDS
    assert len(devices(slices)) == len(inventory.gpus) * (26 if divided else 1)


def test_dynamic_devices_of_one_gpu(tmp_path: Path) -> None:
    slices = plan(inventory_of("hgx-h100", tmp_path), NodeHealth(), config())
    first = [d for d in devices(slices).values() if d.name.startswith("gpu-0000-1b-00-0")]
    kinds = Counter(d.attributes["profile"].string for d in first if d.attributes["type"].string == "mig")
    assert kinds == {
        "1g.10gb": 7, "1g.10gb+me": 7, "1g.20gb": 4, "2g.20gb": 3, "3g.40gb": 2, "4g.40gb": 1, "7g.80gb": 1
    }  # fmt: skip
    by_name = {d.name: d for d in first}
    three = by_name["gpu-0000-1b-00-0-mig-3g-40gb-4"]
    assert {n: c.value for n, c in three.consumes_counters[0].counters.items()} == {
        "memory": "40448Mi", "multiprocessors": "60", "copy-engines": "3", "decoders": "3", "jpeg-engines": "3",
        "memory-slice-4": "1", "memory-slice-5": "1", "memory-slice-6": "1", "memory-slice-7": "1",
    }  # fmt: skip
    assert "nvlinkDomain" not in three.attributes
    assert three.attributes["parentUUID"] == by_name["gpu-0000-1b-00-0"].attributes["uuid"]
    assert "uuid" not in three.attributes, "an instance that does not exist yet has none"
    (counters,) = [c for s in slices for c in s.spec.shared_counters if c.name == "gpu-0000-1b-00-0-counters"]
    assert by_name["gpu-0000-1b-00-0"].consumes_counters[0].counters == counters.counters
    ones = [d.name for d in first if d.name.startswith("gpu-0000-1b-00-0-mig-1g-10gb-") and "me" not in d.name]
    assert [n[-1] for n in ones] == ["6", "5", "4", "3", "2", "1", "0"], "the low half stays whole longest"


@pytest.mark.parametrize("board", MIG_BOARDS)
def test_any_legal_layout_takes_no_more_than_the_gpu_has(board: str, tmp_path: Path) -> None:
    gpu = inventory_of(board, tmp_path).gpus[0]
    total = {name: parse(c.value) for name, c in counter_set(gpu).counters.items()}
    choose = random.Random(board)
    for _ in range(300):
        used: Counter[str] = Counter()
        for profile, start in random_layout(gpu, choose):
            used.update({n: parse(c.value) for n, c in consumption(profile, start).items()})
        assert all(count <= total[name] for name, count in used.items()), used


def random_layout(gpu: Gpu, choose: random.Random) -> list[tuple[MigProfile, int]]:
    """Placements that do not overlap; the +me profile at most once, as the driver's instance count says."""
    free, layout, media = set(range(8)), [], False
    places = [(p, start) for p in gpu.mig_profiles for start in p.starts]
    for profile, start in choose.sample(places, len(places)):
        taken = set(range(start, start + profile.size))
        if taken <= free and not (media and profile.name.endswith("+me")):
            free -= taken
            media |= profile.name.endswith("+me")
            layout.append((profile, start))
    return layout


@pytest.mark.parametrize("board", MIG_BOARDS)
def test_the_whole_gpu_excludes_any_partition_and_overlaps_exclude_each_other(board: str, tmp_path: Path) -> None:
    gpu = inventory_of(board, tmp_path).gpus[0]
    counters = counter_set(gpu).counters
    slices = [name for name in counters if name.startswith("memory-slice-")]
    assert slices == [f"memory-slice-{n}" for n in range(8)]
    for profile in gpu.mig_profiles:
        for start in profile.starts:
            own = {n for n in consumption(profile, start) if n.startswith("memory-slice-")}
            assert own == {f"memory-slice-{n}" for n in range(start, start + profile.size)}
            assert set(consumption(profile, start)) <= set(counters)


def test_static_instances_are_what_the_administrator_made(h100: FakeMachine) -> None:
    make_instance(h100, 0, "3g.40gb", 4)
    make_instance(h100, 0, "1g.10gb", 0)
    inventory = discover(h100.nvml, h100.roots, NODE)
    found = devices(plan(inventory, NodeHealth(), config("static")))
    mine = sorted(n for n in found if n.startswith("gpu-0000-1b"))
    assert mine == ["gpu-0000-1b-00-0-mig-1g-10gb-0", "gpu-0000-1b-00-0-mig-3g-40gb-4"]
    device = found[mine[1]]
    assert device.attributes["uuid"].string == inventory.gpus[0].mig[1].uuid
    assert {n: c.value for n, c in device.capacity.items()} == {
        "memory": "40448Mi", "multiprocessors": "60", "copyEngines": "3", "decoders": "3", "jpegEngines": "3",
    }  # fmt: skip
    assert not any(n.startswith("gpu-0000-1b") for n in devices(plan(inventory, NodeHealth(), config("none"))))


def test_an_instance_cut_into_two_is_two_devices(h100: FakeMachine) -> None:
    make_instance(h100, 0, "3g.40gb", 4)
    inventory = discover(h100.nvml, h100.roots, NODE)
    first = inventory.gpus[0]
    cut = replace(first, mig=(*first.mig, replace(first.mig[0], uuid="MIG-second", compute_instance=1)))
    slices = plan(replace(inventory, gpus=(cut,)), NodeHealth(), config("static"))
    assert lint(slices) == ()
    assert {n: d.attributes["uuid"].string for n, d in devices(slices).items()} == {
        "gpu-0000-1b-00-0-mig-3g-40gb-4": first.mig[0].uuid,
        "gpu-0000-1b-00-0-mig-3g-40gb-4-ci1": "MIG-second",
    }


def test_a_partition_in_use_keeps_its_gpus_old_layout(h100: FakeMachine) -> None:
    inventory = discover(h100.nvml, h100.roots, NODE)
    before = served(plan(inventory, NodeHealth(), config("dynamic")))
    held = frozenset({"gpu-0000-1b-00-0-mig-2g-20gb-2"})
    after = plan(inventory, NodeHealth(), config("static"), before, held)
    assert lint(after) == ()
    kept = {n: d for n, d in devices(after).items() if n.startswith("gpu-0000-1b")}
    assert len(kept) == 26, "the whole GPU is not offered beside the partition without its counters"
    assert all([t.key for t in d.taints] == ["gpunode.dev/retained"] for d in kept.values())
    assert len(devices(after)) == 26 + 7
    released = plan(inventory, NodeHealth(), config("static"), served(after))
    assert sorted(devices(released)) == sorted(device_name(g.pci) for g in inventory.gpus)


def test_a_held_device_taints_what_cannot_exist_beside_it(h100: FakeMachine) -> None:
    inventory = discover(h100.nvml, h100.roots, NODE)
    gpu = device_name(inventory.gpus[0].pci)

    def tainted(held: str) -> set[str]:
        found = devices(plan(inventory, NodeHealth(), config("dynamic"), held=frozenset({held})))
        taints = {name: [(t.key, t.effect) for t in d.taints] for name, d in found.items() if d.taints}
        assert all(t == [("gpunode.dev/held", "NoSchedule")] for t in taints.values())
        return set(taints)

    overlapping = tainted(f"{gpu}-mig-2g-20gb-2")
    assert {gpu, f"{gpu}-mig-2g-20gb-2", f"{gpu}-mig-1g-10gb-3", f"{gpu}-mig-4g-40gb-0"} <= overlapping
    assert f"{gpu}-mig-1g-10gb-0" not in overlapping
    assert f"{gpu}-mig-3g-40gb-4" not in overlapping
    everything = {n for n in devices(plan(inventory, NodeHealth(), config("dynamic"))) if n.startswith(gpu)}
    assert tainted(gpu) == everything
    assert tainted(f"{gpu}-mig-9g-99gb-0") == everything, "nobody knows where it is"
    assert tainted("gpu-0000-ff-00-0") == set()


def test_domains_keep_their_name_while_a_gpu_is_divided(h100: FakeMachine) -> None:
    before = discover(h100.nvml, h100.roots, NODE)
    lowest = min(range(8), key=lambda i: before.gpus[i].uuid)
    make_instance(h100, lowest, "1g.10gb", 6)
    divided = discover(h100.nvml, h100.roots, NODE)
    assert divided.gpus[lowest].nvlink_peers == frozenset()
    assert nvlink_domains(divided) == nvlink_domains(before)
    published = served(plan(before, NodeHealth(), config()))
    todo = changes(plan(divided, NodeHealth(), config(), published), published)
    assert len(todo.update) == 1, "only migEnabled of that GPU"


def test_a_lost_gpu_with_a_partition_in_use_keeps_its_counters(h100: FakeMachine) -> None:
    inventory = discover(h100.nvml, h100.roots, NODE)
    before = served(plan(inventory, NodeHealth(), config()))
    rest = replace(inventory, gpus=inventory.gpus[1:])
    after = plan(rest, NodeHealth(), config(), before, frozenset({"gpu-0000-1b-00-0-mig-2g-20gb-2"}))
    assert lint(after) == ()
    assert len(devices(after)) == 8 * 26
    without = plan(rest, NodeHealth(), config(), before)
    assert (lint(without), len(devices(without))) == ((), 7 * 26)


def test_shared_gpu_gives_memory_by_the_gibibyte(tmp_path: Path) -> None:
    (first, *_) = devices(plan(inventory_of("l4", tmp_path), NodeHealth(), config("shared"))).values()
    policy = first.capacity["memory"].request_policy
    assert first.allow_multiple_allocations
    assert first.capacity["memory"].value == "22Gi"
    assert policy is not None
    assert (policy.default, policy.valid_range) == ("22Gi", policy.valid_range)
    assert policy.valid_range is not None
    assert (policy.valid_range.min, policy.valid_range.max, policy.valid_range.step) == ("1Gi", "22Gi", "1Gi")
    assert set(first.capacity) == {"memory"}


@pytest.mark.parametrize(("gibibytes", "shared"), [(1.5, False), (1.999, False), (2, True), (2.5, True)])
def test_a_gpu_too_small_to_share_is_given_out_whole(gibibytes: float, shared: bool, tmp_path: Path) -> None:
    inventory = inventory_of("t4", tmp_path)
    small = replace(inventory.gpus[0], memory_bytes=int(gibibytes * 2**30))
    slices = plan(replace(inventory, gpus=(small,)), NodeHealth(), config("shared"))
    assert (slices[0].spec.devices[0].allow_multiple_allocations, lint(slices)) == (shared, ())


def sick(device: str) -> NodeHealth:
    finding = Finding(Dimension.XID, Level.UNHEALTHY, "95", Action.RESET_GPU, "bad", "2026-01-01T00:00:00Z")
    return NodeHealth({device: DeviceHealth(device, (finding,))})


@pytest.mark.parametrize("device", ["gpu-0000-1b-00-0", "gpu-0000-1b-00-0-mig-1g-10gb-6"])
def test_a_fault_rewrites_one_slice(device: str, h100: FakeMachine) -> None:
    inventory = discover(h100.nvml, h100.roots, NODE)
    before = served(plan(inventory, NodeHealth(), config()))
    after = plan(inventory, sick(device), config(), before)
    todo = changes(after, before)
    assert [s.metadata.name for s in todo.update] == ["node-3-gpu.gpunode.dev-gpu-0000-1b-00-0"]
    assert (todo.create, todo.delete) == ((), ())
    hit = {name for name, d in devices(after).items() if d.taints}
    assert hit == ({device} if "mig" in device else {n for n in devices(after) if n.startswith(device)})


def test_sixteen_gpus_with_every_partition_fit_the_limits(tmp_path: Path) -> None:
    board = load_board("hgx-h100")
    more = tuple(msgspec.structs.replace(g, pci=g.pci.replace("0000:", "0001:")) for g in board.gpus)
    machine = FakeMachine.create(msgspec.structs.replace(board, name="sixteen", gpus=board.gpus + more), NODE, tmp_path)
    machine.nvml.nvmlInit()
    inventory = discover(machine.nvml, machine.roots, NODE)
    slices = plan(inventory, NodeHealth(), config())
    assert lint(slices) == ()
    assert len(devices(slices)) == 16 * 26
    assert [len(s.spec.shared_counters) for s in slices if s.spec.shared_counters] == [8, 8]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_inventory_gives_valid_slices_whatever_the_order_of_indices(data: st.DataObject) -> None:
    text = st.text(max_size=90)
    buses = data.draw(st.lists(st.integers(0, 255), max_size=20, unique=True))
    gpus = tuple(
        Gpu(
            uuid=f"GPU-{bus:08x}-0000-4000-8000-00000000000{bus % 10}",
            pci=PciAddress(data.draw(st.integers(0, 2**32 - 1)), bus, 0),
            minor=i,
            product=data.draw(text),
            memory_bytes=data.draw(st.integers(0, 2**42)),
            brand=data.draw(text),
            pcie_root=data.draw(text),
            numa_node=data.draw(st.none() | st.integers(0, 1000)),
            compute_capability=data.draw(st.none() | st.tuples(st.integers(0, 99), st.integers(0, 9))),
        )
        for i, bus in enumerate(buses)
    )
    made = Inventory(NODE, "boot", data.draw(text), data.draw(text), gpus)
    shuffled = replace(made, gpus=tuple(data.draw(st.permutations(gpus))))
    for mode in ("static", "shared"):
        slices = plan(made, NodeHealth(), config(mode))
        assert lint(slices) == ()
        assert len(devices(slices)) == len(gpus)
        assert plan(shuffled, NodeHealth(), config(mode)) == slices
