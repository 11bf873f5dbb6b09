"""`gpunode health`: what is wrong with this node's GPUs, what was, and what a log would have done."""

import getpass
import itertools
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.markup import escape
from rich.table import Table

from gpunode.cli.output import Format, console, emit, fail
from gpunode.model.health import Dimension, Level
from gpunode.model.wording import why

if TYPE_CHECKING:
    from gpunode.health.catalogue import Catalogue as CatalogueValue
    from gpunode.health.policy import Policy
    from gpunode.health.state import HealthState

DEFAULT_STATE = Path("/var/lib/gpunode/health.json")
_MAX_LINE = 1 << 16
_COLOURS = {Level.HEALTHY: "green", Level.DEGRADED: "yellow", Level.UNHEALTHY: "red"}

app = typer.Typer(help="Health of this node's GPUs: now, before, and what a log would have done.", no_args_is_help=True)

State = Annotated[Path, typer.Option("--state", help="The agent's state file.")]
Catalogue = Annotated[
    Path | None, typer.Option("--catalogue", help="Your changes to the XID catalogue.", show_default=False)
]
PolicyFile = Annotated[Path | None, typer.Option("--policy", help="Health policy file.", show_default=False)]
Output = Annotated[Format, typer.Option("-o", "--output", help="How to print it.")]


