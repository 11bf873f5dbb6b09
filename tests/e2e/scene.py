"""Gangs of bare pods in a namespace of their own, and a controller inside the test that can die at any write."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from gpunode.cluster.cluster import Cluster
from gpunode.cluster.install import CONTROLLER, Installation, start_controller
from gpunode.controller import run
from gpunode.controller.run import ControllerOptions, run_controller
from gpunode.kube.cache import Cache, following
from gpunode.kube.client import Api
from gpunode.kube.errors import ApiError
from gpunode.kube.kinds import CLAIMS, JOBS, NAMESPACES, PODS, Kind, discover
from gpunode.model.core import Job, Pod, PodGroup
from gpunode.model.names import DEFAULT_DRIVER, GANG_NAMESPACE_LABEL, PLACED_CONDITION, PLACEMENT_GATE, SYSTEM_NAMESPACE
from gpunode.model.resource import ResourceClaim

Json = dict[str, Any]
TEMPLATES = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaimtemplates"
CLASS = "gpu.gpunode.dev"


class MortalApi(Api):
    """Stops for ever right after the `dies_after`-th write: nothing sent later leaves the process, as after kill -9.

    Writes are counted without the lease, which no decision depends on.
    """

    writes: list[str]
    dies_after: int
    dead: asyncio.Event
    before_first: Callable[[], Awaitable[None]] | None = None

    async def request(self, method: str, path: str, body: object = None, **options: Any) -> bytes:
        if self.dead.is_set():
            await asyncio.Event().wait()
        if method == "GET" or "/leases" in path:
            return await super().request(method, path, body, **options)
        if self.before_first is not None and "/resourceclaims/" in path:
            hook, self.before_first = self.before_first, None
            await hook()
        self.writes.append(f"{method} {path}")
        if len(self.writes) == self.dies_after:
            self.dead.set()
        answer = await super().request(method, path, body, **options)
        if self.dead.is_set():
            await asyncio.Event().wait()
        return answer


@asynccontextmanager
async def controller_inside(cluster: Cluster, dies_after: int = 0) -> AsyncIterator[MortalApi]:
    """A controller in this process instead of the cluster's; ended with the block. 0: it does not die by itself."""
    kubeconfig = await asyncio.to_thread(cluster.token, SYSTEM_NAMESPACE, "gpunode-controller")
    api = await MortalApi.connect(kubeconfig, "gpunode-controller")
    assert isinstance(api, MortalApi)
    api.writes, api.dies_after, api.dead = [], dies_after, asyncio.Event()

    class Connected:
        """Stands in for Api while the controller connects."""

        @staticmethod
        async def connect(*_: object) -> MortalApi:
            return api

    original = run.Api
    run.Api = Connected  # type: ignore[misc, assignment]
    task = asyncio.create_task(run_controller(ControllerOptions("local", kubeconfig)))
    try:
        yield api
        assert not task.done(), task.exception()
    finally:
        run.Api = original  # type: ignore[misc]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.close()


