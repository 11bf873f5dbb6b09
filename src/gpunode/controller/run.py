"""The controller process: lead, watch, decide, apply."""

import asyncio
import logging
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from gpunode.controller.commit import Committer
from gpunode.controller.worker import DecideError, Worker
from gpunode.controller.world import World
from gpunode.kube.client import Api, reachable
from gpunode.kube.events import Recorder
from gpunode.kube.kinds import discover
from gpunode.kube.lease import Lease
from gpunode.model.gang import Config
from gpunode.model.names import DEFAULT_DRIVER, SYSTEM_NAMESPACE

logger = logging.getLogger(__name__)
# Changes come in bursts (a Job's pods, their claims): wait this long for the rest before deciding.
_SETTLE_S = 0.03
# Decide at least this often, for what only time changes (tolerationSeconds, grace).
_IDLE_S = 1.0
_AFTER_FAILURE_S = 0.2


@dataclass(frozen=True)
class ControllerOptions:
    """Settings of the process. `identity` must be stable over restarts of the same instance."""

    identity: str
    kubeconfig: Path | None = None
    drivers: frozenset[str] = field(default_factory=lambda: frozenset({DEFAULT_DRIVER}))


async def run_controller(options: ControllerOptions) -> None:
    """Run until cancelled. Raises ConfigError or UnreachableError at start, LostLeaseError when it must not go on."""
    async with await Api.connect(options.kubeconfig, "gpunode-controller") as api:
        await reachable(api)
        lease = Lease(api, SYSTEM_NAMESPACE, "gpunode-controller", options.identity)
        await lease.acquire()
        logger.info("leading as %s", options.identity)
        served = await discover(api)
        world = World(api, served)
        if served.pod_groups is None:
            logger.warning("this cluster serves no scheduling.k8s.io PodGroup: only single pods are placed")
        committer = Committer(api, world, Recorder(api, "controller", options.identity))
        worker = Worker(world.everything)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(lease.hold())
                for cache in world.caches.all():
                    tasks.create_task(cache.run())
                tasks.create_task(_decide_forever(world, worker, committer, Config(drivers=options.drivers)))
        finally:
            await worker.close()


async def _decide_forever(world: World, worker: Worker, committer: Committer, config: Config) -> None:
    await world.synced()
    logger.info("all caches in step: deciding")
    while True:
        try:
            async with asyncio.timeout(_IDLE_S):
                await world.changed.wait()
            await asyncio.sleep(_SETTLE_S)
        except TimeoutError:
            pass
        try:
            actions = await worker.decide(world.take_changes(), datetime.now(UTC), config)
        except DecideError as error:
            logger.error("decision failed, trying again in a second: %s", error)
            await asyncio.sleep(1)
            continue
        if await committer.apply(actions):
            # A write lost a race: give the watches time to bring the news, then decide again.
            await asyncio.sleep(_AFTER_FAILURE_S)
            world.changed.set()
