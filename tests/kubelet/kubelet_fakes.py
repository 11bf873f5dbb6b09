"""The other sides of the kubelet plugin: an API server that knows claims, a kubelet that dials unix sockets."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import msgspec

from gpunode.kubelet.cdi import CdiStore, spec
from gpunode.kubelet.checkpoint import CheckpointFile, Entries, State
from gpunode.kubelet.config import Mps, Sharing
from gpunode.kubelet.effects import Effects
from gpunode.kubelet.ledger import Ledger
from gpunode.kubelet.lock import NodeLock
from gpunode.kubelet.mps.control import MpsDaemons, Patience
from gpunode.kubelet.mps.files import DaemonState, KeeperState, MpsFiles, Phase, Wanted, encode, read
from gpunode.kubelet.plugin import KubeletPaths
from gpunode.kubelet.prepare import PrepareEngine
from gpunode.kubelet.proto import registration_v1_pb2 as registration
from gpunode.kubelet.resolve import ClaimRef, Node, conflict
from gpunode.kubelet.seams import Notice, SharingControl, Steps, no_step
from gpunode.kubelet.sharing import Strategies
from gpunode.model.errors import HardwareError, InUseError
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
        cdi=more.pop("cdi", None) or CdiStore(paths.cdi, DRIVER),
        lock=more.pop("lock", None) or NodeLock(paths.lock(DRIVER), timeout_s=5),
        **more,
    )


def cdi_files(tmp: Path) -> dict[str, Any]:
    directory = tmp / "cdi"
    return {p.name: msgspec.json.decode(p.read_bytes()) for p in directory.iterdir()} if directory.is_dir() else {}


PARTITIONS = tuple(f"{GPUS[7]}-mig-{name}" for name in ("1g-10gb-0", "3g-40gb-4"))


def with_partitions() -> dict[str, DeviceNodes]:
    """Eight GPUs, the last of which also offers partitions that are made on demand."""
    return all_devices() | {name: DeviceNodes(uuid="", parent=GPUS[7], dynamic=True) for name in PARTITIONS}


class FakePartitioner:
    """Partitions as files, so that they outlive a kill: `<name>.gi` is half-made, `<name>.ci` completes it."""

    def __init__(self, directory: Path, step: Steps = no_step) -> None:
        self.directory = directory
        self.step = step
        self.broken: set[str] = set()
        self.in_use: set[str] = set()
        directory.mkdir(parents=True, exist_ok=True)

    def create(self, device: str) -> DeviceNodes:
        if device in self.broken:
            raise HardwareError("Unknown Error")
        gi, ci = self._files(device)
        if not ci.exists():
            gi.unlink(missing_ok=True)
            self.step(f"gpu instance {device}")
            gi.touch()
            self.step(f"compute instance {device}")
            ci.touch()
        index = PARTITIONS.index(device)
        return DeviceNodes(uuid=f"MIG-{index}", nodes=(DeviceNode(f"/host/cap{index}", f"/dev/cap{index}"),))

    def remove(self, device: str) -> None:
        if device in self.in_use:
            raise InUseError("In use by another client")
        for file in reversed(self._files(device)):
            self.step(f"remove {file.name}")
            file.unlink(missing_ok=True)

    def existing(self) -> frozenset[str]:
        return frozenset(file.stem for file in self.directory.iterdir())

    def _files(self, device: str) -> tuple[Path, Path]:
        return self.directory / f"{device}.gi", self.directory / f"{device}.ci"


class FakeSharing:
    """The sharing of each device as a file that says which claim set it to what."""

    def __init__(self, directory: Path, step: Steps = no_step) -> None:
        self.directory = directory
        self.step = step
        self.broken: set[str] = set()
        self.silent: dict[str, str] = {}
        directory.mkdir(parents=True, exist_ok=True)

    def refuses(self, wanted: Mapping[Sharing, Mapping[str, DeviceNodes]]) -> str:
        return ""

    def apply(self, uid: str, sharing: Sharing, devices: Mapping[str, DeviceNodes]) -> Mapping[str, DeviceNodes]:
        for device in devices:
            self._check(device)
            self.step(f"set sharing of {device}")
            (self.directory / device).write_bytes(msgspec.json.encode(sharing))
        return {
            name: msgspec.structs.replace(nodes, env=nodes.env | {"SHARED": uid}) for name, nodes in devices.items()
        }

    def reset(self, uid: str, sharing: Sharing, devices: Mapping[str, DeviceNodes]) -> None:
        for device in devices:
            self.clear(device)

    def active(self) -> frozenset[str]:
        return frozenset(file.name for file in self.directory.iterdir())

    def clear(self, device: str) -> None:
        self._check(device)
        self.step(f"reset sharing of {device}")
        (self.directory / device).unlink(missing_ok=True)

    def confirm(self, devices: Collection[str]) -> None:
        if waiting := self.silent.keys() & set(devices):
            raise HardwareError(self.silent[min(waiting)])

    def troubles(self) -> Mapping[str, str]:
        return self.silent

    def _check(self, device: str) -> None:
        if device in self.broken:
            raise HardwareError("Unknown Error")


class FakeModes:
    """Compute modes as files: a UUID that has one is exclusive."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lost: set[str] = set()
        directory.mkdir(parents=True, exist_ok=True)

    def exclusive(self, uuid: str) -> None:
        if uuid in self.lost:
            raise HardwareError(f"{uuid}: GPU is lost")
        os.close(os.open(self.directory / uuid, os.O_CREAT | os.O_WRONLY))

    def default(self, uuid: str) -> None:
        (self.directory / uuid).unlink(missing_ok=True)

    def set(self) -> set[str]:
        return {file.name for file in self.directory.iterdir()}


