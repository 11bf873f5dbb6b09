"""Watches of what health tells about devices, for end-to-end tests and measurements."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from gpunode.agent.orders import give_order, new_order
from gpunode.cluster.cluster import Cluster, Node
from gpunode.cluster.install import kubectl
from gpunode.hardware.fake import kernel_log
from gpunode.kube.cache import Cache, following
from gpunode.kube.client import Api
from gpunode.kube.kinds import CLAIMS, PODS, SLICES, Kind
from gpunode.model.core import Pod
from gpunode.model.meta import ApiStruct, ObjectMeta
from gpunode.model.resource import Device, DeviceTaint, ResourceClaim, ResourceSlice

HEALTH = "gpunode.dev/"
NAMESPACE = "health-ward"
PATIENTS = Path(__file__).parent / "e2e" / "patients.yaml"
_AGENT = "gpunode.dev/agent"


class EventNote(ApiStruct, frozen=True):
    """What tests need of an Event of events.k8s.io."""

    metadata: ObjectMeta = ObjectMeta()
    reason: str = ""
    note: str = ""
    reporting_controller: str = ""
    reporting_instance: str = ""


EVENTS = Kind("events.k8s.io/v1", "events", "Event", EventNote)


class Ward:
    """Slices, pods and Events as they change. `writes` counts, by node, every write that its agent made."""

    def __init__(self, cluster: Cluster, api: Api) -> None:
        self.cluster = cluster
        self.api = api
        self.writes: dict[str, int] = {}
        self._changed = asyncio.Event()
        self.slices: Cache[ResourceSlice] = Cache(api, SLICES, on_change=self._on_slice)
        self.events: Cache[EventNote] = Cache(api, EVENTS, namespace="default", on_change=self._on_event)
        self.pods: Cache[Pod] = Cache(api, PODS, namespace=NAMESPACE, on_change=self._wake)
        self.claims: Cache[ResourceClaim] = Cache(api, CLAIMS, namespace=NAMESPACE, on_change=self._wake)

    def _wake(self, *_: object) -> None:
        self._changed.set()

    def _on_slice(self, _key: str, found: ResourceSlice | None) -> None:
        """Agents are the only writers of slices, so each change is one write."""
        if found is not None:
            self._count(found.spec.pool.name)
        self._wake()

    def _on_event(self, _key: str, event: EventNote | None) -> None:
        if event is not None and event.reporting_controller == _AGENT:
            self._count(event.reporting_instance)
        self._wake()

    def _count(self, node: str) -> None:
        self.writes[node] = self.writes.get(node, 0) + 1

    async def until(self, what: str, seconds: float, true: Callable[[], bool]) -> float:
        """Wait until the watches show it; time.time() then. Raises TimeoutError with `what`."""
        deadline = time.monotonic() + seconds
        while not true():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{what}: not within {seconds:.0f} s; taints: {self.all_taints()}")
            self._changed.clear()
            try:
                async with asyncio.timeout(min(left, 1.0)):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return time.time()

    def devices(self, node: str) -> dict[str, Device]:
        """Published devices of a node by name."""
        found = sorted(self.slices.items.values(), key=lambda s: s.spec.pool.generation)
        return {d.name: d for s in found if s.spec.pool.name == node for d in s.spec.devices}

    def taints(self, node: str, device: str) -> tuple[DeviceTaint, ...]:
        """The taints that health put on a device."""
        found = self.devices(node).get(device)
        return tuple(t for t in found.taints if t.key.startswith(HEALTH)) if found else ()

    def all_taints(self) -> dict[str, list[str]]:
        """Of all nodes: "node/device" to keys and values."""
        return {
            f"{s.spec.pool.name}/{d.name}": [f"{t.key}={t.value}" for t in d.taints]
            for s in self.slices.items.values()
            for d in s.spec.devices
            if d.taints
        }

    def unhealthy(self, device: str, node: str) -> str:
        """Message of an Unhealthy device in the status of a pod of this namespace, or ""."""
        for pod in self.pods.items.values():
            if pod.spec.node_name != node:
                continue
            for container in pod.status.container_statuses:
                for status in container.allocated_resources_status:
                    for resource in status.resources:
                        if resource.resource_id.endswith(device) and resource.health == "Unhealthy":
                            return resource.message or resource.health
        return ""

    def told(self, reason: str, device: str, node: str, after: int = 0) -> list[str]:
        """Notes of the Events of one reason about a device, of versions after `after`."""
        return [
            event.note
            for event in self.events.items.values()
            if event.reason == reason
            and event.reporting_instance == node
            and device in event.note
            and int(event.metadata.resource_version) > after
        ]

    async def recover(self, node: str, device: str) -> None:
        """Put the board right and tell the agent so; returns when no taint is left on it."""
        await give_order(self.api, node, new_order(device, recover=True))
        await self.until(f"{device} of {node} is itself again", 20, lambda: not self.taints(node, device))

    async def recover_all(self) -> None:
        """Leave no fault behind."""
        for name in list(self.all_taints()):
            node, _, device = name.partition("/")
            await self.recover(node, device)

    def admit(self, node: Node) -> None:
        """Ask for one pod that holds all GPUs of a node and tolerates XIDs, and nothing else."""
        text = PATIENTS.read_text().replace("NODE", node.name)
        path = self.cluster.layout.state / f"patient-{node.name}.yaml"
        path.write_text(text)
        kubectl(self.cluster, "apply", "-f", str(path))

    def patient(self, node: Node) -> Pod | None:
        """The patient of a node as it is now."""
        return self.pods.items.get(f"{NAMESPACE}/patient-{node.name}")

    def is_running(self, node: Node) -> bool:
        """Whether the node's patient runs and is to stay."""
        pod = self.patient(node)
        return pod is not None and pod.status.phase == "Running" and not pod.terminating

    async def discharge(self) -> None:
        """Remove all patients; the namespace stays."""
        kinds = "pods,resourceclaims"
        kubectl(self.cluster, "delete", kinds, "--all", "-n", NAMESPACE, "--ignore-not-found", "--wait=false")
        await self.until("all patients are gone", 60, lambda: not self.pods.items and not self.claims.items)


def log_xid(node: Node, device: str, code: int, text: str = "") -> float:
    """Write an XID to a node's kernel log, and nothing anywhere else; time.time() just before."""
    domain, bus, slot, _ = device.removeprefix("gpu-").split("-")
    at = time.time()
    kernel_log.append(node.kmsg, f"NVRM: Xid (PCI:{domain}:{bus}:{slot}): {code}, {text}")
    return at


@asynccontextmanager
async def ward(cluster: Cluster) -> AsyncIterator[Ward]:
    """A Ward whose watches are in step; ended with the block."""
    async with await Api.connect(cluster.kubeconfig, "gpunode-ward") as api:
        it = Ward(cluster, api)
        async with following(it.slices, it.events, it.pods, it.claims):
            yield it
