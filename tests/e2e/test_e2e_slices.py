"""Every board in every mode, as a real API server sees it."""

import tempfile
from pathlib import Path

import pytest
from msgspec import to_builtins

from gpunode.cluster.api import ApiStatusError
from gpunode.cluster.cluster import Cluster
from gpunode.hardware.board import board_names, load_board
from gpunode.hardware.discover import discover
from gpunode.hardware.fake import FakeMachine
from gpunode.model.health import NodeHealth
from gpunode.slices.layout import GpuMode, SliceConfig
from gpunode.slices.planner import plan

pytestmark = pytest.mark.e2e
MODES: tuple[GpuMode, ...] = ("none", "static", "dynamic", "shared")


@pytest.mark.parametrize("board", board_names())
def test_the_api_server_accepts_every_slice_of_a_board(cluster: Cluster, board: str) -> None:
    with tempfile.TemporaryDirectory() as base:
        machine = FakeMachine.create(load_board(board), "any-node", Path(base))
        machine.nvml.nvmlInit()
        inventory = discover(machine.nvml, machine.roots, "any-node")
    for mode in MODES:
        config = SliceConfig(driver="boards.gpunode.dev", node="any-node", mode=mode)
        slices = plan(inventory, NodeHealth(), config)
        assert slices, mode
        assert any(slice_.spec.devices for slice_ in slices), mode
        for slice_ in slices:
            body = {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceSlice",
                "metadata": {"name": slice_.metadata.name},
                "spec": to_builtins(slice_.spec),
            }
            kept = cluster.api.call("POST", "/apis/resource.k8s.io/v1/resourceslices?dryRun=All", body)
            # A disabled feature would drop fields silently instead of refusing them.
            assert len(kept["spec"].get("devices", ())) == len(slice_.spec.devices)
            assert len(kept["spec"].get("sharedCounters", ())) == len(slice_.spec.shared_counters)


def test_it_would_refuse_a_bad_one(cluster: Cluster) -> None:
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "bad"},
        "spec": {
            "driver": "boards.gpunode.dev",
            "nodeName": "any-node",
            "pool": {"name": "any-node", "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "Not A Label"}],
        },
    }
    with pytest.raises(ApiStatusError, match="devices"):
        cluster.api.call("POST", "/apis/resource.k8s.io/v1/resourceslices?dryRun=All", body)
