"""Leader election on a coordination.k8s.io Lease.

The official client's elector needs its generated models (and their import time) for one object of five fields;
this is the same algorithm on ours: take the lease when it is free, ours, or was not renewed for its duration as
seen by our own clock, and stop leading when it could not be renewed for two thirds of that time.
"""

import asyncio
import logging
import time
from datetime import UTC, datetime

from gpunode.kube.client import Api
from gpunode.kube.errors import ApiError, UnreachableError
from gpunode.model.meta import ApiStruct, ObjectMeta
from gpunode.model.times import stamp_micro

logger = logging.getLogger(__name__)
# Rights that were granted a moment ago take effect within this time.
_REFUSED_S = 5.0
# A pod that ends has 30 s, and other things to do.
_RELEASE_S = 5.0


class LeaseSpec(ApiStruct, frozen=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    lease_transitions: int | None = None


class LeaseObject(ApiStruct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: LeaseSpec = LeaseSpec()


class LostLeaseError(Exception):
    """The lease could not be renewed in time: another instance may lead now, so this one must stop."""


class Lease:
    """One candidate. A restarted process with the same identity takes its own lease back at once."""

    def __init__(self, api: Api, namespace: str, name: str, identity: str, duration_s: int = 15) -> None:
        self._api = api
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._duration = duration_s
        self._seen: tuple[str, float] = ("", 0.0)

    async def acquire(self) -> None:
        """Wait until this instance leads. Retries through API errors.

        Raises ApiError when the right to the lease is refused from the start, for five seconds.
        """
        waiting_for = ""
        began, ever_allowed = time.monotonic(), False
        while True:
            try:
                holder = await self._try_take()
                ever_allowed = True
                if holder == self._identity:
                    return
                if holder != waiting_for:
                    logger.info("waiting: %s leads", holder)
                    waiting_for = holder
            except (ApiError, UnreachableError) as error:
                refused = isinstance(error, ApiError) and error.forbidden
                if refused and not ever_allowed and time.monotonic() - began > _REFUSED_S:
                    raise
                logger.warning("cannot take the lease %s, will retry: %s", self._name, error)
            await asyncio.sleep(2)

    async def hold(self) -> None:
        """Renew until cancelled. Raises LostLeaseError when it is not ours any more or could not be renewed."""
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        while True:
            await asyncio.sleep(self._duration / 5)
            try:
                if await self._try_take() != self._identity:
                    raise LostLeaseError(f"another instance took the lease {self._name}")
                renewed = loop.time()
            except (ApiError, UnreachableError) as error:
                if loop.time() - renewed > self._duration * 2 / 3:
                    raise LostLeaseError(f"could not renew the lease {self._name}: {error}") from None
                logger.warning("could not renew the lease %s yet: %s", self._name, error)

    async def release(self) -> None:
        """Give it up in an orderly end, so that the next one need not wait for it to run out. Takes a few seconds at
        most, and never raises for a server that is away or refuses: then it runs out."""
        try:
            async with asyncio.timeout(_RELEASE_S):
                lease = await self._api.get(f"{self._path}/{self._name}", LeaseObject)
                if lease.spec.holder_identity == self._identity:
                    body = self._body(lease.metadata.resource_version, lease.spec.lease_transitions or 0, None)
                    await self._api.request("PUT", f"{self._path}/{self._name}", body)
        except (ApiError, UnreachableError, TimeoutError) as error:
            logger.info("the lease %s is left to run out: %s", self._name, error or "no answer")

    async def _try_take(self) -> str:
        """Create, renew or take over the lease; the holder's identity after the attempt."""
        try:
            lease = await self._api.get(f"{self._path}/{self._name}", LeaseObject)
        except ApiError as error:
            if not error.not_found:
                raise
            await self._api.create(self._path, self._body("", 0, self._identity))
            return self._identity
        holder = lease.spec.holder_identity or ""
        if holder and holder != self._identity and not self._expired(lease):
            return holder
        transitions = (lease.spec.lease_transitions or 0) + (holder != self._identity)
        try:
            await self._api.request(
                "PUT",
                f"{self._path}/{self._name}",
                self._body(lease.metadata.resource_version, transitions, self._identity),
            )
        except ApiError as error:
            if error.raced:
                return "another candidate"
            raise
        return self._identity

    def _expired(self, lease: LeaseObject) -> bool:
        """Whether the holder let a whole duration pass on *our* clock without touching the lease."""
        now = asyncio.get_running_loop().time()
        version, since = self._seen
        if version != lease.metadata.resource_version:
            self._seen = (lease.metadata.resource_version, now)
            return False
        return now - since > (lease.spec.lease_duration_seconds or self._duration)

    def _body(self, version: str, transitions: int, holder: str | None) -> dict[str, object]:
        now = stamp_micro(datetime.now(UTC))
        metadata = {"name": self._name, "namespace": self._namespace}
        if version:
            metadata["resourceVersion"] = version
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": self._duration,
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": transitions,
            },
        }
