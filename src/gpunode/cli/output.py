"""How commands speak: tables and colour on terminals, plain text in pipes, JSON or YAML on request."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NoReturn

import msgspec
import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gpunode.cluster.build import Report


class Format(StrEnum):
    """Values of -o/--output."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def console() -> Console:
    """Standard output; without a terminal rich drops colour, and nothing is folded: other programs read lines."""
    terminal = sys.stdout.isatty()
    return Console(width=None if terminal else 4096, highlight=False)


def emit(value: object, output: Format) -> None:
    """Print a plain value (or struct) as JSON or YAML."""
    plain: Any = msgspec.to_builtins(value)
    if output is Format.JSON:
        typer.echo(msgspec.json.format(msgspec.json.encode(plain), indent=2).decode())
    else:
        typer.echo(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), nl=False)


def tell(message: str) -> None:
    """One line on standard error, whatever lines the message comes in (YAML and Go speak in several)."""
    line = " ".join(message.split())
    typer.secho(f"gpunode: {line}", fg=typer.colors.RED if sys.stderr.isatty() else None, err=True)


def fail(message: str, code: int = 1) -> NoReturn:
    """One line on standard error and an exit code that is not zero."""
    tell(message)
    raise typer.Exit(code)


@contextmanager
def progress() -> Iterator[Report]:
    """A function to report steps to: (what is done, share that is done). On a terminal it moves a bar with the
    remaining time, elsewhere it writes a line a step; both on standard error."""
    if not sys.stderr.isatty():
        yield _line_reporter()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda step, done: bar.update(task, description=step, completed=done)


def _line_reporter() -> Report:
    last: list[str] = []

    def report(step: str, done: float) -> None:
        if last != [step]:
            last[:] = [step]
            typer.echo(f"[{done:4.0%}] {step}", err=True)

    return report
