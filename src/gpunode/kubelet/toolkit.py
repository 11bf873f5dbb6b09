"""The driver's libraries, as the NVIDIA container toolkit finds them.

    nvidia-ctk cdi generate --format=json

prints a CDI document whose document-wide edits hold the library mounts, the hooks that make them usable and the nodes
all GPUs share; what it says about single devices is not used. Without the tool containers get device nodes only, and
bring their own libraries.

A driver that is not installed at the host's root is named with --driver-root.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from gpunode.kubelet.cdi import CommonEdits, Hook
from gpunode.kubelet.tool import run_tool
from gpunode.model.errors import HardwareError
from gpunode.model.injection import DeviceNode, Mount

TOOL: Final = "nvidia-ctk"
_TIMEOUT_S: Final = 60.0
_MAX_BYTES: Final = 4 * 2**20
_MAX_ITEMS: Final = 1024


class _Struct(msgspec.Struct, frozen=True, rename="camel"):
    """Carries the codec settings only."""


class _Node(_Struct, frozen=True):
    path: str
    host_path: str = ""


class _Mount(_Struct, frozen=True):
    host_path: str
    container_path: str
    options: tuple[str, ...] = ()


class _Edits(_Struct, frozen=True):
    env: tuple[str, ...] = ()
    device_nodes: tuple[_Node, ...] = ()
    mounts: tuple[_Mount, ...] = ()
    hooks: tuple[Hook, ...] = ()


class _Document(_Struct, frozen=True):
    container_edits: _Edits = _Edits()


def common_edits(command: Sequence[str] | None, driver: str = "/") -> CommonEdits:
    """Ask the toolkit; empty where it is not installed. Blocks for seconds; ask again when the driver changed.

    command: how its command line begins, None where it is not installed. driver: where the driver is on the host.

    Raises HardwareError when the toolkit is there and fails, or finds nothing: containers without libraries would
    start and only then fail, for a reason nobody sees.
    """
    if command is None:
        return CommonEdits()
    asked = [*command, "cdi", "generate", "--format=json", *(["--driver-root", driver] if driver != "/" else [])]
    return parse(run_tool(asked, _TIMEOUT_S, _MAX_BYTES))


def parse(document: bytes) -> CommonEdits:
    """The document-wide edits of a CDI document. Raises HardwareError when it is not one, or mounts nothing.

    Nodes and mounts by path, so that a tool that lists the same in another order changes no file; hooks run in order.
    """
    if len(document) > _MAX_BYTES:
        raise HardwareError(f"{TOOL} cdi generate printed more than {_MAX_BYTES} bytes")
    try:
        edits = msgspec.json.decode(document, type=_Document).container_edits
    except (msgspec.DecodeError, RecursionError) as error:
        raise HardwareError(f"{TOOL} cdi generate printed no CDI document: {error}") from error
    if not edits.mounts:
        raise HardwareError(f"{TOOL} cdi generate found no driver libraries; is the driver loaded, is its root right?")
    if max(len(edits.mounts), len(edits.hooks), len(edits.env), len(edits.device_nodes)) > _MAX_ITEMS:
        raise HardwareError(f"{TOOL} cdi generate lists more than {_MAX_ITEMS} items of a kind")
    nodes = sorted(edits.device_nodes, key=lambda node: node.path)
    mounts = sorted(edits.mounts, key=lambda mount: mount.container_path)
    return CommonEdits(
        env=tuple((name, value) for name, _, value in (item.partition("=") for item in edits.env)),
        nodes=tuple(DeviceNode(node.host_path or node.path, node.path) for node in nodes),
        mounts=tuple(Mount(m.host_path, m.container_path, m.options) for m in mounts),
        hooks=edits.hooks,
    )
