"""The gpunode command: puts the command groups together."""

import logging
import sys
from typing import Annotated

import typer

from gpunode.cli import agent, claims, cluster, controller, demo, devices, explain, faults, health

app = typer.Typer(
    name="gpunode",
    help="The GPU layer of a Kubernetes cluster: DRA driver, node agent, gang placement.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Common to all commands."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)


agent.register(app)
controller.register(app)
explain.register(app)
demo.register(app)
devices.register(app)
claims.register(app)
app.add_typer(cluster.app, name="cluster")
app.add_typer(faults.app, name="faults")
app.add_typer(health.app, name="health")


def main() -> None:
    """Entry point of the console scripts."""
    app()