class Scene:
    """One gang namespace, watched."""

    def __init__(self, cluster: Cluster, api: Api, groups: Kind[PodGroup], namespace: str) -> None:
        self.cluster, self.api, self.namespace, self.group_kind = cluster, api, namespace, groups
        self._changed = asyncio.Event()
        self.pods: Cache[Pod] = Cache(api, PODS, namespace=namespace, on_change=self._wake)
        self.claims: Cache[ResourceClaim] = Cache(api, CLAIMS, namespace=namespace, on_change=self._wake)
        self.jobs: Cache[Job] = Cache(api, JOBS, namespace=namespace, on_change=self._wake)
        self.groups: Cache[PodGroup] = Cache(api, groups, namespace=namespace, on_change=self._wake)

    def _wake(self, *_: object) -> None:
        self._changed.set()

    async def until(self, what: str, true: Callable[[], bool], seconds: float = 60) -> None:
        """Wait until the watches show it. Fails with how things stood."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not true():
            assert loop.time() < end, f"{what}: not within {seconds} s: {self.state()}"
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await self._changed.wait()

    def state(self) -> str:
        """Pods, conditions and allocated claims, for failures."""
        pods = [
            f"{p.metadata.name}: {p.status.phase} on {p.spec.node_name or '-'}{' gated' * gated(p)}"
            f"{' ending' * p.terminating} {[c.message for c in p.status.conditions if c.type == PLACED_CONDITION]}"
            for p in self.pods.items.values()
        ]
        groups = {k: self.placed(g.metadata.name) for k, g in self.groups.items.items()}
        claims = [k for k, c in self.claims.items.items() if c.status.allocation is not None]
        jobs = {k: j.spec.suspend for k, j in self.jobs.items.items()}
        return f"{pods} {groups} allocated {claims} suspended {jobs}"

    def placed(self, group: str) -> tuple[str, str, str]:
        """Status, reason and message of a PodGroup's Placed condition."""
        found = self.groups.items.get(f"{self.namespace}/{group}")
        return next(
            ((c.status, c.reason, c.message) for c in (found.status.conditions if found else ())
             if c.type == PLACED_CONDITION), ("", "", ""),
        )  # fmt: skip

    def said(self, pod: str) -> tuple[str, str, str]:
        """The same of a pod."""
        found = self.pods.items.get(f"{self.namespace}/{pod}")
        return next(
            ((c.status, c.reason, c.message) for c in (found.status.conditions if found else ())
             if c.type == PLACED_CONDITION), ("", "", ""),
        )  # fmt: skip

    def running(self, prefix: str) -> list[Pod]:
        """Pods by the beginning of their name that run and are not being deleted."""
        return [
            p for p in self.pods.items.values()
            if p.metadata.name.startswith(prefix) and p.status.phase == "Running" and not p.terminating
        ]  # fmt: skip

    def leaked(self) -> list[str]:
        """Allocated claims that no pod that has its place, or had it, is using."""
        users = {p.metadata.uid for p in self.pods.items.values() if not gated(p)}
        return [
            key for key, claim in self.claims.items.items()
            if claim.status.allocation is not None and not users & {r.uid for r in claim.status.reserved_for}
        ]  # fmt: skip

    async def template(self, name: str, count: int = 8, **exactly: Any) -> None:
        """A claim template for `count` GPUs of one node."""
        await self.template_of(
            name, {"requests": [{"name": "gpus", "exactly": {"deviceClassName": CLASS, "count": count, **exactly}}]}
        )

    async def template_of(self, name: str, devices: Json) -> None:
        meta = {"name": name, "namespace": self.namespace}
        body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": meta,
                "spec": {"spec": {"devices": devices}}}  # fmt: skip
        await self.api.create(TEMPLATES.format(self.namespace), body)

    async def group(self, name: str, minimum: int, **spec: Any) -> None:
        """A native PodGroup."""
        body = {
            "apiVersion": self.group_kind.group_version, "kind": "PodGroup",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {"schedulingPolicy": {"gang": {"minCount": minimum}}, **spec},
        }  # fmt: skip
        await self.api.create(self.group_kind.path(self.namespace), body)

    def pod(self, name: str, template: str, group: str = "", **spec: Any) -> Json:
        """A pod that sleeps with the devices of a template's claim."""
        made: Json = {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 1,
            "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": template}],
            "containers": [container()],
        }  # fmt: skip
        if group:
            made["schedulingGroup"] = {"podGroupName": group}
        meta = {"name": name, "namespace": self.namespace}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": made | spec}

    async def gang(self, name: str, size: int, template: str, minimum: int = 0, **spec: Any) -> None:
        """A PodGroup and its bare pods NAME-0, NAME-1, ..."""
        await self.group(name, minimum or size)
        for number in range(size):
            await self.api.create(PODS.path(self.namespace), self.pod(f"{name}-{number}", template, name, **spec))

    async def job(self, name: str, size: int, template: str) -> None:
        """A PodGroup and an Indexed Job of its pods."""
        await self.group(name, size)
        pod = self.pod(name, template, name)
        spec = {
            "completionMode": "Indexed",
            "completions": size,
            "parallelism": size,
            "template": {"spec": pod["spec"]},
        }
        meta = {"name": name, "namespace": self.namespace}
        await self.api.create(
            JOBS.path(self.namespace), {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec}
        )

    async def delete(self, name: str) -> None:
        """Begin to delete a pod."""
        with contextlib.suppress(ApiError):
            await self.api.delete(PODS.path(self.namespace, name))

    async def clear(self) -> None:
        """Remove all Jobs, pods, groups and claims of the namespace, and wait until they are gone."""
        # Never by force: a node keeps the devices of a pod that is gone from the API before it has ended.
        for kind in (JOBS, PODS, self.group_kind, CLAIMS):
            await self.api.delete(kind.path(self.namespace), {"propagationPolicy": "Background"})
        await self.api.delete(TEMPLATES.format(self.namespace))
        await self.until(
            "everything is gone",
            lambda: not (self.pods.items or self.claims.items or self.groups.items or self.jobs.items),
        )


