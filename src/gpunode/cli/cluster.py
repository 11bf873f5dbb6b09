"""`gpunode cluster`: a real Kubernetes on this machine, without a container engine."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from gpunode.cli.output import Format, console, emit, fail, progress
from gpunode.cluster import build as building
from gpunode.cluster import packages
from gpunode.cluster.cluster import Cluster, load
from gpunode.cluster.down import down as bring_down
from gpunode.cluster.errors import ClusterError
from gpunode.cluster.lifecycle import require_root
from gpunode.cluster.lifecycle import up as bring_up
from gpunode.cluster.paths import cache_root
from gpunode.cluster.spec import DEFAULT_KUBERNETES, DEFAULT_PORT, ClusterSpec

Name = Annotated[str, typer.Option("--name", help="Which cluster; several can run side by side.")]
Kubernetes = Annotated[str, typer.Option("--kubernetes", help="Kubernetes version: 1.37.2 or 1.36.3.")]

# A blank line starts a new paragraph in the help of typer.
_EPILOG: Final = "\n\n".join(
    (
        "Examples:",
        "gpunode cluster build",
        "gpunode cluster up --nodes 9",
        "gpunode cluster install",
        "export KUBECONFIG=$(gpunode cluster kubeconfig --path)",
        "gpunode cluster status -o json",
        "gpunode cluster down",
    )
)

app = typer.Typer(
    name="cluster",
    help="A real Kubernetes on this Linux machine: control plane, kubelets, containerd; no container engine needed.",
    epilog=_EPILOG,
    no_args_is_help=True,
)


@app.command(epilog="Example:  gpunode cluster build --kubernetes 1.36.3 --jobs 1")
def build(
    kubernetes: Kubernetes = DEFAULT_KUBERNETES,
    jobs: Annotated[int | None, typer.Option(min=1, help="Packages compiled at once; one a core by default.")] = None,
) -> None:
    """Compile Kubernetes, etcd and containerd from their Go modules (about ten minutes on two cores, once).

    Also installs the Debian packages that a cluster needs, if they are missing and this is root.
    """
    with _one_sentence(), progress() as report:
        building.check(kubernetes)
        packages.install(lambda step: report(step, 0.0))
        building.build(kubernetes, report, jobs)
    typer.echo(f"The binaries are in {cache_root()}. Next: gpunode cluster up")


@app.command(epilog="Example:  gpunode cluster up --nodes 9    (again: adds nodes, restarts what has died)")
def up(
    nodes: Annotated[int, typer.Option("--nodes", "-n", help="How many nodes.")] = 3,
    kubernetes: Kubernetes = DEFAULT_KUBERNETES,
    name: Name = "default",
    port: Annotated[int, typer.Option(help="Port of the API server on 127.0.0.1; the next four are used too.")] = (
        DEFAULT_PORT
    ),
    node_prefix: Annotated[str, typer.Option(help="Nodes are called PREFIX-0, PREFIX-1, ...")] = "gpu-node",
) -> None:
    """Start the cluster and wait until every node is Ready; repair or extend it if it is there already."""
    with _one_sentence():
        spec = ClusterSpec(name, nodes, kubernetes, port, node_prefix)
        started = time.monotonic()
        with progress() as report:
            cluster = bring_up(spec, report)
        took = time.monotonic() - started
        typer.echo(
            f"Cluster {name}: Kubernetes {kubernetes}, {nodes} nodes Ready after {took:.1f} s.\n\n"
            f"  export KUBECONFIG={cluster.kubeconfig}\n"
            f"  {cluster.kubectl} get nodes\n\n"
            f"Images in every node: localhost/busybox:1, localhost/pause:1. Logs: {cluster.logs}\n"
            f"gpunode and its fake GPUs: gpunode cluster install{_name_option(name)}\n"
            f"Stop it with: gpunode cluster down{_name_option(name)}"
        )


@app.command(epilog="Example:  gpunode cluster install --profile hgx-h100")
def install(
    name: Name = "default",
    profile: Annotated[
        str, typer.Option(help="Board that every node gets: one of `gpunode fake list`, or a YAML file.")
    ] = "dgx-a100-80",
    health_policy: Annotated[
        Path | None, typer.Option(help="Health policy file of all agents; see docs/health.md.", show_default=False)
    ] = None,
    mps: Annotated[bool, typer.Option("--mps", help="Start an MPS keeper on every node as well.")] = False,
) -> None:
    """Install gpunode: manifests, controller, and an agent with fake GPUs on every node.

    Again: starts what has died, and agents on nodes that were added. Processes that run keep their settings.
    """
    from gpunode.cluster.install import Installation
    from gpunode.cluster.install import install as run_install
    from gpunode.hardware.board import BoardError, board_names, load_board
    from gpunode.health.policy import PolicyError, load_policy

    with _one_sentence():
        require_root()
        cluster = _existing(name)
        try:
            load_board(profile)
            load_policy(health_policy)
        except (BoardError, PolicyError) as error:
            fail(str(error), 2)
        board = profile if profile in board_names() else str(Path(profile).absolute())
        policy = health_policy.absolute() if health_policy is not None else None
        wish = Installation(profile=board, health_policy=policy, mps=mps)
        with progress() as report:
            run_install(cluster, wish, report)
    typer.echo(f"gpunode runs on {len(cluster.nodes)} nodes of cluster {name}. Their GPUs: kubectl get resourceslices")


@app.command(epilog="Example:  gpunode cluster status -o json")
def status(
    name: Name = "default",
    output: Annotated[Format, typer.Option("--output", "-o", help="Format.")] = Format.TABLE,
) -> None:
    """Show every process of the cluster and whether its node is Ready. Exit status 1 if a part is not running."""
    with _one_sentence():
        cluster = _existing(name)
        if cluster.kubeconfig.exists() and not os.access(cluster.kubeconfig, os.R_OK):
            raise ClusterError(f"{cluster.kubeconfig} cannot be read: run this as root")
        rows = _rows(cluster)
        if output is Format.TABLE:
            _print_table(cluster, rows)
        else:
            document = {
                "name": name,
                "kubernetes": cluster.spec.kubernetes,
                "server": cluster.plan.server,
                "kubeconfig": str(cluster.kubeconfig),
                "components": rows,
            }
            emit(document, output)
    if not all(row["running"] and row["ready"] is not False for row in rows):
        raise typer.Exit(1)


@app.command(epilog="Example:  export KUBECONFIG=$(gpunode cluster kubeconfig --path)")
def kubeconfig(
    name: Name = "default",
    path: Annotated[bool, typer.Option("--path", help="Print where the file is, not what is in it.")] = False,
) -> None:
    """Print the administrator's kubeconfig."""
    with _one_sentence():
        file = _existing(name).kubeconfig
        try:
            typer.echo(file if path else file.read_text().rstrip())
        except OSError as error:
            raise ClusterError(f"{file} cannot be read ({error.strerror}): run this as root") from error


