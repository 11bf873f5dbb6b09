"""Giving fault orders to agents on fake hardware; the only writer of the faults ConfigMap."""

import asyncio
import uuid

from gpunode.kube.client import Api
from gpunode.kube.errors import ApiError
from gpunode.kube.kinds import CONFIG_MAPS, SLICES
from gpunode.model.faults import FaultOrder, encode_orders, parse_orders
from gpunode.model.meta import ApiStruct
from gpunode.model.names import DEFAULT_DRIVER, FAULTS_CONFIGMAP, SYSTEM_NAMESPACE
from gpunode.model.times import stamp_now

_ANSWER_S = 10.0


class OrderError(Exception):
    """The order was not carried out; the text says why and what to do."""


class _Event(ApiStruct, frozen=True):
    reason: str = ""
    message: str = ""


def new_order(device: str = "", xid: int | None = None, recover: bool = False, scenario: str = "") -> FaultOrder:
    """An order with a fresh id."""
    at = stamp_now()
    return FaultOrder(id=uuid.uuid4().hex[:12], device=device, xid=xid, recover=recover, scenario=scenario, at=at)


async def give_order(api: Api, node: str, order: FaultOrder) -> None:
    """Hand an order to a node's agent and wait for its answer.

    Raises OrderError for an impossible order, an unknown node or device, a refusal, or no answer within ten seconds.
    """
    if problem := order.problem():
        raise OrderError(problem)
    await _check_target(api, node, order.device)
    await _append(api, node, order)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _ANSWER_S
    params = {"fieldSelector": f"involvedObject.kind=Node,involvedObject.name={node}"}
    while loop.time() < deadline:
        events, _ = await api.list("/api/v1/namespaces/default/events", _Event, params)
        for event in events:
            if order.id not in event.message:
                continue
            if event.reason == "FaultInjected":
                return
            if event.reason == "FaultOrderRefused":
                raise OrderError(f"the agent on {node} refused: {event.message}")
        await asyncio.sleep(0.1)
    raise OrderError(
        f"no agent on {node} answered within {_ANSWER_S:.0f} s; agents listen only on fake hardware "
        "(gpunode agent --backend fake) and with the rights in daemonset/fake"
    )


async def _check_target(api: Api, node: str, device: str) -> None:
    params = {"fieldSelector": f"spec.nodeName={node},spec.driver={DEFAULT_DRIVER}"}
    slices, _ = await api.list(SLICES.path(), SLICES.type, params)
    if not slices:
        raise OrderError(f"there is no node {node} with GPUs of {DEFAULT_DRIVER}; see kubectl get resourceslices")
    names = sorted(d.name for s in slices for d in s.spec.devices)
    if device and device not in names:
        raise OrderError(f"node {node} has no device {device}; it has {', '.join(names) or 'none'}")


async def _append(api: Api, node: str, order: FaultOrder) -> None:
    path = CONFIG_MAPS.path(SYSTEM_NAMESPACE, FAULTS_CONFIGMAP)
    for _ in range(5):
        try:
            await _try_append(api, path, node, order)
            return
        except ApiError as error:
            if not error.raced:
                raise
    raise OrderError(f"the ConfigMap {FAULTS_CONFIGMAP} is being changed by many at once; try again")


async def _try_append(api: Api, path: str, node: str, order: FaultOrder) -> None:
    try:
        current = await api.get(path, CONFIG_MAPS.type)
    except ApiError as error:
        if not error.not_found:
            raise
        body = {"metadata": {"name": FAULTS_CONFIGMAP}, "data": {node: encode_orders([order])}}
        await api.create(CONFIG_MAPS.path(SYSTEM_NAMESPACE), body)
        return
    orders, _ = parse_orders(current.data.get(node, "[]"))
    version = {"resourceVersion": current.metadata.resource_version}
    await api.patch(path, {"metadata": version, "data": {node: encode_orders([*orders, order])}})
