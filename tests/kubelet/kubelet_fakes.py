"""The other sides of the kubelet plugin: an API server that knows claims, a kubelet that dials unix sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import msgspec

from gpunode.kubelet.cdi import CdiStore
from gpunode.kubelet.checkpoint import CheckpointFile
from gpunode.kubelet.files import NodeLock
from gpunode.kubelet.plugin import KubeletPaths
from gpunode.kubelet.prepare import PrepareEngine
from gpunode.kubelet.proto import registration_v1_pb2 as registration
from gpunode.kubelet.resolve import ClaimRef, Node
from gpunode.model.injection import DeviceNode, DeviceNodes
from gpunode.model.resource import ResourceClaim

DRIVER = "gpu.gpunode.dev"
POOL = "node-1"
BOOT = "boot-1"
GPUS = tuple(f"gpu-0000-{bus:02x}-00-0" for bus in range(8))


def uid(n: int) -> str:
    return f"{n:08x}-0000-4000-8000-000000000000"


def gpu_nodes(index: int) -> DeviceNodes:
    return DeviceNodes(
        uuid=f"GPU-{index}",
        pci=f"0000:{index:02x}:00.0",
        nodes=(DeviceNode(f"/host/nvidia{index}", f"/dev/nvidia{index}"),),
        control=(DeviceNode("/host/nvidiactl", "/dev/nvidiactl"),),
        env={f"GPUNODE_GPU_{index}": f"GPU-{index}"},
    )


def all_devices() -> dict[str, DeviceNodes]:
    return {name: gpu_nodes(i) for i, name in enumerate(GPUS)}


def result(device: str, request: str = "gpus", **fields: Any) -> dict[str, Any]:
    return {"request": request, "driver": DRIVER, "pool": POOL, "device": device, **fields}


def claim(n: int, *results: dict[str, Any] | str, name: str = "", config: Any = (), **status: Any) -> ResourceClaim:
    """Claim number n, in namespace ns, allocated the given devices."""
    rows = [result(r) if isinstance(r, str) else r for r in results]
    return msgspec.convert(
        {
            "metadata": {"namespace": "ns", "name": name or f"claim-{n}", "uid": uid(n)},
            "status": {"allocation": {"devices": {"results": rows, "config": list(config)}}, **status},
        },
        type=ResourceClaim,
    )


def ref(of: ResourceClaim) -> ClaimRef:
    return ClaimRef(of.metadata.namespace, of.metadata.name, of.metadata.uid)


class FakeApi:
    """Claims by (namespace, name); `fail` is raised instead of answering."""

    def __init__(self, *claims: ResourceClaim) -> None:
        self.claims = {(c.metadata.namespace, c.metadata.name): c for c in claims}
        self.fail: Exception | None = None

    def put(self, claim: ResourceClaim) -> ResourceClaim:
        self.claims[claim.metadata.namespace, claim.metadata.name] = claim
        return claim

    async def get(self, namespace: str, name: str) -> ResourceClaim:
        if self.fail is not None:
            raise self.fail
        return self.claims[namespace, name]


def make_engine(
    tmp: Path,
    api: FakeApi,
    boot: str = BOOT,
    devices: Callable[[], dict[str, DeviceNodes]] = all_devices,
    **more: Any,
) -> PrepareEngine:
    """An engine on the files under `tmp`; two on the same directory are two plugin instances."""
    paths = KubeletPaths(tmp / "kubelet", tmp / "cdi")
    paths.plugin_dir(DRIVER).mkdir(parents=True, exist_ok=True)
    return PrepareEngine(
        node=Node(DRIVER, POOL, boot),
        claims=api,
        devices=devices,
        checkpoint=CheckpointFile(paths.checkpoint(DRIVER)),
        cdi=CdiStore(paths.cdi, DRIVER),
        lock=NodeLock(paths.lock(DRIVER), timeout_s=5),
        **more,
    )


def cdi_files(tmp: Path) -> dict[str, Any]:
    directory = tmp / "cdi"
    return {p.name: msgspec.json.decode(p.read_bytes()) for p in directory.iterdir()} if directory.is_dir() else {}


class FakeKubelet:
    """Does what the kubelet does with a registration socket: dial, GetInfo, then tell how it went."""

    def __init__(self, paths: KubeletPaths) -> None:
        self._paths = paths

    def sockets(self) -> list[Path]:
        return sorted(self._paths.registry.glob("*.sock"))

    async def register(self, socket: Path, accept: bool = True, error: str = "") -> registration.PluginInfo:
        async with dial(socket) as channel:
            info = await call(channel, "/pluginregistration.Registration/GetInfo", registration.InfoRequest(),
                              registration.PluginInfo)  # fmt: skip
            status = registration.RegistrationStatus(plugin_registered=accept, error=error)
            await call(channel, "/pluginregistration.Registration/NotifyRegistrationStatus", status,
                       registration.RegistrationStatusResponse)  # fmt: skip
            return info


@asynccontextmanager
async def dial(socket: Path | str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"unix://{socket}") as channel:
        yield channel


async def call(channel: grpc.aio.Channel, method: str, request: Any, answer: Any) -> Any:
    stub = channel.unary_unary(
        method, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
    )
    return await stub(request, timeout=10, wait_for_ready=True)


async def dra(channel: grpc.aio.Channel, pb: ModuleType, verb: str, refs: list[ClaimRef]) -> Any:
    """NodePrepareResources or NodeUnprepareResources in the version that `pb` has the messages of."""
    service = pb.DESCRIPTOR.services_by_name["DRAPlugin"].full_name
    request = getattr(pb, f"Node{verb}ResourcesRequest")(
        claims=[pb.Claim(namespace=r.namespace, uid=r.uid, name=r.name) for r in refs]
    )
    return await call(channel, f"/{service}/Node{verb}Resources", request, getattr(pb, f"Node{verb}ResourcesResponse"))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that something else makes true; fails after ten seconds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)