@app.command(epilog="Example:  gpunode cluster down --name default")
def down(name: Name = "default") -> None:
    """Stop the cluster and remove every process, mount, bridge, rule and file of it."""
    with _one_sentence():
        with progress() as report:
            existed = bring_down(name, report)
        typer.echo(f"Cluster {name} is gone." if existed else f"There is no cluster {name}: nothing to do.")


def _existing(name: str) -> Cluster:
    cluster = load(name)
    if cluster is None:
        raise ClusterError(f"there is no cluster {name}: run `gpunode cluster up{_name_option(name)}`")
    return cluster


def _name_option(name: str) -> str:
    return "" if name == "default" else f" --name {name}"


def _rows(cluster: Cluster) -> list[dict[str, Any]]:
    """One row a process: component, pid, running, and for kubelets whether the Node is Ready (else None)."""
    ready = cluster.node_status()
    rows: list[dict[str, Any]] = []
    for component in (*cluster.component_names(), *cluster.extra_names()):
        record = cluster.processes.get(component)
        node, _, part = component.rpartition(".")
        rows.append(
            {
                "component": component,
                "running": record is not None,
                "pid": record.pid if record else None,
                "ready": ready.get(node, False) if part == "kubelet" else None,
                "log": str(cluster.processes.log(component)),
            }
        )
    return rows


def _print_table(cluster: Cluster, rows: list[dict[str, Any]]) -> None:
    title = f"{cluster.spec.name}: Kubernetes {cluster.spec.kubernetes} at {cluster.plan.server}"
    cells = [(row["component"], str(row["pid"] or "-"), _state(row)) for row in rows]
    if not sys.stdout.isatty():
        typer.echo(title)
        for component, pid, state in cells:
            typer.echo(f"{component:<32} {pid:>8}  {state}")
        return
    table = Table(title=title)
    table.add_column("Component")
    table.add_column("PID", justify="right")
    table.add_column("State")
    for row, (component, pid, state) in zip(rows, cells, strict=True):
        good = row["running"] and row["ready"] is not False
        table.add_row(component, pid, f"[{'green' if good else 'red'}]{state}[/]")
    console().print(table)


def _state(row: dict[str, Any]) -> str:
    if not row["running"]:
        return "not running"
    return {None: "running", True: "running, Ready", False: "running, not Ready"}[row["ready"]]


@contextmanager
def _one_sentence() -> Iterator[None]:
    """An error that people can do something about is one sentence and exit status 1."""
    try:
        yield
    except ClusterError as error:
        fail(str(error))
