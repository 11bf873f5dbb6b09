"""What one agent process is told on its command line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpunode.hardware.board import Board
from gpunode.slices.layout import GpuMode


@dataclass(frozen=True)
class AgentOptions:
    """Settings of one agent. `board` is the fake machine's board; None means real GPUs through NVML.

    instance: this process among the node's agents of the driver; never shared by two.
    mode, modes: how GPUs are given out, of all and by device name, see SliceConfig.
    health_policy, xid_catalogue: YAML files, see docs/health.md.
    host_root, driver_root: where the driver is, see DriverRoot.
    managed_taint: publish the taint that keeps kube-scheduler off, for clusters without DeviceTaintRules.
    """

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
    mode: GpuMode = "static"
    modes: Mapping[str, GpuMode] = field(default_factory=dict)
    host_root: Path = Path("/")
    driver_root: str = ""
    health_policy: Path | None = None
    xid_catalogue: Path | None = None
    managed_taint: bool = False
