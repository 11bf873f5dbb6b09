"""The controller process: lead, watch, decide, apply."""

import asyncio
import logging
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from prometheus_client import CollectorRegistry

from gpunode.controller.commit import Committer
from gpunode.controller.metrics import ControllerMetrics
from gpunode.controller.worker import DecideError, Worker
from gpunode.controller.world import World
from gpunode.kube.client import Api, reachable
from gpunode.kube.events import Recorder
from gpunode.kube.kinds import discover
from gpunode.kube.lease import Lease
from gpunode.model.gang import Config
from gpunode.model.names import DEFAULT_DRIVER, SYSTEM_NAMESPACE
from gpunode.monitoring import serve_metrics

logger = logging.getLogger(__name__)
# Changes come in bursts (a Job's pods, their claims): wait this long for the rest before deciding.
_SETTLE_S = 0.03
# Decide at least this often, for what only time changes (tolerationSeconds, grace).
_IDLE_S = 1.0
_AFTER_FAILURE_S = 0.2


@dataclass(frozen=True)
class ControllerOptions:
    """Settings of the process. `identity` must be stable over restarts of the same instance; port 0 serves none.

    blast_share: see gang Config.
    """

    identity: str
    kubeconfig: Path | None = None
    drivers: frozenset[str] = field(default_factory=lambda: frozenset({DEFAULT_DRIVER}))
    metrics_port: int = 0
    blast_share: float = 0.2


async def run_controller(options: ControllerOptions) -> None:
    """Run until cancelled. Raises ConfigError or UnreachableError at start, LostLeaseError when it must not go on."""
    async with await Api.connect(options.kubeconfig, "gpunode-controller") as api:
        await reachable(api)
        registry = CollectorRegistry()
        serve_metrics(registry, options.metrics_port)
        lease = Lease(api, SYSTEM_NAMESPACE, "gpunode-controller", options.identity)
        await lease.acquire()
        logger.info("leading as %s", options.identity)
        served = await discover(api)
        world = World(api, served)
        if served.pod_groups is None:
            logger.warning("this cluster serves no scheduling.k8s.io PodGroup: only single pods are placed")
        committer = Committer(api, world, Recorder(api, "controller", options.identity))
        worker = Worker(world.everything)
        config = Config(drivers=options.drivers, blast_share=options.blast_share)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(lease.hold())
                for cache in world.caches.all():
                    tasks.create_task(cache.run())
                loop = _Loop(world, worker, committer, ControllerMetrics(registry), config)
                tasks.create_task(loop.run())
        finally:
            await worker.close()
            # Nothing of ours decides or writes any more.
            await lease.release()


@dataclass(frozen=True)
class _Loop:
    """Watch, decide, apply, again."""

    world: World
    worker: Worker
    committer: Committer
    metrics: ControllerMetrics
    config: Config

    async def run(self) -> None:
        await self.world.synced()
        logger.info("all caches in step: deciding")
        while True:
            try:
                async with asyncio.timeout(_IDLE_S):
                    await self.world.changed.wait()
                await asyncio.sleep(_SETTLE_S)
            except TimeoutError:
                pass
            try:
                await self._once()
            except DecideError as error:
                logger.error("decision failed, trying again in a second: %s", error)
                await asyncio.sleep(1)

    async def _once(self) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        actions = await self.worker.decide(self.world.take_changes(), datetime.now(UTC), self.config)
        self.metrics.decided(clock() - began, actions)
        began = clock()
        failed = await self.committer.apply(actions)
        self.metrics.committed(clock() - began, actions, failed)
        if failed:
            # A write lost a race: give the watches time to bring the news, then decide again.
            await asyncio.sleep(_AFTER_FAILURE_S)
            self.world.changed.set()
