"""Claims of the API server, read live and never from a cache: the kubelet is about to hand out devices on them."""

from collections.abc import Sequence

from gpunode.kube.client import Api
from gpunode.kube.errors import ApiError
from gpunode.kube.kinds import CLAIMS
from gpunode.model.resource import ResourceClaim


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
