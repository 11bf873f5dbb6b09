"""The DaemonSet and the Deployment of daemonset/ as pods, replaced while a gang runs and pods start and stop."""

import asyncio
import contextlib
import itertools
import json
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpunode.agent.orders import give_order, new_order
from gpunode.cluster.cluster import Cluster, Node
from gpunode.cluster.install import kubectl
from gpunode.kube.kinds import CLAIMS, PODS
from gpunode.model.names import SYSTEM_NAMESPACE
from tests.docs.documents import IN_AGENT, all_commands
from tests.e2e import pods
from tests.e2e.nodes import dra_socket, slices_of, sockets
from tests.e2e.rolling import SliceGaps, slice_gaps, until
from tests.e2e.scene import Scene, scene
from tests.fixtures import bare_cluster

pytestmark = pytest.mark.e2e

WORKLOADS = (f"daemonset/{pods.AGENT}", f"deployment/{pods.CONTROLLER}")
GAP_S = 2.0


@dataclass(frozen=True)
class Installed:
    """A cluster whose agents and controllers are pods. folder: of the kustomization."""

    cluster: Cluster
    folder: Path
    agent: pods.Patch
    controller: pods.Patch


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("pods")
    with bare_cluster("pods", 18543, nodes=2) as cluster:
        pods.empty_image(cluster, folder / "image.tar")
        agent = [*pods.FAKE_GPUS, *pods.host_python(mounts=True)]
        made = Installed(cluster, folder, agent, pods.host_python(mounts=False))
        pods.apply(cluster, folder, made.agent, made.controller)
        try:
            pods.rolled_out(cluster, *WORKLOADS)
        except Exception as error:
            raise AssertionError(pods.explain(cluster)) from error
        yield made


@dataclass
class Churn:
    """Pods with a GPU each that start and stop. started: how many ran."""

    here: Scene
    started: int = 0

    async def run(self, row: int) -> None:
        """One after the other until cancelled. Fails when one does not run, or does not go."""
        for number in itertools.count():
            name = f"churn-{row}-{number}"
            await self.here.api.create(PODS.path(self.here.namespace), self.here.pod(name, "one"))
            await self.here.until(f"{name} runs", partial(self._runs, name))
            self.started += 1
            await self.here.delete(name)
            await self.here.until(f"{name} is gone", partial(self._gone, name))

    def _runs(self, name: str) -> bool:
        return bool(self.here.running(name))

    def _gone(self, name: str) -> bool:
        return f"{self.here.namespace}/{name}" not in self.here.pods.items


@asynccontextmanager
async def churning(here: Scene) -> AsyncIterator[Churn]:
    """Two rows of such pods beside the block. Raises what went wrong with them."""
    churn = Churn(here)
    tasks = [asyncio.create_task(churn.run(row)) for row in range(2)]
    try:
        yield churn
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def all_gaps(cluster: Cluster) -> AsyncIterator[list[SliceGaps]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(slice_gaps(cluster, node)) for node in cluster.nodes]


def uids(cluster: Cluster) -> set[str]:
    return {pod["metadata"]["uid"] for app in (pods.AGENT, pods.CONTROLLER) for pod in pods.pods_of(cluster, app)}


def logs(cluster: Cluster, pod: dict[str, Any]) -> str:
    return kubectl(cluster, "logs", "-n", SYSTEM_NAMESPACE, pod["metadata"]["name"])


async def test_agent_and_controller_are_replaced_under_a_running_gang(installed: Installed) -> None:
    cluster = installed.cluster
    before = uids(cluster)
    assert len(before) == 4
    async with scene(cluster, "roll") as here, all_gaps(cluster) as gaps:
        await here.template("two", count=2)
        await here.template("one", count=1)
        await here.gang("train", 2, "two")
        await here.until("the gang runs", lambda: len(here.running("train-")) == 2)
        gang = {pod.metadata.uid for pod in here.running("train-")}
        await until(lambda: described(cluster, "roll") == 2, "status.devices of the gang's claims")
        async with churning(here) as churn:
            await here.until("a pod came and went", lambda: churn.started > 0)
            started = churn.started
            await asyncio.to_thread(kubectl, cluster, "rollout", "restart", "-n", SYSTEM_NAMESPACE, *WORKLOADS)
            await asyncio.to_thread(pods.rolled_out, cluster, *WORKLOADS)
            await until(lambda: len(uids(cluster)) == 4 and not uids(cluster) & before, "the old pods to go")
            during = churn.started
            await here.until("pods come and go through the new agents", lambda: churn.started > during + 1)
        assert during > started, "no pod started while the others were replaced"
        assert {pod.metadata.uid for pod in here.running("train-")} == gang
        assert max(one.longest_s for one in gaps) < GAP_S, [one.gaps_s for one in gaps]
        await asyncio.to_thread(check_one_agent_a_node, cluster)
        for gap, node in zip(gaps, cluster.nodes, strict=True):
            await check_one_publisher(cluster, node, gap)


