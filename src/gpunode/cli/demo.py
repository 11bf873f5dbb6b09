"""`gpunode demo`: the story of a gang, told to a person watching a terminal."""

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from gpunode.cli.connect import sentences
from gpunode.cli.output import console, fail, progress
from gpunode.cluster.errors import ClusterError
from gpunode.cluster.spec import DEFAULT_KUBERNETES, DEFAULT_PORT

if TYPE_CHECKING:
    from gpunode.cluster.cluster import Cluster
    from gpunode.cluster.story import Break, Rank

_XID = 79


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(demo)


def demo(
    nodes: Annotated[int, typer.Option(min=9, max=16, help="Nodes of 8 fake A100s; the story needs a spare one.")] = 9,
    name: Annotated[str, typer.Option(help="Name of the local cluster.")] = "default",
    port: Annotated[int, typer.Option(help="Port of its API server.")] = DEFAULT_PORT,
    kubernetes: Annotated[str, typer.Option(help="Kubernetes version.")] = DEFAULT_KUBERNETES,
    mps: Annotated[bool, typer.Option("--mps", help="Start an MPS keeper on every node as well.")] = False,
) -> None:
    """Bring up a cluster of fake GPUs, run a gang of 64, break one GPU and watch the gang come back.

    Example: [bold]gpunode demo[/bold]
    """
    from gpunode.agent.orders import OrderError
    from gpunode.cluster import build, packages
    from gpunode.cluster.install import Installation, install
    from gpunode.cluster.lifecycle import require_root, up
    from gpunode.cluster.spec import ClusterSpec
    from gpunode.kube.errors import ApiError, UnreachableError

    out = console()
    began = time.monotonic()
    try:
        require_root()
        spec = ClusterSpec(name=name, nodes=nodes, kubernetes=kubernetes, port=port)
        build.check(kubernetes)
        _chapter(out, 1, f"A real Kubernetes {kubernetes} cluster: {nodes} kubelets, each with 8 fake A100 GPUs")
        with progress() as report:
            packages.install(lambda step: report(step, 0.0))
            build.build(kubernetes, report)
        with progress() as report:
            cluster = up(spec, report)
        with progress() as report:
            install(cluster, Installation(mps=mps), report)
    except ClusterError as error:
        fail(str(error))
    try:
        asyncio.run(_story(out, cluster))
    except Exception as error:  # only what is expected becomes a sentence
        told = sentences(error, (ClusterError, OrderError, ApiError, UnreachableError, TimeoutError))
        fail(f"the story broke off: {told}; the cluster still runs, its logs are in {cluster.logs}, and "
             f"`gpunode cluster down{_option(name)}` removes it")  # fmt: skip
    minutes, seconds = divmod(int(time.monotonic() - began), 60)
    _ending(out, cluster, name, f"{minutes} min {seconds} s")


async def _story(out: Console, cluster: "Cluster") -> None:
    from gpunode.cluster.story import stage

    async with stage(cluster) as it:
        await it.clear()
        _chapter(out, 2, "A gang of 8 pods × 8 GPUs: an ordinary Job in one PodGroup")
        it.apply("team-a")
        it.apply("train")
        with _waiting(out, "Waiting for all 8 ranks to run"):
            took = await it.until_running("train", 8, 60)
        out.print(f"All 8 ranks run after {took:.1f} s. Where every rank and its GPUs went:")
        out.print(_ranks(it.ranks("train")))

        _chapter(out, 3, f"XID {_XID} on one GPU of rank 3: it falls off the bus")
        with _waiting(out, "The old pods ignore SIGTERM, so their grace period of 30 s has to pass"):
            broken = await it.break_one("train", _XID)
        out.print(f"{broken.rank.node}, {broken.device}:")
        out.print(_times(broken))
        out.print("Where they run now, away from the broken GPU:")
        out.print(_ranks(broken.ranks))

        _chapter(out, 4, "A second gang of 2 × 8 GPUs, for which there is no room")
        it.apply("too-large")
        await it.until("a reason for the second gang", 20, lambda: it.placed("too-large")[1] == "WaitingForDevices")
        started = [p for p in it.members("too-large") if p.spec.node_name]
        out.print(f"{len(started)} of its 2 pods started. Why, in one sentence:")
        out.print(f"  [yellow]{escape(it.placed('too-large')[2])}[/yellow]")

        _chapter(out, 5, "The first gang runs to its end")
        with _waiting(out, "Waiting for the Job to complete"):
            await it.until("Job train is Complete", 120, lambda: it.complete("train"))
        job = it.jobs.items["team-a/train"]
        out.print(
            f"Job train: Complete, {job.status.succeeded} succeeded, {job.status.failed} failed. "
            "Its GPUs are free, so the second gang starts by itself."
        )


def _chapter(out: Console, number: int, title: str) -> None:
    out.print(f"\n[bold cyan]{number}. {title}[/bold cyan]")


@contextmanager
def _waiting(out: Console, what: str) -> Iterator[None]:
    """Shows what is waited for: on a terminal with a spinner and for how long, elsewhere in a line."""
    if not out.is_terminal:
        out.print(f"{what} ...")
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        bar.add_task(what)
        yield


def _times(broken: "Break") -> Table:
    """What happened when, in seconds since the fault."""
    again = broken.running_again_s
    happened = [
        (broken.pod_status_s, f"pod.status says Unhealthy: [red]{escape(broken.message)}[/red]"),
        (broken.evicted_s, "the whole gang is evicted, once, by suspending its Job"),
        (broken.old_ended_s, "the last old pod has ended and given its GPUs back"),
        (broken.old_ended_s + again, f"all 8 ranks run again, {again:.1f} s after the last old one ended"),
    ]
    table = Table.grid(padding=(0, 2))
    for seconds, what in sorted(happened):
        table.add_row("", f"{seconds:5.1f} s", what)
    return table


def _ranks(ranks: "tuple[Rank, ...]") -> Table:
    table = Table("RANK", "POD", "NODE", "GPUS (PCI BUS)", box=None, pad_edge=False)
    for rank in ranks:
        addresses = " ".join(device.removeprefix("gpu-0000-").removesuffix("-00-0") for device in rank.devices)
        table.add_row(str(rank.rank), rank.pod, rank.node, addresses)
    return table


def _ending(out: Console, cluster: "Cluster", name: str, took: str) -> None:
    out.print(f"\nThat was the story, in {took}. The cluster still runs. To look around:")
    programs = (("gpunode", Path(sys.argv[0]).absolute().parent), ("kubectl", Path(cluster.kubectl).parent))
    if absent := [str(directory) for program, directory in programs if shutil.which(program) is None]:
        out.print(f"  export PATH={os.pathsep.join(absent)}:$PATH", soft_wrap=True)
    out.print(f"  export KUBECONFIG={cluster.kubeconfig}", soft_wrap=True)
    out.print("  kubectl get pods,podgroups,resourceclaims -n team-a -o wide")
    out.print("  kubectl get resourceslices")
    out.print("  kubectl get events -A --field-selector type=Warning")
    out.print("  gpunode explain podgroup/train -n team-a")
    out.print(f"To take it down:\n  gpunode cluster down{_option(name)}")


def _option(name: str) -> str:
    return "" if name == "default" else f" --name {name}"
