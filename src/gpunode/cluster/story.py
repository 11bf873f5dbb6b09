"""The story of one gang on a real cluster: placed whole, broken by a fault, put back together.

`make demo` tells it, the end-to-end tests check it and `make bench` times it: all three run this code. Everything
is learnt from watches of the API server, the way any client would.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpunode.agent.orders import OrderError, give_order, new_order
from gpunode.cluster.cluster import Cluster
from gpunode.cluster.errors import ClusterError
from gpunode.cluster.install import kubectl
from gpunode.datafiles import data_dir
from gpunode.kube.cache import Cache, following
from gpunode.kube.client import Api
from gpunode.kube.kinds import CLAIMS, JOBS, PODS, SLICES, Kind, discover
from gpunode.model.core import Job, Pod, PodGroup
from gpunode.model.names import PLACED_CONDITION
from gpunode.model.resource import ResourceClaim

NAMESPACE: Final = "team-a"
RANK_LABEL: Final = "batch.kubernetes.io/job-completion-index"


@dataclass(frozen=True)
class Rank:
    """Where one rank of a gang runs. `devices` are DRA device names."""

    rank: int
    pod: str
    uid: str
    node: str
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Break:
    """A fault given to a running gang, and how long the cluster took, in seconds."""

    rank: Rank
    device: str
    xid: int
    message: str = ""
    pod_status_s: float = 0.0
    evicted_s: float = 0.0
    old_ended_s: float = 0.0
    running_again_s: float = 0.0
    ranks: tuple[Rank, ...] = ()


class TooSlowError(ClusterError):
    """Something the story waited for did not happen; the text says what and how things stood."""


class Stage:
    """Watches of one namespace, and waiting for what they should show."""

    def __init__(self, cluster: Cluster, api: Api, group_kind: Kind[PodGroup]) -> None:
        self.cluster = cluster
        self.api = api
        self._changed = asyncio.Event()
        self.pods: Cache[Pod] = Cache(api, PODS, namespace=NAMESPACE, on_change=self._wake)
        self.claims: Cache[ResourceClaim] = Cache(api, CLAIMS, namespace=NAMESPACE, on_change=self._wake)
        self.jobs: Cache[Job] = Cache(api, JOBS, namespace=NAMESPACE, on_change=self._wake)
        self.groups: Cache[PodGroup] = Cache(api, group_kind, namespace=NAMESPACE, on_change=self._wake)
        self._messages: dict[str, str] = {}

    def _wake(self, *_: object) -> None:
        self._changed.set()

    def apply(self, example: str | Path) -> None:
        """kubectl apply one of daemonset/examples, or a file."""
        kubectl(self.cluster, "apply", "-f", str(_served(self.cluster, example)))

    def delete(self, example: str | Path) -> None:
        """kubectl delete what `apply` made, without waiting until it is gone."""
        file = str(_served(self.cluster, example))
        kubectl(self.cluster, "delete", "--ignore-not-found", "--wait=false", "-f", file)

    async def clear(self) -> None:
        """Remove what earlier acts left: jobs, groups, pods and faults."""
        for example in ("train", "too-large"):
            self.delete(example)
        await self.until("pods, claims and groups of earlier acts are gone", 90, self._empty)
        slices, _ = await self.api.list(SLICES.path(), SLICES.type)
        broken = [(s.spec.node_name or "", d.name) for s in slices for d in s.spec.devices if d.taints]
        for node, device in broken:
            await give_order(self.api, node, new_order(device, recover=True))

    def _empty(self) -> bool:
        return not (self.pods.items or self.claims.items or self.groups.items or self.jobs.items)

    def members(self, job: str) -> list[Pod]:
        """All pods of a Job that exist, old and new."""
        return [p for p in self.pods.items.values() if any(o.name == job for o in p.metadata.owner_references)]

    async def until(self, what: str, seconds: float, true: Callable[[], bool]) -> float:
        """Wait until the watches show it; how long that took. Raises TooSlowError."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        while not true():
            left = start + seconds - loop.time()
            if left <= 0:
                raise TooSlowError(f"{what}: not within {seconds:.0f} s; pods: {self._state()}")
            self._changed.clear()
            try:
                async with asyncio.timeout(min(left, 1.0)):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return loop.time() - start

    def _state(self) -> str:
        return ", ".join(
            f"{p.metadata.name} {p.status.phase} on {p.spec.node_name or '-'}{' (ending)' if p.terminating else ''}"
            for p in self.pods.items.values()
        )

    def ranks(self, job: str) -> tuple[Rank, ...]:
        """Members of a Job that have a place and keep it, or had it until they succeeded, by rank."""
        live = [p for p in self.members(job) if p.spec.node_name and not p.terminating and p.status.phase != "Failed"]
        return tuple(sorted((self._rank(pod) for pod in live), key=lambda r: r.rank))

    def _rank(self, pod: Pod) -> Rank:
        devices: list[str] = []
        for status in pod.status.resource_claim_statuses:
            claim = self.claims.items.get(f"{NAMESPACE}/{status.resource_claim_name}")
            if claim is not None and claim.status.allocation is not None:
                devices += [result.device for result in claim.status.allocation.devices.results]
        return Rank(
            rank=int(pod.metadata.labels.get(RANK_LABEL, "0")),
            pod=pod.metadata.name,
            uid=pod.metadata.uid,
            node=pod.spec.node_name,
            devices=tuple(devices),
        )

    async def until_running(self, job: str, count: int, seconds: float, after: Iterable[str] = ()) -> float:
        """Wait until `count` members run, or have run to their end, that are none of the pods `after` (uids)."""
        old = frozenset(after)

        def all_run() -> bool:
            running = [
                p for p in self.members(job)
                if p.status.phase in ("Running", "Succeeded") and not p.terminating and p.metadata.uid not in old
            ]  # fmt: skip
            return len(running) == count

        return await self.until(f"{count} running pods of {job}", seconds, all_run)

    async def break_one(self, job: str, xid: int, rank: int = 3, device: int = 2, tries: int = 1) -> Break:
        """Raise an XID on one GPU of a running gang and follow what happens until all ranks run again.

        Times count from just before the order is given; running_again_s from the end of the last old pod.
        tries: how often to give the order where agents are being restarted meanwhile.
        """
        before = self.ranks(job)
        victim = before[rank]
        broken = Break(victim, victim.devices[device], xid)
        loop = asyncio.get_running_loop()
        start = loop.time()
        times: dict[str, float] = {}

        async def note(name: str, what: str, seconds: float, true: Callable[[], bool]) -> None:
            await self.until(what, seconds, true)
            times[name] = loop.time() - start

        uids = frozenset(r.uid for r in before)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._order(broken, tries))
            tasks.create_task(note("status", "Unhealthy in pod.status", 30, lambda: bool(self.unhealthy(victim.uid))))
            tasks.create_task(note("evicted", "every pod of the gang is ending", 30, lambda: self._ending(uids)))
            tasks.create_task(note("ended", "the old pods have ended", 90, lambda: self._ended(uids)))
            tasks.create_task(self._again(job, len(before), uids, times, start))
        return Break(
            victim,
            broken.device,
            xid,
            message=self._messages.get(victim.uid, ""),
            pod_status_s=times["status"],
            evicted_s=times["evicted"],
            old_ended_s=times["ended"],
            running_again_s=max(0.0, times["again"] - times["ended"]),
            ranks=self.ranks(job),
        )

    async def _order(self, broken: Break, tries: int) -> None:
        """Give the order; again (an XID twice is still one fault) when the agent was just being restarted."""
        for left in reversed(range(tries)):
            try:
                await give_order(self.api, broken.rank.node, new_order(broken.device, xid=broken.xid))
                return
            except OrderError:
                if not left:
                    raise

    async def _again(self, job: str, count: int, old: frozenset[str], times: dict[str, float], start: float) -> None:
        await self.until_running(job, count, 120, after=old)
        times["again"] = asyncio.get_running_loop().time() - start

    def unhealthy(self, uid: str) -> str:
        """Message of the first Unhealthy device in that pod's status, or "" (remembered after the pod is gone)."""
        for pod in self.pods.items.values():
            if pod.metadata.uid != uid:
                continue
            for container in pod.status.container_statuses:
                for status in container.allocated_resources_status:
                    for resource in status.resources:
                        if resource.health == "Unhealthy":
                            self._messages[uid] = f"{resource.resource_id}: {resource.message}"
        return self._messages.get(uid, "")

    def _by_uid(self, uids: frozenset[str]) -> list[Pod]:
        return [p for p in self.pods.items.values() if p.metadata.uid in uids]

    def _ending(self, uids: frozenset[str]) -> bool:
        return all(pod.terminating or pod.finished for pod in self._by_uid(uids))

    def _ended(self, uids: frozenset[str]) -> bool:
        return all(pod.finished for pod in self._by_uid(uids))

    def placed(self, group: str) -> tuple[str, str, str]:
        """Status, reason and message of the Placed condition of a PodGroup; empty strings while there is none."""
        found = self.groups.items.get(f"{NAMESPACE}/{group}")
        for condition in found.status.conditions if found else ():
            if condition.type == PLACED_CONDITION:
                return condition.status, condition.reason, condition.message
        return "", "", ""

    def complete(self, job: str) -> bool:
        """Whether a Job has the condition Complete."""
        found = self.jobs.items.get(f"{NAMESPACE}/{job}")
        return found is not None and any(c.type == "Complete" and c.status == "True" for c in found.status.conditions)


@asynccontextmanager
async def stage(cluster: Cluster) -> AsyncIterator[Stage]:
    """A Stage whose watches are in step; ended with the block."""
    async with await Api.connect(cluster.kubeconfig, "gpunode-story") as api:
        kind = (await discover(api)).pod_groups
        if kind is None:
            raise ClusterError("this cluster serves no PodGroups: bring it up with gpunode cluster up")
        it = Stage(cluster, api, kind)
        async with following(it.pods, it.claims, it.jobs, it.groups):
            yield it


def _served(cluster: Cluster, example: str | Path) -> Path:
    """File of an example, in the API version that the cluster's release knows."""
    source = example if isinstance(example, Path) else data_dir("daemonset") / "examples" / f"{example}.yaml"
    if not cluster.spec.kubernetes.startswith("1.36."):
        return source
    # PodGroup was v1alpha2 in 1.36 with the same fields as far as these examples use them.
    target = cluster.layout.state / f"example-{source.stem}.yaml"
    target.write_text(source.read_text().replace("scheduling.k8s.io/v1beta1", "scheduling.k8s.io/v1alpha2"))
    return target
