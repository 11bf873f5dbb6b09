"""`gpunode faults`: make fake GPUs fail, and recover."""

import asyncio
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.cli.connect import Kubeconfig, chosen, run
from gpunode.cli.output import console, fail
from gpunode.model.faults import FaultOrder, encode_orders, parse_orders
from gpunode.model.meta import ApiStruct
from gpunode.model.names import DEFAULT_DRIVER, FAULTS_CONFIGMAP, SYSTEM_NAMESPACE

if TYPE_CHECKING:
    from gpunode.kube.client import Api

app = typer.Typer(help="Make fake GPUs fail and recover (agents on real GPUs never listen).", no_args_is_help=True)
_ANSWER_S = 10.0

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
    order = FaultOrder(id=_order_id(), device=device, xid=xid, at=_now())
    run(lambda: _give(node, order, kubeconfig))
    console().print(f"XID {xid} raised on {device} of {node}")


@app.command()
def recover(node: Node, device: Device, kubeconfig: Kubeconfig = None) -> None:
    """Undo what was done to one fake GPU, as a reset would.

    Example: [bold]gpunode faults recover --node gpu-node-0 --device gpu-0000-07-00-0[/bold]
    """
    order = FaultOrder(id=_order_id(), device=device, recover=True, at=_now())
    run(lambda: _give(node, order, kubeconfig))
    console().print(f"{device} of {node} is itself again")


async def _give(node: str, order: FaultOrder, kubeconfig: Kubeconfig) -> None:
    """Hand the order over and wait for the agent's answer."""
    from gpunode.kube.client import Api

    async with await Api.connect(chosen(kubeconfig), "gpunode-cli") as api:
        await _check_target(api, node, order.device)
        await _append(api, node, order)
        deadline = asyncio.get_running_loop().time() + _ANSWER_S
        while asyncio.get_running_loop().time() < deadline:
            params = {"fieldSelector": f"involvedObject.kind=Node,involvedObject.name={node}"}
            events, _ = await api.list("/api/v1/namespaces/default/events", _CoreEvent, params)
            for event in events:
                if order.id in event.message:
                    if event.reason == "FaultInjected":
                        return
                    fail(f"the agent on {node} refused: {event.message}")
            await asyncio.sleep(0.1)
    fail(
        f"no agent on {node} answered within {_ANSWER_S:.0f} s; agents listen only on fake hardware "
        f"(gpunode agent --backend fake) and with the rights in daemonset/fake"
    )


class _CoreEvent(ApiStruct, frozen=True):
    reason: str = ""
    message: str = ""


async def _check_target(api: "Api", node: str, device: str) -> None:
    from gpunode.kube.kinds import SLICES

    params = {"fieldSelector": f"spec.nodeName={node},spec.driver={DEFAULT_DRIVER}"}
    slices, _ = await api.list(SLICES.path(), SLICES.type, params)
    if not slices:
        fail(f"there is no node {node} with GPUs of {DEFAULT_DRIVER}; see kubectl get resourceslices")
    names = sorted(d.name for s in slices for d in s.spec.devices)
    if device not in names:
        fail(f"node {node} has no device {device}; it has {', '.join(names) or 'none'}")


async def _append(api: "Api", node: str, order: FaultOrder) -> None:
    from gpunode.kube.errors import ApiError
    from gpunode.kube.kinds import CONFIG_MAPS

    path = CONFIG_MAPS.path(SYSTEM_NAMESPACE, FAULTS_CONFIGMAP)
    for _ in range(5):
        try:
            current = await api.get(path, CONFIG_MAPS.type)
        except ApiError as error:
            if not error.not_found:
                raise
            body = {"metadata": {"name": FAULTS_CONFIGMAP}, "data": {node: encode_orders([order])}}
            await api.create(CONFIG_MAPS.path(SYSTEM_NAMESPACE), body)
            return
        orders, _ = parse_orders(current.data.get(node, "[]"))
        patch = {
            "metadata": {"resourceVersion": current.metadata.resource_version},
            "data": {node: encode_orders([*orders, order])},
        }
        try:
            await api.patch(path, patch)
        except ApiError as error:
            if error.conflict:
                continue
            raise
        return
    fail(f"the ConfigMap {FAULTS_CONFIGMAP} is being changed by many at once; try again")


def _order_id() -> str:
    return uuid.uuid4().hex[:12]


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
