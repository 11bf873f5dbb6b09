"""Carries fault orders from the cluster to fake hardware. Agents on real NVML never run this."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path

import msgspec

from gpunode.files import write_atomic
from gpunode.kube.cache import Cache
from gpunode.kube.client import Api
from gpunode.kube.events import ObjectRef, Recorder
from gpunode.kube.kinds import CONFIG_MAPS, ConfigMap
from gpunode.model.faults import FaultOrder, parse_orders
from gpunode.model.names import FAULTS_CONFIGMAP, SYSTEM_NAMESPACE

logger = logging.getLogger(__name__)
_REMEMBERED = 1024

# Carries one order out; what it returns is run beside the orders that follow. Raises LookupError for a device that is
# not here, ValueError for a scenario that is not one, OSError when the fake's files cannot be written.
Execute = Callable[[FaultOrder], Awaitable[Coroutine[None, None, None] | None]]


class FaultOrders:
    """Watches the ConfigMap and executes each order once, also over restarts (`done` is a file of ids)."""

    def __init__(self, api: Api, recorder: Recorder, about: ObjectRef, done: Path, execute: Execute) -> None:
        self._recorder = recorder
        self._about = about
        self._file = done
        self._done = _load(done)
        self._execute = execute
        self._cache: Cache[ConfigMap] = Cache(
            api,
            CONFIG_MAPS,
            namespace=SYSTEM_NAMESPACE,
            params={"fieldSelector": f"metadata.name={FAULTS_CONFIGMAP}"},
            on_change=self._on_change,
        )
        self._pending: list[FaultOrder] = []
        self._problems: list[str] = []
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Follow the ConfigMap until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._cache.run())
            tasks.create_task(self._work(tasks))

    def _on_change(self, _key: str, config: ConfigMap | None) -> None:
        text = config.data.get(self._about.name) if config is not None else None
        if text is None:
            return
        orders, problems = parse_orders(text)
        self._pending = [order for order in orders if order.id not in self._done]
        self._problems = problems
        self._wake.set()

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            problems, self._problems = self._problems, []
            for problem in problems:
                await self._recorder.emit(self._about, "FaultOrderRefused", problem, "Warning", "Inject")
            pending, self._pending = self._pending, []
            for order in pending:
                rest = await self._carry_out(order)
                if rest is not None:
                    tasks.create_task(rest)

    async def _carry_out(self, order: FaultOrder) -> Coroutine[None, None, None] | None:
        what = "scenario" if order.scenario else f"xid {order.xid}" if order.xid is not None else "recovery"
        what += f" on {order.device}" if order.device else ""
        try:
            self._remember(order.id)
            rest = await self._execute(order)
        except (LookupError, ValueError, OSError) as error:
            await self._recorder.emit(self._about, "FaultOrderRefused", f"{order.id}: {error}", "Warning", "Inject")
            return None
        logger.warning("fault order %s: %s", order.id, what)
        await self._recorder.emit(self._about, "FaultInjected", f"order {order.id}: {what}", "Normal", "Inject")
        return rest

    def _remember(self, order: str) -> None:
        """Before it is carried out: an order that ends this process must not end the next one too."""
        self._done = [*self._done, order][-_REMEMBERED:]
        write_atomic(self._file, msgspec.json.encode(self._done), durable=True)


def _load(path: Path) -> list[str]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[str])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        logger.error("the list of executed fault orders in %s is unreadable and starts anew: %s", path, error)
        return []
