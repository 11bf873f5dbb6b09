"""Live claims for the prepare engine."""

from gpunode.kube.client import Api
from gpunode.kube.errors import ApiError
from gpunode.kube.kinds import CLAIMS
from gpunode.model.resource import ResourceClaim


class LiveClaims:
    """Reads claims from the API server, never from a cache: the kubelet is about to hand out devices on this."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def get(self, namespace: str, name: str) -> ResourceClaim:
        """Raises LookupError when the claim is gone, ApiError or UnreachableError when that is not known."""
        try:
            return await self._api.get(CLAIMS.path(namespace, name), CLAIMS.type)
        except ApiError as error:
            if error.not_found:
                raise LookupError(f"claim {namespace}/{name} does not exist") from None
            raise