def described(cluster: Cluster, namespace: str) -> int:
    """How many claims of a namespace an agent has described; it may, with the token that its pod is given."""
    claims = cluster.api.call("GET", CLAIMS.path(namespace))["items"]
    conditions = [
        {(c["type"], c["status"]) for status in claim["status"].get("devices", ()) for c in status["conditions"]}
        for claim in claims
    ]
    return conditions.count({("Prepared", "True"), ("Healthy", "True")})


def check_one_agent_a_node(cluster: Cluster) -> None:
    """Sockets of those that left are gone, and each pod found all that it needs."""
    for pod in pods.pods_of(cluster, pods.AGENT):
        node = cluster.node(pod["spec"]["nodeName"])
        uid = pod["metadata"]["uid"]
        assert [path.name for path in sockets(node)] == [f"gpu.gpunode.dev_{uid}-reg.sock"]
        assert dra_socket(node).name == f"dra-{uid}.sock"
        (status,) = pod["status"]["containerStatuses"]
        assert (status["restartCount"], status["ready"]) == (0, True), pods.explain(cluster)
        said = logs(cluster, pod)
        assert "ready: slices published" in said
        assert not [line for line in said.splitlines() if " ERROR " in line or "Traceback" in line], said
    for pod in pods.pods_of(cluster, pods.CONTROLLER):
        (status,) = pod["status"]["containerStatuses"]
        assert status["restartCount"] == 0, pods.explain(cluster)


async def check_one_publisher(cluster: Cluster, node: Node, gaps: SliceGaps) -> None:
    """A slice that is deleted comes back once, and nobody changes it after that."""
    (slice_,) = slices_of(cluster, node)
    before = set(gaps.uids)
    cluster.api.call("DELETE", f"/apis/resource.k8s.io/v1/resourceslices/{slice_['metadata']['name']}")
    await until(lambda: bool(gaps.uids - before), "the slice to come back")
    (again,) = slices_of(cluster, node)
    await asyncio.sleep(2)
    assert slices_of(cluster, node) == [again]
    assert len(gaps.uids - before) == 1


async def test_what_an_agent_knows_outlives_its_pod(installed: Installed) -> None:
    """It reads and writes the node's kernel log, and keeps health and the fake machine on the node."""
    cluster = installed.cluster
    node = cluster.nodes[0]
    (slice_,) = slices_of(cluster, node)
    device = slice_["spec"]["devices"][-1]["name"]
    async with scene(cluster, "outlives") as here:
        await give_order(here.api, node.name, new_order(device, xid=79))
        await until(lambda: taints(cluster, node, device) != [], f"{device} to be tainted")
        assert "NVRM: Xid" in node.kmsg.read_text()
        kept = node.state / "var-lib-gpunode"
        assert {"fake", "health.json"} <= {path.name for path in kept.iterdir()}
        (old,) = [p for p in pods.pods_of(cluster, pods.AGENT) if p["spec"]["nodeName"] == node.name]
        before = set(taints(cluster, node, device))
        await here.api.delete(PODS.path(SYSTEM_NAMESPACE, old["metadata"]["name"]))
        await until(lambda: old["metadata"]["uid"] not in uids(cluster), "the old pod to go")
        await until(lambda: len(ready_agents(cluster)) == 2, "the new pod to be ready")
        # One more: the lost GPU is published only because it was known before.
        assert before <= set(taints(cluster, node, device))
        await give_order(here.api, node.name, new_order(device, recover=True))
        await until(lambda: taints(cluster, node, device) == [], f"{device} to be well again")


def taints(cluster: Cluster, node: Node, device: str) -> list[tuple[str, str]]:
    found = [d for s in slices_of(cluster, node) for d in s["spec"].get("devices", ()) if d["name"] == device]
    return [(taint["key"], taint["timeAdded"]) for one in found for taint in one.get("taints", ())]


def ready_agents(cluster: Cluster) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods.pods_of(cluster, pods.AGENT) if pods.is_ready(pod)}


async def test_an_agent_that_does_not_get_ready_replaces_nobody(installed: Installed) -> None:
    """Here one that finds no NVML: the probe holds the update back, and the old agents go on."""
    cluster = installed.cluster
    before = ready_agents(cluster)
    assert len(before) == 2
    real = [op | {"value": "nvml"} if op["value"] == "fake" else op for op in installed.agent]
    async with all_gaps(cluster) as gaps:
        pods.apply(cluster, installed.folder, real, installed.controller)

        def waits() -> bool:
            more = [p for p in pods.pods_of(cluster, pods.AGENT) if p["metadata"]["uid"] not in before]
            return bool(more) and all("NvmlUnavailable" in kubectl(cluster, "get", "events", "-A") for _ in more)

        await until(waits, "the new agent to find no GPUs")
        await asyncio.sleep(5)  # more than two probes
        assert ready_agents(cluster) == before
        pods.apply(cluster, installed.folder, installed.agent, installed.controller)
        await until(lambda: {p["metadata"]["uid"] for p in pods.pods_of(cluster, pods.AGENT)} == before, "it to go")
        assert max(one.longest_s for one in gaps) < GAP_S, [one.gaps_s for one in gaps]
    # What it leaves behind counts for nothing.
    await until(lambda: all(len(sockets(node)) == 1 for node in cluster.nodes), "its sockets to go")


