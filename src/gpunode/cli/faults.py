"""`gpunode faults`: make fake GPUs fail, and recover."""

from typing import Annotated

import typer

from gpunode.cli.connect import Kubeconfig, chosen, run
from gpunode.cli.output import Format, console, emit, fail
from gpunode.model.faults import FaultOrder

app = typer.Typer(help="Make fake GPUs fail and recover (agents on real GPUs never listen).", no_args_is_help=True)

Node = Annotated[str, typer.Option("--node", help="Node of the GPU.", show_default=False)]
Device = Annotated[
    str, typer.Option("--device", help="DRA device name, as in kubectl get resourceslices.", show_default=False)
]


@app.command()
def inject(
    node: Node,
    device: Device,
    xid: Annotated[int, typer.Option("--xid", min=1, max=999, help="XID code to raise.", show_default=False)],
    kubeconfig: Kubeconfig = None,
) -> None:
    """Raise an XID on one fake GPU: NVML event and kernel log line, as the driver would.

    Example: [bold]gpunode faults inject --node gpu-node-0 --device gpu-0000-07-00-0 --xid 79[/bold]
    """
    from gpunode.agent.orders import new_order

    _give(node, new_order(device, xid=xid), kubeconfig)
    console().print(f"XID {xid} raised on {device} of {node}")


@app.command()
def recover(node: Node, device: Device, kubeconfig: Kubeconfig = None) -> None:
    """Undo what was done to one fake GPU, as a reset would; its faults are over at once, without a hold-down.

    Example: [bold]gpunode faults recover --node gpu-node-0 --device gpu-0000-07-00-0[/bold]
    """
    from gpunode.agent.orders import new_order

    _give(node, new_order(device, recover=True), kubeconfig)
    console().print(f"{device} of {node} is itself again")


@app.command()
def play(
    scenario: Annotated[str, typer.Argument(help="Name, as in gpunode faults scenarios, or a YAML file.")],
    node: Node,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Play a fault scenario on a node's fake GPUs: each step at its time, from now on.

    Example: [bold]gpunode faults play two-faults-one-ends --node gpu-node-0[/bold]
    """
    import msgspec

    from gpunode.agent.orders import new_order
    from gpunode.health.scenario import ScenarioError, load_scenario

    try:
        script = load_scenario(scenario)
    except ScenarioError as error:
        fail(str(error), 2)
    _give(node, new_order(scenario=msgspec.json.encode(script).decode()), kubeconfig)
    console().print(
        f"{script.name} begins on {node} and takes {script.seconds:g} s: {script.description}", markup=False
    )


@app.command()
def scenarios(
    output: Annotated[Format, typer.Option("-o", "--output", help="How to print it.")] = Format.TABLE,
) -> None:
    """List the fault scenarios that come with gpunode.

    Example: [bold]gpunode faults scenarios[/bold]
    """
    from rich.table import Table

    from gpunode.health.scenario import load_scenario, scenario_names

    scripts = list(map(load_scenario, scenario_names()))
    if output is not Format.TABLE:
        emit([{"name": s.name, "seconds": s.seconds, "description": s.description} for s in scripts], output)
        return
    table = Table("NAME", "SECONDS", "WHAT HAPPENS", box=None, pad_edge=False)
    for script in scripts:
        table.add_row(script.name, f"{script.seconds:g}", script.description)
    console().print(table)


def _give(node: str, order: FaultOrder, kubeconfig: Kubeconfig) -> None:
    from gpunode.agent.orders import OrderError, give_order
    from gpunode.kube.client import Api

    async def give() -> None:
        async with await Api.connect(chosen(kubeconfig), "gpunode-cli") as api:
            await give_order(api, node, order)

    try:
        run(give)
    except OrderError as error:
        fail(str(error))
