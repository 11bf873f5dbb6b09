"""`gpunode controller`: the gang placement controller."""

import os
import socket
from typing import Annotated

import typer

from gpunode.cli.connect import Kubeconfig
from gpunode.cli.service import serve
from gpunode.model.names import DEFAULT_DRIVER


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(controller)


def controller(
    kubeconfig: Kubeconfig = None,
    driver: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="DRA driver whose devices are placed here; may be given several times.",
            show_default=DEFAULT_DRIVER,
        ),
    ] = None,
    identity: Annotated[
        str, typer.Option(help="Name in the leader lease; stable over restarts.", show_default="POD_NAME or host name")
    ] = "",
    metrics_port: Annotated[int, typer.Option(help="Prometheus port; 0 serves none.")] = 9402,
    blast_share: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Restart nothing for GPUs that failed at once when they are more of all; 1: never hold back.",
        ),
    ] = 0.2,
) -> None:
    """Run the gang placement controller until it is stopped.

    Example: [bold]gpunode controller --kubeconfig controller.kubeconfig[/bold]
    """
    from gpunode.controller.run import ControllerOptions, run_controller
    from gpunode.kube.errors import ApiError, ConfigError, UnreachableError
    from gpunode.kube.lease import LostLeaseError

    options = ControllerOptions(
        identity=identity or os.environ.get("POD_NAME") or socket.gethostname(),
        kubeconfig=kubeconfig,
        drivers=frozenset(driver or [DEFAULT_DRIVER]),
        metrics_port=metrics_port,
        blast_share=blast_share,
    )
    serve(lambda: run_controller(options), (ConfigError, UnreachableError, ApiError, LostLeaseError, OSError))
