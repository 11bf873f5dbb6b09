"""NVLink domains over many nodes, and names that do not depend on how NVML counts."""

import itertools
from pathlib import Path

import msgspec
import pytest

from gpunode.hardware.board import Board, board_names, load_board
from gpunode.hardware.discover import discover
from gpunode.hardware.fake import FakeMachine
from gpunode.hardware.fake.faults import FabricChange
from gpunode.model.hardware import Inventory
from gpunode.model.health import NodeHealth
from gpunode.slices.describe import nearest_nics, nvlink_domains
from gpunode.slices.planner import SliceConfig, plan


def inventory_of(board: Board, node: str, base: Path) -> Inventory:
    machine = FakeMachine.create(board, node, base / node)
    machine.nvml.nvmlInit()
    return discover(machine.nvml, machine.roots, node)


def domains_of(board: str, nodes: int, base: Path) -> list[set[str]]:
    loaded = load_board(board)
    return [set(nvlink_domains(inventory_of(loaded, f"node-{i}", base)).values()) for i in range(nodes)]


def test_eighteen_trays_are_one_domain_and_a_rack_in_two_cliques_is_two(tmp_path: Path) -> None:
    (rack,) = set.union(*domains_of("gb200-nvl72", 18, tmp_path / "one"))
    assert rack == "6a2f1c3e-58b7-4d0e-9f41-7c8d2b90a511.4026"
    halves = domains_of("gb200-nvl72-2-cliques", 18, tmp_path / "two")
    assert halves[:9] == [{rack}] * 9
    assert halves[9:] == [{rack.replace(".4026", ".4027")}] * 9


@pytest.mark.parametrize("board", [name for name in board_names() if not name.startswith("gb200")])
def test_two_nodes_never_share_a_domain_unless_the_fabric_says_so(board: str, tmp_path: Path) -> None:
    found = domains_of(board, 4, tmp_path)
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(found, 2))


@pytest.mark.parametrize(
    ("board", "sizes"),
    [
        ("dgx-a100-80", [8]),
        ("b200-dead-nvlink", [1, 7]),
        ("a100-nvlink-pairs", [2, 2]),
        ("l40s", [1, 1, 1, 1]),
        ("hgx-h200", [8]),
    ],
)
def test_domains_within_a_node_follow_its_links(board: str, sizes: list[int], tmp_path: Path) -> None:
    domains = list(nvlink_domains(inventory_of(load_board(board), "n", tmp_path)).values())
    assert sorted(domains.count(d) for d in set(domains)) == sizes


def test_a_gpu_joins_its_domain_when_the_fabric_is_up(tmp_path: Path) -> None:
    machine = FakeMachine.create(load_board("gb200-nvl72"), "node-3", tmp_path)
    machine.nvml.nvmlInit()
    machine.inject(FabricChange(device="0", state=2))
    inventory = discover(machine.nvml, machine.roots, "node-3")
    config = SliceConfig("gpu.gpunode.dev", "node-3")
    first, second, *_ = plan(inventory, NodeHealth(), config)[0].spec.devices
    assert (first.attributes["fabricState"].string, "nvlinkDomain" in first.attributes) == ("inProgress", False)
    machine.inject(FabricChange(device="0", state=3))
    first, second, *_ = plan(discover(machine.nvml, machine.roots, "node-3"), NodeHealth(), config)[0].spec.devices
    assert first.attributes["nvlinkDomain"] == second.attributes["nvlinkDomain"]


def test_device_names_are_the_same_in_any_order_of_nvml_indices(tmp_path: Path) -> None:
    board = load_board("hgx-h100")
    config = SliceConfig("gpu.gpunode.dev", "n", mode="dynamic")
    turned = msgspec.structs.replace(board, gpus=board.gpus[3:] + board.gpus[:3])
    found = [
        [d.name for s in plan(inventory_of(b, "n", tmp_path / str(i)), NodeHealth(), config) for d in s.spec.devices]
        for i, b in enumerate((board, turned))
    ]
    assert found[0] == found[1]
    assert len(set(found[0])) == len(found[0])


def test_each_gpu_has_its_near_nic(tmp_path: Path) -> None:
    h100 = inventory_of(load_board("hgx-h100"), "n", tmp_path / "h")
    assert [(n.nic.rdma, n.scope) for n in nearest_nics(h100).values()] == [
        (f"mlx5_{i}", "pcieRoot") for i in (0, 3, 4, 5, 6, 9, 10, 11)
    ]
    a100 = inventory_of(load_board("dgx-a100-80"), "n", tmp_path / "a")
    assert [n.nic.rdma for n in nearest_nics(a100).values()] == [f"mlx5_{i}" for i in range(8)]
    gb200 = inventory_of(load_board("gb200-nvl72"), "n", tmp_path / "g")
    assert [(n.nic.rdma, n.scope) for n in nearest_nics(gb200).values()] == [
        (f"mlx5_{i}", "numaNode") for i in (0, 1, 4, 5)
    ]
    assert nearest_nics(inventory_of(load_board("t4"), "n", tmp_path / "t")) == {}
