"""`gpunode claims`: what this node has prepared, by the agent's own book; with --node, what the API server says of one.

`gpunode claim lint`: checks of manifests, without an API server.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
import yaml
from rich.markup import escape
from rich.table import Table

from gpunode.cli.connect import Kubeconfig
from gpunode.cli.output import Format, console, emit, fail
from gpunode.model.names import DEFAULT_DRIVER
from gpunode.model.wording import why

if TYPE_CHECKING:
    from gpunode.kubelet.checkpoint import Entry, HeldDevice, Loaded


Driver = Annotated[str, typer.Option(help="DRA driver name.")]
_LINTED: Final = ("ResourceClaim", "ResourceClaimTemplate", "DeviceClass")
claim = typer.Typer(help="Claims as manifests.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command()(claims)
    app.add_typer(claim, name="claim")


@claim.callback()
def _group() -> None:
    """Claims as manifests."""


@claim.command()
def lint(
    file: Annotated[Path, typer.Argument(help="Claims, claim templates or device classes, YAML or JSON; - for input.")],
    driver: Driver = DEFAULT_DRIVER,
) -> None:
    """Check the driver's parameters in claims, claim templates and device classes, as the node will.

    Example: [bold]gpunode claim lint my-claim.yaml[/bold]
    """
    from gpunode.kubelet.config import lint as problems_of

    try:
        text = typer.get_text_stream("stdin").read() if str(file) == "-" else file.read_text()
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fail(f"{file} cannot be read: {why(error)}", 2)
    found = [f"{_name(document)}: {problem}" for document in documents for problem in problems_of(document, driver)]
    if found:
        fail("\n".join(found))
    checked = sum(isinstance(document, dict) and document.get("kind") in _LINTED for document in documents)
    if not checked:
        fail(f"{file}: there is no claim, claim template or device class in it, so nothing was checked")
    typer.echo(f"{file}: {'1 object' if checked == 1 else f'{checked} objects'}, all in order")


def _name(document: object) -> str:
    """Kind and name of a manifest, as far as it has them."""
    if not isinstance(document, dict):
        return "document"
    metadata = document.get("metadata")
    name = metadata.get("name", "?") if isinstance(metadata, dict) else "?"
    return f"{document.get('kind', 'object')} {name}"


def claims(
    node: Annotated[
        str,
        typer.Option(help="Ask the API server about this node, from anywhere.", show_default="the files of this node"),
    ] = "",
    kubeconfig: Kubeconfig = None,
    kubelet_dir: Annotated[Path, typer.Option(help="The kubelet's --root-dir.")] = Path("/var/lib/kubelet"),
    driver: Driver = DEFAULT_DRIVER,
    output: Annotated[Format, typer.Option("-o", "--output", help="How to print it.")] = Format.TABLE,
) -> None:
    """Show the claims that this node holds, or those allocated on another one, and which devices each of them has.

    Example: [bold]gpunode claims -o yaml[/bold] as root on a node,
    [bold]gpunode claims --node gpu-node-0[/bold] with a kubeconfig
    """
    if node:
        _of_node(kubeconfig, node, driver, output)
        return
    if kubeconfig is not None:
        fail("--kubeconfig goes with --node; without them the files of this node are read", 2)
    loaded = _read(kubelet_dir, driver)
    entries = sorted(loaded.entries.values(), key=lambda e: (e.namespace, e.name))
    if output is not Format.TABLE:
        emit({"claims": [_plain(entry) for entry in entries], "problems": list(loaded.problems)}, output)
    else:
        console().print(_table(entries) if entries else "this node holds no claims")
    if loaded.problems:
        fail("; ".join(loaded.problems) + "; the agent sets this right from the API server")


def _of_node(kubeconfig: Path | None, node: str, driver: str, output: Format) -> None:
    from gpunode.cli import node_claims

    found = node_claims.plain(node_claims.read(kubeconfig, node), node, driver)
    if output is not Format.TABLE:
        emit({"claims": found}, output)
    else:
        console().print(node_claims.table(found) if found else f"no claims have devices of {driver} on {node}")


def _read(kubelet_dir: Path, driver: str) -> "Loaded":
    """Ends the program where there is no agent of that driver, or no right to read its files."""
    from gpunode.kubelet.checkpoint import CheckpointFile
    from gpunode.kubelet.plugin import KubeletPaths

    paths = KubeletPaths(kubelet_dir)
    try:
        if not paths.plugin_dir(driver).is_dir():
            fail(f"no agent of {driver} has run here: there is no {paths.plugin_dir(driver)} (--kubelet-dir, --driver)")
        return CheckpointFile(paths.checkpoint(driver)).peek()
    except PermissionError as error:
        fail(f"{error.filename} cannot be read: run this as root on the node")
    except OSError as error:
        fail(f"{paths.checkpoint(driver)} cannot be read: {error.strerror}")


def _plain(entry: "Entry") -> dict[str, Any]:
    return {
        "namespace": entry.namespace,
        "name": entry.name,
        "uid": entry.uid,
        "state": entry.state.value,
        "bootID": entry.boot_id,
        "devices": [_plain_device(entry, held) for held in entry.devices],
    }


def _plain_device(entry: "Entry", held: "HeldDevice") -> dict[str, Any]:
    from gpunode.kubelet.cdi import device_id

    found = {
        "device": held.device,
        "requests": list(held.requests),
        "uuid": held.nodes.uuid,
        "cdi": device_id(entry.uid, held),
        "deviceNodes": [node.host_path for node in held.nodes.nodes],
        "adminAccess": held.admin,
        "shareID": held.share_id,
        "consumedCapacity": dict(held.consumed),
        "sharing": type(held.sharing).__name__ if held.sharing else None,
    }
    return {name: value for name, value in found.items() if value}


def _table(entries: "list[Entry]") -> Table:
    table = Table("CLAIM", "STATE", "DEVICE", "REQUESTS", "UUID", "HOW", box=None, pad_edge=False)
    for entry in entries:
        for index, held in enumerate(entry.devices):
            how = [
                "admin access" if held.admin else "",
                f"share {held.share_id[:13]}" if held.share_id else "",
                type(held.sharing).__name__ if held.sharing else "",
            ]
            first = (entry.key, entry.state.value) if index == 0 else ("", "")
            table.add_row(
                *first,
                held.device,
                escape(", ".join(held.requests)),
                escape(held.nodes.uuid),
                ", ".join(part for part in how if part),
            )
    return table
