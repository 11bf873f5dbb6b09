"""The gpunode command: puts the command groups together."""

import logging
import sys
from typing import Annotated, Any, Final, NoReturn

import typer

from gpunode.cli import agent, claims, cluster, controller, demo, devices, explain, faults, health, mps, quarantine
from gpunode.cli.output import tell

# Base of all errors about arguments. typer keeps its copy of click private, so it is reached through a public one.
_ArgumentError: Final[Any] = typer.BadParameter.__mro__[2]
_INTERRUPTED: Final = 130

app = typer.Typer(
    name="gpunode",
    help="The GPU layer of a Kubernetes cluster: DRA driver, node agent, gang placement.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"gpunode {version('gpunode')}")
        raise typer.Exit


@app.callback()
def options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Common to all commands."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    # Warns of every file that it looks for; our own errors say which were tried.
    logging.getLogger("kubernetes").setLevel(logging.ERROR)


agent.register(app)
controller.register(app)
mps.register(app)
explain.register(app)
demo.register(app)
devices.register(app)
claims.register(app)
quarantine.register(app)
app.add_typer(cluster.app, name="cluster")
app.add_typer(faults.app, name="faults")
app.add_typer(health.app, name="health")


def main() -> NoReturn:
    """Entry point of the console scripts. Whatever goes wrong that a person can mend is one line on stderr."""
    try:
        code = app(standalone_mode=False)
    except _ArgumentError as error:
        code = error.exit_code
        if text := error.format_message():  # none: the help has been printed instead
            tell(f"{text.rstrip('.')}: see `{_path(error.ctx)} --help`")
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        tell("interrupted")
    sys.exit(code)


def _path(context: Any) -> str:
    return "gpunode" if context is None else str(context.command_path)
