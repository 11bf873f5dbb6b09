"""The plugin as the kubelet sees it: two unix sockets, and what happens when someone removes them.

The DRA socket (prepare, unprepare, health) is served before the registration socket appears, because the kubelet
dials the first as soon as it finds the second. The kubelet finds registration sockets by watching their directory,
so a restarted kubelet comes back by itself, unless the directory was wiped: then the socket is made again here.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from gpunode.kubelet.health import HealthFeed
from gpunode.kubelet.proto import registration_v1_pb2
from gpunode.kubelet.rpc import (
    SUPPORTED_VERSIONS,
    Preparer,
    dra_handlers,
    health_handlers,
    registration_handler,
)

logger = logging.getLogger(__name__)

# sun_path of unix(7) has 108 bytes, one of them for the closing NUL.
SOCKET_PATH_LIMIT: Final = 107
MAX_REQUEST_BYTES: Final = 4 * 2**20


class PluginError(Exception):
    """The plugin cannot be served here; the message says what to do."""


@dataclass(frozen=True)
class DeadSocket:
    """A socket behind which nobody listens. inode: tells it from one that is made at the same path later."""

    path: Path
    inode: int

    def remove(self) -> None:
        """The kubelet would dial it for ever. Leaves alone what has taken its place, and what cannot be removed."""
        with suppress(OSError):
            if self.path.stat().st_ino == self.inode:
                logger.info("removing %s, which nobody serves any more", self.path)
                self.path.unlink()


@dataclass(frozen=True)
class KubeletPaths:
    """Where the kubelet and the container runtime look for things.

    root: the kubelet's --root-dir. cdi: a CDI directory of the container runtime.
    """

    root: Path = Path("/var/lib/kubelet")
    cdi: Path = Path("/var/run/cdi")

    @property
    def registry(self) -> Path:
        return self.root / "plugins_registry"

    def plugin_dir(self, driver: str) -> Path:
        """The driver's own directory: sockets, checkpoint, lock."""
        return self.root / "plugins" / driver

    def checkpoint(self, driver: str) -> Path:
        return self.plugin_dir(driver) / "checkpoint.json"

    def lock(self, driver: str) -> Path:
        return self.plugin_dir(driver) / "plugin.lock"

    def registration_socket(self, driver: str, instance: str = "") -> Path:
        # No driver name has an underscore, so this is never a socket of the driver that is called DRIVER-INSTANCE.
        return self.registry / (f"{driver}_{instance}-reg.sock" if instance else f"{driver}-reg.sock")

    def registration_sockets(self, driver: str) -> list[Path]:
        """Those of all the driver's instances, and of no other driver. Blocks; empty without a kubelet."""
        alone = self.registration_socket(driver)
        return [*([alone] if alone.exists() else []), *self.registry.glob(f"{driver}_*-reg.sock")]

    def dra_socket(self, driver: str, instance: str = "") -> Path:
        return self.plugin_dir(driver) / (f"dra-{instance}.sock" if instance else "dra.sock")

    def prepare(self, driver: str) -> None:
        """Make the driver's directory. Raises PluginError when there is no kubelet, OSError from the disk."""
        if not self.root.is_dir():
            raise PluginError(
                f"kubelet absent: {self.root} does not exist; start the kubelet first or set the agent's kubelet "
                "directory to the kubelet's --root-dir"
            )
        self.plugin_dir(driver).mkdir(mode=0o750, parents=True, exist_ok=True)
        self.registry.mkdir(mode=0o750, exist_ok=True)

    def dead_sockets(self, driver: str) -> frozenset[DeadSocket]:
        """What killed instances of this driver left. Blocks, up to a second for each instance that hangs."""
        candidates = [*self.registration_sockets(driver), *self.plugin_dir(driver).glob("dra*.sock")]
        return frozenset(DeadSocket(path, inode) for path in candidates if (inode := _dead_inode(path)) is not None)