class TurnKeeper:
    """The keeper's side of the files without processes: it acts when its turn comes, and dies with the test.

    says: what becomes of the daemon of a name; nothing said: it is ready.
    """

    def __init__(self, root: Path) -> None:
        self.files = MpsFiles(root)
        self.says: dict[str, DaemonState] = {}
        self.fd = -1
        self.token = ""

    def start(self) -> None:
        self.files.daemons_dir.mkdir(parents=True, exist_ok=True)
        self.token = os.urandom(4).hex()
        self.fd = self.files.announce(KeeperState(self.token, os.getpid()))

    def die(self) -> None:
        os.close(self.fd)
        self.fd = -1

    def turn(self, _seconds: float = 0.0) -> None:
        if self.fd < 0:
            return
        wanted = {name: read(self.files.wanted(name), Wanted) for name in self.files.names_wanted()}
        running = {name: one for name, one in wanted.items() if one is not None and not one.stop}
        for name in self.files.names_kept():
            if name not in running:
                shutil.rmtree(self.files.daemon(name))
        for name, one in running.items():
            self.files.daemon(name).mkdir(parents=True, exist_ok=True)
            ready = DaemonState(phase=Phase.READY, wanted=None, keeper="")
            state = msgspec.structs.replace(self.says.get(name, ready), wanted=one, keeper=self.token)
            self._write(self.files.state(name), encode(state))

    def _write(self, path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data)


def gpu_config(strategy: str = "TimeSlicing", kind: str = "GpuConfig", source: str = "FromClaim", **more: Any) -> Any:
    """One item of status.allocation.devices.config for our driver."""
    parameters = {"apiVersion": "gpunode.dev/v1alpha1", "kind": kind, "sharing": {"strategy": strategy, **more}}
    return {"source": source, "opaque": {"driver": DRIVER, "parameters": parameters}}


class Machine:
    """One node's disk and hardware under `tmp`; every `ledger` is a plugin process started on it.

    mps: strategy MPS is the real one, with a keeper that has its turn whenever the plugin waits.
    """

    def __init__(
        self, tmp: Path, devices: Callable[[], dict[str, DeviceNodes]] = with_partitions, *, mps: bool = False
    ) -> None:
        self.tmp = tmp
        self.boot = BOOT
        self.devices = devices
        self.notices: list[Notice] = []
        self.paths = KubeletPaths(tmp / "kubelet", tmp / "cdi")
        self.paths.plugin_dir(DRIVER).mkdir(parents=True, exist_ok=True)
        self.partitioner = FakePartitioner(tmp / "partitions")
        self.sharing = FakeSharing(tmp / "sharing")
        self.mps = mps
        self.modes = FakeModes(tmp / "modes")
        self.keeper = TurnKeeper(self.paths.plugin_dir(DRIVER) / "mps")
        if mps:
            self.keeper.start()

    def control(self, step: Steps = no_step) -> SharingControl:
        """The sharing of one plugin process."""
        self.sharing.step = step
        if not self.mps:
            return self.sharing
        patience = Patience(ready=0.2, stopped=0.2, probe=0.02)
        return Strategies(
            self.sharing, MpsDaemons(self.keeper.files.root, self.modes, step, patience, self.keeper.turn)
        )

    def ledger(self, step: Steps = no_step) -> Ledger:
        self.partitioner.step = step
        return Ledger(
            node=Node(DRIVER, POOL, self.boot), devices=self.devices,
            checkpoint=CheckpointFile(self.paths.checkpoint(DRIVER), step),
            cdi=CdiStore(self.paths.cdi, DRIVER, step), lock=NodeLock(self.paths.lock(DRIVER), timeout_s=5),
            effects=Effects(self.partitioner, self.control(step), step), notify=self.notices.append,
        )  # fmt: skip

    def reboot(self) -> None:
        self.boot = f"boot-{int(self.boot.partition('-')[2]) + 1}"
        for directory in (self.paths.cdi, self.partitioner.directory, self.sharing.directory, self.modes.directory):
            for file in directory.iterdir() if directory.is_dir() else ():
                file.unlink()

    def check(self) -> Entries:
        """Everything on the node follows from the book: no leak, no orphan, nothing half-done, no double use."""
        entries = {u: e for u, e in self.ledger().load().entries.items() if e.boot_id == self.boot}
        devices = [d for e in entries.values() for d in e.devices if not d.admin]
        assert all(e.state is State.COMPLETED for e in entries.values())
        assert set(cdi_files(self.tmp)) == {f"gpunode.dev-gpu_{DRIVER}_{uid}.json" for uid in entries}
        for uid, entry in entries.items():
            assert cdi_files(self.tmp)[f"gpunode.dev-gpu_{DRIVER}_{uid}.json"] == spec(entry)
        assert {f.name for f in self.partitioner.directory.iterdir()} == {
            f"{d.device}.{part}" for d in devices if d.nodes.dynamic for part in ("gi", "ci")
        }
        through_mps = [d for d in devices if self.mps and isinstance(d.sharing, Mps)]
        assert {f.name for f in self.sharing.directory.iterdir()} == {
            d.device for d in devices if d.sharing and d not in through_mps
        }
        self.keeper.turn()
        wanted = [read(self.keeper.files.wanted(name), Wanted) for name in self.keeper.files.names_wanted()]
        assert {d for one in wanted if one for d in one.devices} == {d.device for d in through_mps}
        assert not any(one is None or one.stop for one in wanted)
        assert {one.name for one in wanted if one} == set(self.keeper.files.names_kept())
        assert self.modes.set() == {d.nodes.uuid for d in through_mps if not d.nodes.parent}
        for entry in entries.values():
            assert conflict(entry, entries.values()) is None
        return entries


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
