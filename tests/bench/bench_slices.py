"""Samples of how long describing a node takes. Run by the benchmark, which judges them; nothing is asserted here."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpunode.hardware.board import Board, load_board
from gpunode.hardware.discover import discover
from gpunode.hardware.fake import FakeMachine
from gpunode.model.health import NodeHealth
from gpunode.slices.planner import SliceConfig, plan

_NODE = "node-0"


@dataclass(frozen=True)
class _Bench:
    samples: int
    warm_up: int = 2

    def run(self, work: Callable[[], object]) -> list[float]:
        """Milliseconds of each run after the warm-up."""
        for _ in range(self.warm_up):
            work()
        times = []
        for _ in range(self.samples):
            begin = time.perf_counter()
            work()
            times.append((time.perf_counter() - begin) * 1000)
        return times


def discover8_ms(samples: int = 30) -> list[float]:
    """slices.discover8_ms: one discovery of eight fake H100s, NVLinks, MIG profiles and NICs included."""
    with tempfile.TemporaryDirectory() as base:
        machine = FakeMachine.create(load_board("hgx-h100"), _NODE, Path(base))
        machine.nvml.nvmlInit()
        return _Bench(samples).run(lambda: discover(machine.nvml, machine.roots, _NODE))


def plan16_ms(samples: int = 30) -> list[float]:
    """slices.plan16_ms: planning sixteen H100s with every dynamic MIG placement (416 devices, 16 counter sets)
    against the slices that are published."""
    config = SliceConfig("gpu.gpunode.dev", _NODE, mode="dynamic")
    with tempfile.TemporaryDirectory() as base:
        machine = FakeMachine.create(_sixteen(), _NODE, Path(base))
        machine.nvml.nvmlInit()
        inventory = discover(machine.nvml, machine.roots, _NODE)
    existing = plan(inventory, NodeHealth(), config)
    return _Bench(samples).run(lambda: plan(inventory, NodeHealth(), config, existing))


def _sixteen() -> Board:
    board = load_board("hgx-h100")
    more = tuple(msgspec.structs.replace(gpu, pci=gpu.pci.replace("0000:", "0001:")) for gpu in board.gpus)
    return msgspec.structs.replace(board, name="hgx-h100-16", gpus=board.gpus + more)
