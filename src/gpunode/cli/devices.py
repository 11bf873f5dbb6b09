"""`gpunode devices`, `slices`, `topology`, `fake`: what hardware there is and how Kubernetes is told of it."""

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import yaml
from rich.table import Table
from rich.text import Text

from gpunode.cli.output import Format, console, emit, fail
from gpunode.model.hardware import Gpu, Inventory, device_name
from gpunode.model.names import DEFAULT_DRIVER


class Mode(StrEnum):
    """How GPUs are given out; see gpunode.slices.layout.SliceConfig."""

    NONE = "none"
    STATIC = "static"
    DYNAMIC = "dynamic"
    SHARED = "shared"


Profile = Annotated[
    str | None,
    typer.Option(
        help="Board of fake_gpus/boards or a YAML file, instead of this machine's GPUs; see gpunode fake list."
    ),
]
NodeName = Annotated[str, typer.Option("--node", help="Node name; with a profile it decides UUIDs and the tray.")]
fake = typer.Typer(help="Board profiles of fake machines.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command()(devices)
    app.command()(slices)
    app.command()(topology)
    app.add_typer(fake, name="fake")


def devices(
    profile: Profile = None,
    node: NodeName = "",
    tree: Annotated[bool, typer.Option("--tree", help="As a tree of NUMA nodes, PCIe roots and devices.")] = False,
    output: Annotated[Format, typer.Option("-o", "--output", help="How to print it.")] = Format.TABLE,
) -> None:
    """Show the GPUs and network devices of this machine, or of a board profile.

    Example: [bold]gpunode devices --profile hgx-h100 --tree[/bold]
    """
    inventory = _inventory(profile, node)
    if output is not Format.TABLE:
        emit(_plain(inventory), output)
    elif tree:
        from gpunode.cli.topology import placement_tree

        console().print(placement_tree(inventory))
    else:
        console().print(_table(inventory))


def slices(
    profile: Profile = None,
    node: NodeName = "",
    driver: Annotated[str, typer.Option(help="DRA driver name.")] = DEFAULT_DRIVER,
    mode: Annotated[Mode, typer.Option(help="How GPUs are given out.")] = Mode.STATIC,
    output: Annotated[Format, typer.Option("-o", "--output", help="How to print it.")] = Format.TABLE,
) -> None:
    """Show the ResourceSlices that an agent would publish. YAML and JSON are fit for kubectl apply.

    Example: [bold]gpunode slices --profile hgx-h100 --mode dynamic -o yaml[/bold]
    """
    from gpunode.model.health import NodeHealth
    from gpunode.slices.linter import lint
    from gpunode.slices.planner import SliceConfig, plan

    inventory = _inventory(profile, node)
    planned = plan(inventory, NodeHealth(), SliceConfig(driver=driver, node=inventory.node, mode=mode.value))
    bodies = [{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", **msgspec.to_builtins(s)} for s in planned]
    if output is Format.YAML:
        typer.echo(yaml.safe_dump_all(bodies, sort_keys=False, allow_unicode=True), nl=False)
    elif output is Format.JSON:
        emit({"apiVersion": "v1", "kind": "List", "items": bodies}, output)
    else:
        table = Table("SLICE", "DEVICES", "COUNTER SETS", "TYPES", box=None, pad_edge=False)
        for one in planned:
            kinds = sorted({d.attributes["type"].string or "" for d in one.spec.devices})
            counts = str(len(one.spec.devices)), str(len(one.spec.shared_counters))
            table.add_row(one.metadata.name, *counts, ", ".join(kinds) or "-")
        console().print(table)
    problems = lint(planned)
    if problems:
        fail("; ".join(str(problem) for problem in problems))


def topology(
    profile: Profile = None,
    node: NodeName = "",
    svg: Annotated[Path | None, typer.Option(help="Write a picture to this file instead.")] = None,
) -> None:
    """Draw how GPUs, NVLink, PCIe, NUMA nodes and network devices are connected.

    Example: [bold]gpunode topology --profile dgx-a100-80 --svg board.svg[/bold]
    """
    from gpunode.cli.topology import distance_table, legend, placement_tree, svg_picture

    inventory = _inventory(profile, node)
    if svg is None:
        console().print(placement_tree(inventory), "", distance_table(inventory), legend(), sep="\n")
        return
    try:
        svg.write_text(svg_picture(inventory), encoding="utf-8")
    except OSError as error:
        fail(f"{svg} cannot be written: {error.strerror}")
    typer.echo(f"wrote {svg}", err=True)


@fake.command("list")
def list_profiles(
    output: Annotated[Format, typer.Option("-o", "--output", help="How to print it.")] = Format.TABLE,
) -> None:
    """List the board profiles that come with gpunode.

    Example: [bold]gpunode fake list[/bold]
    """
    from gpunode.hardware.board import board_names, load_board

    if output is not Format.TABLE:
        boards = {name: load_board(name) for name in board_names()}
        emit([{"profile": n, "gpus": len(b.gpus), "product": b.product, "nvlinks": b.nvlink.links,
               "mig": bool(b.mig_profiles), "estimates": b.unknown} for n, b in boards.items()], output)  # fmt: skip
        return
    table = Table("PROFILE", "GPUS", "PRODUCT", "NVLINK", "MIG", "ESTIMATES", box=None, pad_edge=False)
    for name in board_names():
        board = load_board(name)
        links = f"{board.nvlink.links} to {board.nvlink.to}" if board.nvlink.links else "-"
        mig = "yes" if board.mig_profiles else "-"
        table.add_row(name, str(len(board.gpus)), board.product, links, mig, ", ".join(board.unknown) or "-")
    console().print(table)


@fake.command()
def validate(file: Annotated[Path, typer.Argument(help="The profile to check.")]) -> None:
    """Check a board profile: its fields, and that an agent on it would publish valid slices.

    Example: [bold]gpunode fake validate my-board.yaml[/bold]
    """
    from gpunode.model.health import NodeHealth
    from gpunode.slices.linter import lint
    from gpunode.slices.planner import SliceConfig, plan

    inventory = _inventory(str(file.absolute()), "")
    for mode in Mode:
        config = SliceConfig(driver=DEFAULT_DRIVER, node=inventory.node, mode=mode.value)
        problems = lint(plan(inventory, NodeHealth(), config))
        if problems:
            fail(f"{file}: in mode {mode} slices would be refused: " + "; ".join(str(p) for p in problems))
    typer.echo(f"{file}: {len(inventory.gpus)} GPUs, {len(inventory.nics)} network devices, all in order")


def _inventory(profile: str | None, node: str) -> Inventory:
    """What discovery finds, on this machine or on a fake one. Ends the program with a reason where it cannot."""
    from gpunode.hardware.board import BoardError
    from gpunode.hardware.rescan import Scanner

    name = node or (socket.gethostname().lower() if profile is None else "node-0")
    try:
        with _machine(profile, name) as (nvml, roots):
            scan = Scanner(nvml, roots, name).scan()
    except BoardError as error:
        fail(str(error), 2)
    if scan.inventory is None:
        fail(f"{scan.error} For a machine that is not this one: --profile NAME")
    return scan.inventory


@contextmanager
def _machine(profile: str | None, node: str) -> Iterator[tuple[Any, Any]]:
    """NVML and kernel interfaces: the real ones, or a fake machine that lasts as long as the block."""
    from gpunode.hardware.board import load_board
    from gpunode.hardware.driver import load_nvml
    from gpunode.hardware.fake import FakeMachine
    from gpunode.hardware.roots import Roots

    if profile is None:
        yield load_nvml(), Roots.real()
        return
    board = load_board(profile)
    with tempfile.TemporaryDirectory(prefix="gpunode-") as base:
        machine = FakeMachine.create(board, node, Path(base))
        yield machine.nvml, machine.roots


def _table(inventory: Inventory) -> Table:
    from gpunode.slices.describe import nearest_nics, nvlink_domains

    domains, nics = nvlink_domains(inventory), nearest_nics(inventory)
    title = (
        f"{inventory.node}: driver {inventory.driver_version or 'unknown'}, CUDA {inventory.cuda_version or 'unknown'}"
    )
    table = Table("DEVICE", "PRODUCT", "MEMORY", "NUMA", "PCIE ROOT", "NVLINKS", "NVLINK DOMAIN", "NEAR NIC", "MIG",
                  box=None, pad_edge=False, title=title, title_justify="left")  # fmt: skip
    for gpu in inventory.gpus:
        nearest = nics.get(gpu.uuid)
        table.add_row(
            device_name(gpu.pci),
            Text(gpu.product),
            f"{gpu.memory_bytes / 2**30:.1f} GiB",
            "-" if gpu.numa_node is None else str(gpu.numa_node),
            gpu.pcie_root or "-",
            _links(gpu),
            domains.get(gpu.uuid, gpu.fabric.state),
            nearest.nic.rdma if nearest else "-",
            ("on" if gpu.mig_enabled else "off") if gpu.mig_profiles else "-",
        )
    if not inventory.gpus:
        table.add_row("no GPUs")
    return table


def _links(gpu: Gpu) -> Text:
    if not gpu.links:
        return Text("-")
    active = sum(link.active for link in gpu.links)
    return Text(f"{active}/{len(gpu.links)}", style="" if active == len(gpu.links) else "red")


def _plain(inventory: Inventory) -> dict[str, Any]:
    """The inventory with addresses as text and each GPU's device name."""
    plain = asdict(inventory)
    for item, source in zip(plain["gpus"], inventory.gpus, strict=True):
        item |= {"pci": str(source.pci), "nvlink_peers": sorted(source.nvlink_peers)}
    for item, nic in zip(plain["nics"], inventory.nics, strict=True):
        item["pci"] = str(nic.pci)
    named = [{"name": device_name(g.pci), **item} for g, item in zip(inventory.gpus, plain["gpus"], strict=True)]
    return plain | {"gpus": named}
