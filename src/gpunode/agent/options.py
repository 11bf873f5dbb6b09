"""What one agent process is told on its command line."""

from dataclasses import dataclass
from pathlib import Path

from gpunode.hardware.board import Board


@dataclass(frozen=True)
class AgentOptions:
    """Settings of one agent. `board` is the fake machine's board; None means real GPUs through NVML."""

    node: str
    kubeconfig: Path | None
    driver: str
    instance: str
    board: Board | None
    fake_root: Path
    kubelet_dir: Path
    cdi_dir: Path
    state_dir: Path
    metrics_port: int