def container() -> Json:
    return {
        "name": "c", "image": "localhost/busybox:1", "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "3600"], "resources": {"claims": [{"name": "gpus"}]},
    }  # fmt: skip


def gated(pod: Pod) -> bool:
    return any(g.name == PLACEMENT_GATE for g in pod.spec.scheduling_gates)


@asynccontextmanager
async def scene(cluster: Cluster, namespace: str, gangs: bool = True) -> AsyncIterator[Scene]:
    """A Scene in a namespace that is made where it is missing; cleared at the end."""
    async with await Api.connect(cluster.kubeconfig, "gpunode-test") as api:
        groups = (await discover(api)).pod_groups
        assert groups is not None
        labels = {GANG_NAMESPACE_LABEL: "enabled"} if gangs else {}
        with contextlib.suppress(ApiError):
            meta = {"name": namespace, "labels": labels}
            await api.create(NAMESPACES.path(), {"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
        made = Scene(cluster, api, groups, namespace)
        async with following(made.pods, made.claims, made.jobs, made.groups):
            # The API server learns of new namespaces' policies and default ServiceAccount a moment later.
            await until_service_account(api, namespace)
            await made.clear()
            yield made
            await made.clear()


async def until_service_account(api: Api, namespace: str) -> None:
    for _ in range(100):
        try:
            await api.request("GET", f"/api/v1/namespaces/{namespace}/serviceaccounts/default")
            return
        except ApiError:
            await asyncio.sleep(0.1)


@asynccontextmanager
async def without_controller(cluster: Cluster) -> AsyncIterator[None]:
    """The cluster's own controller is killed, and started again at the end."""
    await asyncio.to_thread(cluster.processes.kill, CONTROLLER)
    try:
        yield
    finally:
        await asyncio.to_thread(start_controller, cluster, Installation())


@asynccontextmanager
async def broken(api: Api, node: str, device: str) -> AsyncIterator[None]:
    """A device under a health taint that no agent sets, so that it comes and goes in one write."""
    name = f"breaks-{device}-{node}"
    kind = (await discover(api)).taint_rules
    assert kind is not None
    body = {
        "apiVersion": kind.group_version, "kind": "DeviceTaintRule", "metadata": {"name": name},
        "spec": {"deviceSelector": {"driver": DEFAULT_DRIVER, "pool": node, "device": device},
                 "taint": {"key": "gpunode.dev/xid", "value": "79", "effect": "NoSchedule"}},
    }  # fmt: skip
    await api.create(kind.path(), body)
    try:
        yield
    finally:
        await api.delete(kind.path(name=name))
