"""Claims of the API server, read live and never from a cache: the kubelet is about to hand out devices on them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from gpunode.kube.client import Api
from gpunode.kube.errors import ApiError
from gpunode.kube.kinds import CLAIMS
from gpunode.kubelet.checkpoint import Entries
from gpunode.kubelet.reconcile import Findings
from gpunode.model.resource import ResourceClaim

logger = logging.getLogger(__name__)


class LiveClaims:
    """Reads claims one at a time, and all of this node's when the checkpoint has to be rebuilt."""

    def __init__(self, api: Api, driver: str, pool: str) -> None:
        self._api = api
        self._driver = driver
        self._pool = pool

    async def get(self, namespace: str, name: str) -> ResourceClaim:
        """Raises LookupError when the claim is gone, ApiError or UnreachableError when that is not known."""
        try:
            return await self._api.get(CLAIMS.path(namespace, name), CLAIMS.type)
        except ApiError as error:
            if error.not_found:
                raise LookupError(f"claim {namespace}/{name} does not exist") from None
            raise

    async def allocated(self) -> Sequence[ResourceClaim]:
        """Claims with a device of this node. Raises ApiError, UnreachableError."""
        claims, _ = await self._api.list(CLAIMS.path(), CLAIMS.type)
        return [claim for claim in claims if self._is_here(claim)]

    def _is_here(self, claim: ResourceClaim) -> bool:
        allocation = claim.status.allocation
        results = allocation.devices.results if allocation is not None else ()
        return any(r.driver == self._driver and r.pool == self._pool for r in results)


class Lookout:
    """Runs the second look every minute, and soon after the kubelet called, for that is when something may be left.

    `held` is told the devices that nobody should be given, after the first look and whenever that set changes.
    """

    def __init__(
        self,
        look: Callable[[], Awaitable[Findings]],
        held: Callable[[frozenset[str]], None],
        every_s: float = 60.0,
        soon_s: float = 1.0,
        pause_s: float = 4.0,
    ) -> None:
        self._look = look
        self._tell = held
        self._held: frozenset[str] | None = None
        self._known: Entries = {}
        self._every_s = every_s
        self._soon_s = soon_s
        self._pause_s = pause_s
        self._called = asyncio.Event()
        self._looking = False

    def called(self, entries: Entries) -> None:
        """The kubelet called, and left these. A look that finds all as it was is no reason for another one."""
        if not self._looking or entries != self._known:
            self._called.set()
        self._known = entries

    def wake(self) -> None:
        """Something else happened that is worth a look."""
        self._called.set()

    async def run(self) -> None:
        """Look until cancelled; the first time at once, for what happened while no agent was here."""
        while True:
            self._called.clear()
            await self._once()
            await asyncio.sleep(self._pause_s)
            try:
                async with asyncio.timeout(self._every_s - self._pause_s):
                    await self._called.wait()
                await asyncio.sleep(self._soon_s)
            except TimeoutError:
                pass

    async def _once(self) -> None:
        self._looking = True
        try:
            findings = await self._look()
        except OSError as error:
            logger.error("claims not compared, will retry: %s", error)
            return
        finally:
            self._looking = False
        if findings.held != self._held:
            self._held = findings.held
            self._tell(findings.held)
