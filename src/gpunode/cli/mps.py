"""`gpunode mps-keeper`: keeps the control daemons of claims that share GPUs through MPS."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gpunode.cli.connect import HostRoot
from gpunode.cli.output import fail
from gpunode.model.names import DEFAULT_DRIVER


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("mps-keeper")(keeper)


def keeper(
    context: typer.Context,
    driver: Annotated[str, typer.Option(help="DRA driver name of the agent.")] = DEFAULT_DRIVER,
    kubelet_dir: Annotated[Path, typer.Option(help="The kubelet's --root-dir.")] = Path("/var/lib/kubelet"),
    host_root: HostRoot = Path("/"),
    driver_root: Annotated[
        str,
        typer.Option(
            help="Directory on the host that the NVIDIA driver is installed under.",
            show_default="/ or /run/nvidia/driver",
        ),
    ] = "",
    tool: Annotated[
        str, typer.Option(help="The driver's MPS control program, a name or an absolute path below the driver root.")
    ] = "nvidia-cuda-mps-control",
) -> None:
    """Keep the MPS control daemons that the node's claims want, until it is stopped.

    Run it beside the agent, as root. A restart of the agent leaves the daemons alone; they end with the keeper.

    Example: [bold]gpunode mps-keeper --driver-root /run/nvidia/driver[/bold]
    """
    from gpunode.hardware.driver import DriverRoot
    from gpunode.kubelet.plugin import KubeletPaths

    directory = KubeletPaths(kubelet_dir).plugin_dir(driver) / "mps"
    if not kubelet_dir.is_dir():
        fail(f"kubelet absent: {kubelet_dir} does not exist; name the kubelet's --root-dir with --kubelet-dir")
    verbose = ["-v"] if context.parent is not None and context.parent.params.get("verbose") else []
    root = DriverRoot(host_root, driver_root).directory()
    # A process of its own, without what the command line needs: it stays for months.
    program = [sys.executable, "-m", "gpunode.kubelet.mps", str(directory), str(root), tool, *verbose]
    os.execv(sys.executable, program)  # noqa: S606