def _dead_inode(path: Path) -> int | None:
    """The inode of a socket behind which nobody listens; None of everything else."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            if not path.is_socket():
                return None
            inode = path.stat().st_ino
            probe.connect(str(path))
        except ConnectionRefusedError:
            return inode
        except OSError:
            return None
    return None


async def _nothing() -> None:
    return None


class KubeletPlugin:
    """Serves one driver to the kubelet. `instance` makes sockets unique, so that two processes share none.

    registered is set while the kubelet has accepted the plugin. on_registered runs after every acceptance: the
    kubelet deletes the node's ResourceSlices whenever it starts, so they have to be published again.
    """

    def __init__(
        self,
        driver: str,
        pool: str,
        paths: KubeletPaths,
        preparer: Preparer,
        health: HealthFeed,
        on_registered: Callable[[], Awaitable[None]] = _nothing,
        instance: str = "",
        check_every_s: float = 1.0,
        grace_s: float = 2.0,
        late_after_s: float = 30.0,
    ) -> None:
        self.registered = asyncio.Event()
        self._driver = driver
        self._paths = paths
        self._on_registered = on_registered
        self._check_every_s = check_every_s
        self._grace_s = grace_s
        self._late_after_s = late_after_s
        self._registration_path = paths.registration_socket(driver, instance)
        self._dra_path = paths.dra_socket(driver, instance)
        self._health = health
        self._dra_handlers = [*dra_handlers(preparer), *health_handlers(health, pool)]
        self._dra_server: _SocketServer | None = None
        self._registration_server: _SocketServer | None = None
        self._stopping = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._callbacks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Serve both sockets. Raises PluginError: no kubelet, a path too long, a socket that cannot be bound."""
        for path in (self._dra_path, self._registration_path):
            _check_length(path)
        self._paths.prepare(self._driver)
        for dead in await asyncio.to_thread(self._paths.dead_sockets, self._driver):
            dead.remove()
        self._dra_server = await _SocketServer.start(self._dra_path, self._dra_handlers)
        try:
            self._registration_server = await self._register()
        except PluginError:
            await self._dra_server.stop(0)
            raise
        self._watcher = asyncio.create_task(self._watch_sockets(), name="kubelet-sockets")

    async def stop(self) -> None:
        """Deregister (by removing the registration socket), let running calls finish, remove the DRA socket."""
        self._stopping.set()
        if self._watcher is not None:
            await self._watcher  # not cancelled: it may be about to replace a server that would then be forgotten
        self._health.close()  # streams without end would be cut off in the middle of a message
        for server in (self._registration_server, self._dra_server):
            if server is not None:
                await server.stop(self._grace_s)
        for task in tuple(self._callbacks):
            task.cancel()
        await asyncio.gather(*self._callbacks, return_exceptions=True)
        self.registered.clear()

    def info(self) -> registration_v1_pb2.PluginInfo:
        """What GetInfo answers."""
        return registration_v1_pb2.PluginInfo(
            type="DRAPlugin",
            name=self._driver,
            endpoint=str(self._dra_path),
            supported_versions=SUPPORTED_VERSIONS,
        )

    def status(self, registered: bool, error: str) -> None:
        """What NotifyRegistrationStatus tells us."""
        if not registered:
            self.registered.clear()
            logger.error(
                "the kubelet refused plugin %s: %s; it tries again by itself. If this stays, look for another plugin "
                "registered under the same name in %s, and check that the kubelet is 1.36 or newer",
                self._driver, error[:1024] or "no reason given", self._paths.registry,
            )  # fmt: skip
            return
        logger.info("the kubelet registered plugin %s at %s", self._driver, self._dra_path)
        self.registered.set()
        task = asyncio.create_task(self._call_back(), name="kubelet-registered")
        self._callbacks.add(task)
        task.add_done_callback(self._callbacks.discard)

    async def _call_back(self) -> None:
        try:
            await self._on_registered()
        except Exception:  # the callback belongs to the agent; its fault must not end the plugin
            logger.exception("publishing after registration failed")

    async def _register(self) -> "_SocketServer":
        return await _SocketServer.start(self._registration_path, [registration_handler(self)])

    async def _watch_sockets(self) -> None:
        """Make a socket again that was removed: a wiped directory, a careless rm.

        One that another process bound at the same path is left alone: of one instance the newest process wins.
        """
        waiting_since: float | None = time.monotonic()
        while not await self._stopped_within(self._check_every_s):
            waiting_since = self._complain(waiting_since)
            try:
                if self._dra_server is not None and not self._dra_path.exists():
                    logger.warning("%s is gone; serving it again", self._dra_path)
                    self._paths.prepare(self._driver)
                    self._dra_server = await self._dra_server.replace()
                if self._registration_server is not None and not self._registration_path.exists():
                    logger.warning("%s is gone; registering again", self._registration_path)
                    self.registered.clear()
                    self._paths.prepare(self._driver)
                    self._registration_server = await self._registration_server.replace()
            except (PluginError, OSError) as error:
                logger.error("cannot serve the kubelet, trying again: %s", error)

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _complain(self, waiting_since: float | None) -> float | None:
        """Once per wait, when the kubelet takes long to register us. Returns since when we wait; None: no more."""
        if self.registered.is_set():
            return time.monotonic()
        if waiting_since is None or time.monotonic() - waiting_since < self._late_after_s:
            return waiting_since
        logger.warning(
            "the kubelet has not registered plugin %s for %.0f s; check that it runs, and that it watches %s "
            "(its --root-dir)", self._driver, self._late_after_s, self._paths.registry,
        )  # fmt: skip
        return None


def _check_length(path: Path) -> None:
    size = len(bytes(path))
    if size > SOCKET_PATH_LIMIT:
        raise PluginError(
            f"socket path of {size} bytes is longer than {SOCKET_PATH_LIMIT}: {path}; "
            "use a shorter driver name, instance id or kubelet directory"
        )


class _SocketServer:
    """A gRPC server on one unix socket, which knows whether the socket on disk is still its own."""

    def __init__(self, path: Path, handlers: list[grpc.GenericRpcHandler], server: grpc.aio.Server) -> None:
        self._path = path
        self._handlers = handlers
        self._server = server
        self._inode = path.stat().st_ino

    @staticmethod
    async def start(path: Path, handlers: list[grpc.GenericRpcHandler]) -> "_SocketServer":
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_REQUEST_BYTES)])
        server.add_generic_rpc_handlers(tuple(handlers))
        try:
            path.unlink(missing_ok=True)
            server.add_insecure_port(f"unix://{path}")
            await server.start()
            path.chmod(0o600)
            return _SocketServer(path, handlers, server)
        except (OSError, RuntimeError) as error:
            await server.stop(0)
            raise PluginError(f"cannot serve {path}: {error}; the agent must run as root on the node") from error

    def in_place(self) -> bool:
        """Whether the path still leads to the socket we bound."""
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    async def replace(self) -> "_SocketServer":
        """End this server, calls and streams with it, and serve the same path anew. Raises PluginError."""
        await self._server.stop(0)
        return await self.start(self._path, self._handlers)

    async def stop(self, grace_s: float) -> None:
        """Remove the socket if it is ours, then end; running calls have `grace_s` seconds."""
        if self.in_place():
            with suppress(OSError):
                self._path.unlink()
        await self._server.stop(grace_s)
