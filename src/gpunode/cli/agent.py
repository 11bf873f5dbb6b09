"""`gpunode agent`: the node agent."""

import secrets
import socket
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gpunode.cli.connect import HostRoot, Kubeconfig
from gpunode.cli.output import fail
from gpunode.cli.service import serve
from gpunode.model.names import DEFAULT_DRIVER


class BackendName(StrEnum):
    """Where the GPUs come from."""

    NVML = "nvml"
    FAKE = "fake"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(agent)


def agent(
    node_name: Annotated[str, typer.Option(help="Name of the Node object.", show_default="host name")] = "",
    kubeconfig: Kubeconfig = None,
    driver: Annotated[str, typer.Option(help="DRA driver name to publish under.")] = DEFAULT_DRIVER,
    instance: Annotated[
        str,
        typer.Option(
            help="Name of this process among the node's agents; no two may share one (the pod's UID).",
            show_default="a random one",
        ),
    ] = "",
    backend: Annotated[BackendName, typer.Option(help="Real GPUs or fake ones.")] = BackendName.NVML,
    profile: Annotated[str, typer.Option(help="Fake: board of fake_gpus/boards, or a YAML file.")] = "dgx-a100-80",
    fake_root: Annotated[Path, typer.Option(help="Fake: directory of the fake machine's /sys, /proc and /dev.")] = Path(
        "/var/lib/gpunode/fake"
    ),
    host_root: HostRoot = Path("/"),
    driver_root: Annotated[
        str,
        typer.Option(
            help="Directory on the host that the NVIDIA driver is installed under.",
            show_default="/, /run/nvidia/driver or /home/kubernetes/bin/nvidia",
        ),
    ] = "",
    kubelet_dir: Annotated[Path, typer.Option(help="The kubelet's --root-dir.")] = Path("/var/lib/kubelet"),
    cdi_dir: Annotated[Path, typer.Option(help="CDI directory of the container runtime.")] = Path("/var/run/cdi"),
    state_dir: Annotated[Path, typer.Option(help="Where health and its history are kept.")] = Path("/var/lib/gpunode"),
    metrics_port: Annotated[int, typer.Option(help="Prometheus port; 0 serves none.")] = 9401,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[DEVICE=]MODE",
            help="How GPUs are given out: none, static, dynamic or shared; DEVICE=MODE for one that differs. "
            "May be given several times.",
            show_default="static",
        ),
    ] = None,
    managed_taint: Annotated[
        bool,
        typer.Option(
            "--managed-taint",
            help="Keep kube-scheduler off these devices by a taint in the slices, where the cluster serves no "
            "DeviceTaintRules (the default of Kubernetes 1.36). Only with the gang controller.",
        ),
    ] = False,
    health_policy: Annotated[
        Path | None, typer.Option(help="Health policy file; see docs/health.md.", show_default=False)
    ] = None,
    xid_catalogue: Annotated[
        Path | None, typer.Option(help="Your changes to the XID catalogue; see docs/health.md.", show_default=False)
    ] = None,
) -> None:
    """Run the node agent until it is stopped.

    Example: [bold]gpunode agent --node-name gpu-node-0 --backend fake --profile dgx-a100-80[/bold]
    """
    from gpunode.agent.options import AgentOptions
    from gpunode.agent.run import EXPECTED_ERRORS, run_agent
    from gpunode.hardware.board import BoardError, load_board
    from gpunode.slices.layout import parse_modes

    board = None
    if backend is BackendName.FAKE:
        try:
            board = load_board(profile)
        except BoardError as error:
            fail(str(error))
    try:
        general, single = parse_modes(mode or [])
    except ValueError as error:
        fail(str(error), 2)
    options = AgentOptions(
        node=node_name or socket.gethostname(),
        kubeconfig=kubeconfig,
        driver=driver,
        instance=instance or secrets.token_hex(4),
        board=board,
        fake_root=fake_root,
        host_root=host_root,
        driver_root=driver_root,
        kubelet_dir=kubelet_dir,
        cdi_dir=cdi_dir,
        state_dir=state_dir,
        metrics_port=metrics_port,
        mode=general,
        modes=single,
        health_policy=health_policy,
        xid_catalogue=xid_catalogue,
        managed_taint=managed_taint,
    )
    serve(lambda: run_agent(options), EXPECTED_ERRORS)
