"""Watches that run beside every end-to-end test and hold the invariants over all it does, not only at its end."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gpunode.cluster.cluster import Cluster
from gpunode.kube.cache import Cache, following
from gpunode.kube.client import Api
from gpunode.kube.kinds import CLAIMS, JOBS, PODS
from gpunode.model.core import Job, Pod
from gpunode.model.resource import ResourceClaim


@dataclass
class DoubleAllocations:
    """I1: no device in two claims at any time (admin access and shares excepted)."""

    violations: list[str] = field(default_factory=list)
    changes: int = 0
    _holders: dict[str, dict[str, str]] = field(default_factory=dict)
    _held: dict[str, list[str]] = field(default_factory=dict)

    def on_claim(self, key: str, claim: ResourceClaim | None) -> None:
        """Take in one version of one claim."""
        self.changes += 1
        for device in self._held.pop(key, []):
            self._holders[device].pop(key, None)
        if claim is None or claim.status.allocation is None:
            return
        for result in claim.status.allocation.devices.results:
            if result.admin_access or result.share_id:
                continue
            device = f"{result.driver}/{result.pool}/{result.device}"
            holders = self._holders.setdefault(device, {})
            holders[key] = claim.metadata.resource_version
            self._held.setdefault(key, []).append(device)
            if len(holders) > 1:
                self.violations.append(f"{device} is in {' and '.join(sorted(holders))}")


@dataclass
class GangWatch:
    """I2: outside the commit window a gang of `size` has either none of its pods bound, or all of them.

    A pod counts as bound while it names a node and is not being deleted; a finished one has had its place. The
    window is the time between two such states; `partial_s` collects how long each lasted.
    """

    job: str
    size: int
    partial_s: list[float] = field(default_factory=list)
    peaks: set[int] = field(default_factory=set)
    _pods: dict[str, Pod] = field(default_factory=dict)
    _since: float | None = None

    def on_pod(self, key: str, pod: Pod | None) -> None:
        """Take in one version of one pod."""
        if pod is None:
            self._pods.pop(key, None)
        elif any(o.name == self.job for o in pod.metadata.owner_references):
            self._pods[key] = pod
        bound = sum(1 for p in self._pods.values() if _has_place(p))
        self.peaks.add(bound)
        partial = 0 < bound < self.size
        now = time.monotonic()
        if partial and self._since is None:
            self._since = now
        elif not partial and self._since is not None:
            self.partial_s.append(now - self._since)
            self._since = None

    def still_partial_s(self) -> float:
        """How long the gang has been partly placed until now, 0 if it is not."""
        return 0.0 if self._since is None else time.monotonic() - self._since


def _has_place(pod: Pod) -> bool:
    return pod.status.phase == "Succeeded" or (bool(pod.spec.node_name) and not pod.terminating and not pod.finished)


@dataclass
class SuspendWatch:
    """How often a Job was suspended, and whether it still is."""

    suspensions: dict[str, int] = field(default_factory=dict)
    suspended: set[str] = field(default_factory=set)

    def on_job(self, key: str, job: Job | None) -> None:
        """Take in one version of one Job."""
        if job is None or not job.spec.suspend:
            self.suspended.discard(key)
        elif key not in self.suspended:
            self.suspended.add(key)
            self.suspensions[key] = self.suspensions.get(key, 0) + 1


@dataclass(frozen=True)
class Checkers:
    """All of them, fed by watches of the whole cluster."""

    devices: DoubleAllocations
    gang: GangWatch
    jobs: SuspendWatch


@asynccontextmanager
async def checkers(cluster: Cluster, job: str = "train", size: int = 8) -> AsyncIterator[Checkers]:
    """Feed the checkers while the block runs; a double allocation fails at its end."""
    all_ = Checkers(DoubleAllocations(), GangWatch(job, size), SuspendWatch())
    async with await Api.connect(cluster.kubeconfig, "gpunode-checker") as api:
        caches = (
            Cache(api, CLAIMS, on_change=all_.devices.on_claim),
            Cache(api, PODS, on_change=all_.gang.on_pod),
            Cache(api, JOBS, on_change=all_.jobs.on_job),
        )
        async with following(*caches):
            yield all_
    assert not all_.devices.violations, all_.devices.violations
