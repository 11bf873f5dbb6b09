"""`gpunode quarantine`: take a GPU out of service by a person's word, and give it back."""

import getpass
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpunode.cli.connect import Kubeconfig, chosen, run
from gpunode.cli.output import Format, console, emit, fail
from gpunode.model.hardware import PARTITION_MARK
from gpunode.model.names import DEFAULT_DRIVER, QUARANTINE_TAINT

if TYPE_CHECKING:
    from gpunode.kube.client import Api
    from gpunode.kube.kinds import Kind
    from gpunode.model.resource import DeviceTaintRule

REASON_ANNOTATION = "gpunode.dev/reason"


@dataclass(frozen=True)
class Target:
    """A device as slices name it; its partitions go with it."""

    driver: str
    node: str
    device: str


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(quarantine)


def quarantine(
    node: Annotated[str, typer.Argument(help="Node of the GPU.", show_default=False)],
    device: Annotated[str, typer.Argument(help="DRA device name; a GPU's partitions go with it.", show_default=False)],
    reason: Annotated[str, typer.Option("--reason", help="Why, for whoever finds it later.")] = "",
    lift: Annotated[bool, typer.Option("--lift", help="Give the GPU back.")] = False,
    kubeconfig: Kubeconfig = None,
    driver: Annotated[str, typer.Option(help="DRA driver name.")] = DEFAULT_DRIVER,
    output: Annotated[Format, typer.Option("-o", "--output", help="How to print it.")] = Format.TABLE,
) -> None:
    """Take a GPU out of service until you give it back, whatever health says of it.

    Nothing new is placed there, and the controller moves the gang that runs there to other GPUs. It is a
    DeviceTaintRule, so it outlives node and agent.

    Example: [bold]gpunode quarantine gpu-node-0 gpu-0000-07-00-0 --reason "board to be swapped, ticket 4711"[/bold]
    """
    if bool(reason) == lift:
        fail("give either --reason TEXT or --lift", 2)

    target = Target(driver, node, device)

    async def change() -> list[str]:
        from gpunode.kube.client import Api
        from gpunode.kube.kinds import discover

        async with await Api.connect(chosen(kubeconfig), "gpunode-cli") as api:
            kind = (await discover(api)).taint_rules
            if kind is None:
                fail("this cluster serves no DeviceTaintRule: enable resource.k8s.io/v1beta2 or newer")
            if lift:
                return await _lift(api, kind, target)
            return await _impose(api, kind, target, reason)

    names = run(change)
    if output is not Format.TABLE:
        emit({"node": node, "devices": names, "quarantine": not lift, "reason": reason}, output)
        return
    devices = "1 device" if len(names) == 1 else f"{len(names)} devices"
    if lift:
        console().print(f"{device} of {node} is in service again ({devices})")
    else:
        console().print(f"{device} of {node} is in quarantine ({devices}); --lift ends it")


async def _impose(api: "Api", kind: "Kind[DeviceTaintRule]", target: Target, reason: str) -> list[str]:
    """Names of the devices that are in quarantine now. Ends the command if there is no such device."""
    from gpunode.kube.kinds import SLICES

    params = {"fieldSelector": f"spec.nodeName={target.node},spec.driver={target.driver}"}
    slices, _ = await api.list(SLICES.path(), SLICES.type, params)
    published = sorted({d.name for s in slices for d in s.spec.devices})
    found = [name for name in published if _within(name, target.device)]
    if not found:
        fail(f"node {target.node} publishes no device {target.device}; it has: {', '.join(published) or 'none'}")
    for name in found:
        await _write(api, kind, replace(target, device=name), f"{reason} ({getpass.getuser()})")
    return found


async def _write(api: "Api", kind: "Kind[DeviceTaintRule]", target: Target, reason: str) -> None:
    """Create one device's rule; where it is there already the new reason goes into it."""
    from gpunode.kube.errors import ApiError

    body = rule(kind.group_version, target, reason)
    name, annotations = body["metadata"]["name"], body["metadata"]["annotations"]
    try:
        await api.create(kind.path(), body)
        return
    except ApiError as error:
        if error.status != 409:
            raise
    if not _is_quarantine(await api.get(kind.path(name=name), kind.type), target):
        fail(
            f"DeviceTaintRule {name} exists and is no quarantine of {target.device} of {target.node}: look at it, then "
            "delete it"
        )
    await api.patch(kind.path(name=name), {"metadata": {"annotations": annotations}})


async def _lift(api: "Api", kind: "Kind[DeviceTaintRule]", target: Target) -> list[str]:
    """Names of the devices that were in quarantine. Ends the command if there is none."""
    from gpunode.kube.errors import ApiError

    rules, _ = await api.list(kind.path(), kind.type)
    found = [one for one in rules if _is_quarantine(one, target)]
    if not found:
        fail(f"{target.device} of {target.node} is not in quarantine; kubectl get devicetaintrules lists what is")
    for one in found:
        try:
            await api.delete(kind.path(name=one.metadata.name), {"preconditions": {"uid": one.metadata.uid}})
        except ApiError as error:
            if not error.not_found:  # somebody else lifted it meanwhile
                raise
    return sorted({s.device for one in found if (s := one.spec.device_selector) is not None and s.device})


def rule(api_version: str, target: Target, reason: str) -> dict[str, Any]:
    """The DeviceTaintRule that keeps one device out of service."""
    return {
        "apiVersion": api_version,
        "kind": "DeviceTaintRule",
        "metadata": {
            "name": f"gpunode-quarantine-{target.node}-{target.device}"[:253].rstrip("-."),
            "annotations": {REASON_ANNOTATION: reason},
        },
        "spec": {
            "deviceSelector": {"driver": target.driver, "pool": target.node, "device": target.device},
            "taint": {"key": QUARANTINE_TAINT, "value": "true", "effect": "NoSchedule"},
        },
    }


def _is_quarantine(rule: "DeviceTaintRule", target: Target) -> bool:
    selector = rule.spec.device_selector
    return (
        rule.spec.taint.key == QUARANTINE_TAINT
        and selector is not None
        and (selector.driver, selector.pool) == (target.driver, target.node)
        and _within(selector.device or "", target.device)
    )


def _within(name: str, device: str) -> bool:
    """Whether a device is this one, or a partition of it."""
    return name == device or name.startswith(device + PARTITION_MARK)
