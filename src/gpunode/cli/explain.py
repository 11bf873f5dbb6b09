"""`gpunode explain`: why a gang is where it is, in one sentence."""

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.markup import escape

from gpunode.cli.connect import Kubeconfig, chosen, run
from gpunode.cli.output import Format, console, emit, fail
from gpunode.model.core import Pod
from gpunode.model.gang import Config, Reason, Snapshot
from gpunode.model.names import DEFAULT_DRIVER


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(explain)


def explain(
    what: Annotated[str, typer.Argument(metavar="podgroup/NAME|pod/NAME", help="The gang to explain.")],
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Its namespace.")] = "default",
    output: Annotated[Format, typer.Option("-o", "--output", help="How to print it.")] = Format.TABLE,
    kubeconfig: Kubeconfig = None,
    driver: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="As the controller's --driver, where it has one.", show_default=DEFAULT_DRIVER
        ),
    ] = None,
    blast_share: Annotated[float, typer.Option(min=0, max=1, help="As the controller's --blast-share.")] = 0.2,
) -> None:
    """Say why a gang waits, or where it was placed. A pod of a group is explained as its group.

    Example: [bold]gpunode explain podgroup/train[/bold]
    """
    kind, _, name = what.partition("/")
    if kind not in ("podgroup", "pod") or not name:
        fail(f"{what!r} is not podgroup/NAME or pod/NAME", 2)
    config = Config(drivers=frozenset(driver or [DEFAULT_DRIVER]), blast_share=blast_share)
    gang, reason = run(lambda: _reason(kind, namespace, name, kubeconfig, config))
    if output is Format.TABLE:
        whose = "" if gang == what else f", the gang of {what},"
        console().print(f"[bold]{gang}[/bold]{whose} in {namespace}: {reason.code.value}\n{escape(reason.text)}")
    else:
        emit({"gang": gang, "namespace": namespace, "reason": reason.code.value, "text": reason.text,
              "facts": reason.facts}, output)  # fmt: skip


async def _reason(kind: str, namespace: str, name: str, kubeconfig: Kubeconfig, config: Config) -> tuple[str, Reason]:
    """The gang as podgroup/NAME or pod/NAME, and where it stands."""
    from gpunode.controller.world import read_snapshot
    from gpunode.gang.explain import explain as explain_gang
    from gpunode.kube.client import Api
    from gpunode.kube.kinds import discover

    async with await Api.connect(chosen(kubeconfig), "gpunode-cli") as api:
        snapshot = await read_snapshot(api, await discover(api))
    key = f"{namespace}/{name}"
    known = snapshot.pod_groups if kind == "podgroup" else snapshot.pods
    if key not in known:
        fail(f"there is no {kind} {name} in namespace {namespace}; see kubectl get {kind}s -n {namespace}")
    if kind == "pod" and (group := _group(snapshot, snapshot.pods[key])):
        kind, name = "podgroup", group
    return f"{kind}/{name}", explain_gang(snapshot, f"{kind}/{namespace}/{name}", datetime.now(UTC), config)


def _group(snapshot: Snapshot, pod: Pod) -> str:
    """The group whose gang a pod is a member of, "" for a gang of its own (also in a group of the basic policy)."""
    group = pod.spec.scheduling_group
    name = (group.pod_group_name or "") if group is not None else ""
    found = snapshot.pod_groups.get(f"{pod.metadata.namespace}/{name}")
    return name if found is None or found.spec.scheduling_policy.gang is not None else ""