async def test_the_commands_of_a_node_run_in_its_agents_pod(installed: Installed) -> None:
    """As docs/operations.md shows them, on a GPU with a fault; here gpunode is the host's instead of the image's."""
    cluster, node, device = installed.cluster, installed.cluster.nodes[0], "gpu-0000-07-00-0"
    lines = [command.text for command in all_commands() if command.text.startswith(IN_AGENT)]
    assert [line.partition(" -- ")[2] for line in lines] == [
        "", "gpunode health status", "gpunode health history", "gpunode claims", f"gpunode health clear {device}",
    ]  # fmt: skip
    names = ("get", "pods", "-n", SYSTEM_NAMESPACE, "-l", f"app.kubernetes.io/name={pods.AGENT}", "-o", "name")
    await until(lambda: len(kubectl(cluster, *names).split()) == len(cluster.nodes), "pods of earlier tests to end")
    async with scene(cluster, "exec") as here:
        await give_order(here.api, node.name, new_order(device, xid=48))
        await until(lambda: taints(cluster, node, device) != [], f"{device} to be tainted")
        said = await asyncio.to_thread(shell, cluster, lines)
        assert f"{device}" in said and "XID 48" in said and "this node holds no claims" in said, said
        await until(lambda: taints(cluster, node, device) == [], f"{device} to be well by the operator's word")


def shell(cluster: Cluster, lines: Sequence[str]) -> str:
    """What a person's shell prints."""
    environment = {"KUBECONFIG": str(cluster.kubeconfig), "PATH": f"{Path(cluster.kubectl).parent}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(lines)],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_health_policy_reaches_the_agents_and_a_wrong_one_does_not(installed: Installed) -> None:
    cluster, node = installed.cluster, installed.cluster.nodes[0]
    policy = (pods.ROOT / "daemonset" / "examples" / "health-policy" / "policy.yaml").read_text()
    (slice_,) = slices_of(cluster, node)
    device = slice_["spec"]["devices"][0]["name"]

    def apply(text: str) -> None:
        pods.apply(cluster, installed.folder, installed.agent, installed.controller, policy=text)

    await asyncio.to_thread(apply, policy)
    await asyncio.to_thread(pods.rolled_out, cluster, WORKLOADS[0])
    async with scene(cluster, "policy") as here:
        pending = {"name": "t", "description": "A test.", "steps": [{"at": 0, "do": "remap-pending", "gpu": 0}]}
        await give_order(here.api, node.name, new_order(scenario=json.dumps(pending)))
        # Without the policy it would be the effect None, and no second taint.
        wanted = {("gpunode.dev/remap", "NoSchedule"), ("grace.gpunode.dev/remap", "None")}
        await until(lambda: wanted <= effects(cluster, node, device), f"{device} to be tainted as the policy says")
        await give_order(here.api, node.name, new_order(device, recover=True))
        await until(lambda: effects(cluster, node, device) == set(), f"{device} to be well again")
    before = ready_agents(cluster)
    assert len(before) == 2
    await asyncio.to_thread(apply, "effects: {nonsense: NoSchedule}\n")
    await until(
        lambda: any("'nonsense' names nothing" in text for text in ended(cluster)), "an agent to say why it ends"
    )
    assert ready_agents(cluster) == before
    await asyncio.to_thread(pods.apply, cluster, installed.folder, installed.agent, installed.controller)
    await asyncio.to_thread(pods.rolled_out, cluster, WORKLOADS[0])


def effects(cluster: Cluster, node: Node, device: str) -> set[tuple[str, str]]:
    found = [d for s in slices_of(cluster, node) for d in s["spec"].get("devices", ()) if d["name"] == device]
    return {(taint["key"], taint["effect"]) for one in found for taint in one.get("taints", ())}


def ended(cluster: Cluster) -> list[str]:
    """What agents said that are not ready."""
    return [logs(cluster, pod) for pod in pods.pods_of(cluster, pods.AGENT) if not pods.is_ready(pod) and began(pod)]


def began(pod: dict[str, Any]) -> bool:
    """Whether there can be a log."""
    return any("waiting" not in s["state"] or s["restartCount"] for s in pod["status"].get("containerStatuses", ()))


async def test_slices_of_a_node_that_is_deleted_go_and_stay_away(installed: Installed) -> None:
    """The last test here: the node does not come back. Its agent goes on for a while, and makes none for nobody."""
    cluster, node = installed.cluster, installed.cluster.nodes[-1]
    async with slice_gaps(cluster, node) as gaps:
        known = set(gaps.uids)
        cluster.api.call("DELETE", f"/api/v1/nodes/{node.name}")
        await until(lambda: slices_of(cluster, node) == [], "the node's slices to go")
        await asyncio.sleep(5)
        assert slices_of(cluster, node) == []
        assert gaps.uids == known, "made again for a node that is gone"
    assert slices_of(cluster, cluster.nodes[0]) != []