@app.command()
def status(
    state: State = DEFAULT_STATE,
    catalogue: Catalogue = None,
    policy: PolicyFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Show what stands against each device of this node; with the agent's policy also until when gangs may stay.

    Example: [bold]gpunode health status[/bold]
    """
    from gpunode.health.devices import DeviceMap
    from gpunode.health.explain import gangs_stay
    from gpunode.health.machine import HealthMachine

    saved = _read(state)
    health = HealthMachine(*_settings(catalogue, policy)).project(saved, DeviceMap())
    findings = [(name, finding) for name, device in sorted(health.devices.items()) for finding in device.findings]
    if output is not Format.TABLE:
        emit([{"device": name, "finding": finding} for name, finding in findings], output)
        return
    gangs = ["GANGS STAY"] if policy is not None else []
    table = Table("DEVICE", "LEVEL", "SINCE", *gangs, "WHAT", box=None, pad_edge=False)
    for name, finding in findings:
        colour = _COLOURS[finding.level]
        stay = [gangs_stay(finding)] if gangs else []
        level = f"[{colour}]{finding.level}[/{colour}]"
        table.add_row(name, level, finding.since, *stay, escape(finding.message))
    console().print(table if findings else f"nothing stands against any of {len(saved.devices)} known devices")


@app.command()
def history(
    device: Annotated[str | None, typer.Option("--device", help="Only this device.", show_default=False)] = None,
    state: State = DEFAULT_STATE,
    output: Output = Format.TABLE,
) -> None:
    """Show what happened to the devices of this node, oldest first.

    Example: [bold]gpunode health history --device gpu-0000-07-00-0[/bold]
    """
    happened = [t for t in _read(state).history if device in (None, t.device)]
    if output is not Format.TABLE:
        emit(happened, output)
        return
    table = Table("TIME", "DEVICE", "CHANGE", "WHAT", box=None, pad_edge=False)
    for transition in happened:
        colour = _COLOURS[transition.level]
        table.add_row(
            transition.at, transition.device, f"[{colour}]{transition.change}[/{colour}]", escape(transition.message)
        )
    console().print(table if happened else "nothing has happened")


@app.command()
def clear(
    device: Annotated[str, typer.Argument(help="Device name, as in status.")],
    dimension: Annotated[
        Dimension | None, typer.Option("--dimension", help="Only this kind of fault.", show_default=False)
    ] = None,
    state: State = DEFAULT_STATE,
) -> None:
    """Declare a device to be in order: the agent lifts its faults at once, without hold-down.

    Example: [bold]gpunode health clear gpu-0000-07-00-0 --dimension xid[/bold]
    """
    from gpunode.health.signals import OperatorClear
    from gpunode.health.store import request_clear

    known = _read(state).devices.get(device)
    entries = known.entries.values() if known else ()
    standing = [entry for entry in entries if dimension in (None, entry.finding.dimension)]
    if not standing:
        fail(f"nothing stands against {device}{f' in {dimension}' if dimension else ''}; see: gpunode health status")
    try:
        request_clear(state, OperatorClear(device, by=f"operator {getpass.getuser()}", dimension=dimension))
    except OSError as error:
        fail(f"the request cannot be left beside {state}: {why(error)}")
    console().print(f"{_faults(len(standing))} of {device} will be lifted by the agent")


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="Kernel log or journal export; - for standard input.")],
    catalogue: Catalogue = None,
    policy: PolicyFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Print what a kernel log would have done to which device, and when. Changes nothing.

    Example: [bold]journalctl -k -o export | gpunode health replay -[/bold]
    """
    from gpunode.health.devices import DeviceMap
    from gpunode.health.machine import HealthMachine
    from gpunode.health.replay import read_records
    from gpunode.health.replay import replay as run_replay

    machine = HealthMachine(*_settings(catalogue, policy))
    try:
        with nullcontext(sys.stdin) if str(file) == "-" else file.open(errors="replace") as opened:
            replayed = run_replay(read_records(_lines(opened)), machine)
    except OSError as error:
        fail(f"{file} cannot be read: {why(error)}")
    health = machine.project(replayed.state, DeviceMap())
    left = [(name, finding) for name, device in sorted(health.devices.items()) for finding in device.findings]
    if output is not Format.TABLE:
        emit(
            {
                "records": replayed.records,
                "transitions": [{"after": after, "what": what} for after, what in replayed.transitions],
                "standing": [{"device": name, "finding": finding} for name, finding in left],
            },
            output,
        )
        return
    table = Table("AFTER", "DEVICE", "CHANGE", "WHAT", box=None, pad_edge=False)
    for after, what in replayed.transitions:
        colour = _COLOURS[what.level]
        when = "-" if after is None else f"{after:.3f} s"
        table.add_row(when, what.device, f"[{colour}]{what.change}[/{colour}]", escape(what.message))
    console().print(table)
    console().print(
        f"{replayed.records} records; {_faults(len(left))} {'stands' if len(left) == 1 else 'stand'} at the end"
    )
    for name, finding in left:
        console().print(f"  {name}: {finding.message}", markup=False)


@app.command()
def policy(
    explain: Annotated[int | None, typer.Option("--explain", help="Say all about one XID.", show_default=False)] = None,
    catalogue: Catalogue = None,
    policy: PolicyFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Show the health policy in force, or what it makes of one XID.

    Example: [bold]gpunode health policy --explain 94[/bold]
    """
    from gpunode.health.explain import explain_xid

    codes, rules = _settings(catalogue, policy)
    if explain is None:
        emit(rules, Format.YAML if output is Format.TABLE else output)
        return
    told = explain_xid(explain, codes, rules)
    if output is not Format.TABLE:
        emit(told, output)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in told.items():
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    console().print(table)


def _faults(count: int) -> str:
    return "1 fault" if count == 1 else f"{count} faults"


def _lines(opened: TextIO) -> Iterator[str]:
    """Lines of a file, each cut to a size no kernel line has."""
    return itertools.takewhile(bool, iter(lambda: opened.readline(_MAX_LINE), ""))


def _settings(catalogue: Path | None, policy: Path | None) -> "tuple[CatalogueValue, Policy]":
    from gpunode.health.catalogue import CatalogueError, load_catalogue
    from gpunode.health.policy import PolicyError, load_policy

    try:
        return load_catalogue(catalogue), load_policy(policy)
    except (CatalogueError, PolicyError) as error:
        fail(str(error), 2)


def _read(path: Path) -> "HealthState":
    from gpunode.health.store import read

    try:
        return read(path)
    except FileNotFoundError:
        fail(f"{path} does not exist: no agent has run here, or it keeps its state elsewhere (--state)")
    except (OSError, ValueError) as error:
        fail(f"{path} cannot be used: {why(error)}")
