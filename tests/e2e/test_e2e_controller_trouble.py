"""What clusters do to a placement controller: pods of every shape, rivals, conflicts, and an API server that goes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from gpunode.allocate.allocator import allocate
from gpunode.allocate.cel import Selectors
from gpunode.allocate.pools import devices_on
from gpunode.allocate.usage import Usage
from gpunode.cluster.cluster import Cluster
from gpunode.cluster.install import CONTROLLER
from gpunode.cluster.lifecycle import up
from gpunode.kube.errors import ApiError
from gpunode.kube.kinds import CLAIMS, CLASSES, NODES, PODS, SLICES
from gpunode.model.core import Node
from gpunode.model.names import MANAGED_TAINT
from gpunode.model.resource import (
    DeviceTaint,
    DeviceTaintRule,
    DeviceTaintRuleSpec,
    DeviceTaintSelector,
    ResourceClaim,
    ResourceSlice,
)
from tests.allocate.pooling import build_pools
from tests.e2e.checkers import checkers
from tests.e2e.scene import Json, Scene, controller_inside, gated, scene, without_controller

pytestmark = pytest.mark.e2e
OTHER = "other.example.com"


@pytest.fixture
async def it(cluster: Cluster) -> AsyncIterator[Scene]:
    async with checkers(cluster), scene(cluster, "trouble") as made:
        await made.template("node")
        await made.template("one", 1)
        yield made


@contextlib.asynccontextmanager
async def other_driver(it: Scene) -> AsyncIterator[Json]:
    """Two devices of a driver that is not managed, on the first node; its class has configuration."""
    name = it.cluster.nodes[0].name
    node = await it.api.get(NODES.path(name=name), Node)
    slice_ = {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "metadata": {"name": f"{name}-other", "ownerReferences": [
            {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node.metadata.uid}]},
        "spec": {
            "driver": OTHER, "nodeName": name, "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
            "devices": [
                {"name": "whole", "attributes": {"kind": {"string": "whole"}}, "capacity": {"memory": {"value": "8Gi"}},
                 "taints": [{"key": "example.com/old", "value": "1", "effect": "NoSchedule"}]},
                {"name": "parts", "attributes": {"kind": {"string": "parts"}}, "allowMultipleAllocations": True,
                 "capacity": {"memory": {"value": "8Gi", "requestPolicy": {
                     "default": "1Gi", "validRange": {"min": "1Gi", "step": "1Gi"}}}}},
            ],
        },
    }  # fmt: skip
    config = [{"opaque": {"driver": OTHER, "parameters": {"apiVersion": "example.com/v1", "kind": "C"}}}]
    select = [{"cel": {"expression": f'device.driver == "{OTHER}"'}}]
    class_ = {
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": OTHER},
        "spec": {"selectors": select, "config": config},
    }  # fmt: skip
    await it.api.create(SLICES.path(), slice_)
    await it.api.create(CLASSES.path(), class_)
    try:
        yield slice_ | {"class": class_}
    finally:
        await it.api.delete(SLICES.path(name=f"{name}-other"))
        await it.api.delete(CLASSES.path(name=OTHER))


async def test_a_pod_alone_and_one_outside_the_gang_namespaces_run(it: Scene, cluster: Cluster) -> None:
    await it.api.create(PODS.path("trouble"), it.pod("alone", "one"))
    await it.until("the pod runs", lambda: bool(it.running("alone")))
    async with scene(cluster, "elsewhere", gangs=False) as there:
        await there.template("one", 1)
        await there.api.create(PODS.path("elsewhere"), there.pod("loose", "one"))
        await there.until("the ungated pod runs", lambda: bool(there.running("loose")))
        (pod,) = there.running("loose")
        assert not pod.metadata.annotations, "it is not touched"
        assert "lacks the label" in there.said("loose")[2]


async def test_claims_of_other_drivers_are_left_to_kube_scheduler(it: Scene) -> None:
    async with other_driver(it):
        request = {"name": "a", "exactly": {"deviceClassName": OTHER, "count": 1}}
        await it.template_of("other", {"requests": [request]})
        await it.api.create(PODS.path("trouble"), it.pod("foreign", "other"))
        # Nobody prepares devices of that driver here, so it is bound and stays Pending.
        await it.until("it is bound", lambda: any(p.spec.node_name for p in it.pods.items.values()))
        (pod,) = it.pods.items.values()
        assert not gated(pod)
        await it.clear()


async def test_a_failing_selector_is_told_and_stops_nobody_else(it: Scene) -> None:
    bad = [{"cel": {"expression": 'device.attributes["gpu.gpunode.dev"].nothing == "x"'}}]
    await it.template("bad", 1, selectors=bad)
    await it.gang("bad", 2, "bad")
    await it.gang("good", 2, "one")
    await it.until("the good gang runs", lambda: len(it.running("good")) == 2)
    await it.until("the bad one is told why", lambda: it.placed("bad")[1] == "SelectorError")
    assert all(gated(p) for p in it.pods.items.values() if p.metadata.name.startswith("bad"))


async def test_a_foreign_gate_holds_the_whole_gang(it: Scene) -> None:
    await it.group("held", 2)
    await it.api.create(PODS.path("trouble"), it.pod("held-0", "one", "held"))
    gate = [{"name": "example.com/quota"}]
    await it.api.create(PODS.path("trouble"), it.pod("held-1", "one", "held", schedulingGates=gate))
    await it.until("it is told", lambda: it.placed("held")[1] == "WaitingForForeignGate")
    assert not [c for c in it.claims.items.values() if c.status.allocation]
    pod = it.pods.items["trouble/held-1"]
    index = next(i for i, g in enumerate(pod.spec.scheduling_gates) if g.name == "example.com/quota")
    lift = [{"op": "remove", "path": f"/spec/schedulingGates/{index}"}]
    await it.api.patch(PODS.path("trouble", "held-1"), lift, kind="json")
    await it.until("it runs", lambda: len(it.running("held")) == 2)


async def test_of_two_gangs_for_the_same_nodes_one_runs_whole_and_the_other_follows(it: Scene) -> None:
    size = len(it.cluster.nodes) - 1
    await asyncio.gather(it.gang("ping", size, "node"), it.gang("pong", size, "node"))
    await it.until("one runs", lambda: size in (len(it.running("ping")), len(it.running("pong"))))
    first, second = ("ping", "pong") if it.running("ping") else ("pong", "ping")
    await it.until("the other is told", lambda: it.placed(second)[0] == "False")
    assert all(gated(p) for p in it.pods.items.values() if p.metadata.name.startswith(second))
    for number in range(size):
        await it.delete(f"{first}-{number}")
    await it.until("the other runs", lambda: len(it.running(second)) == size)


async def test_a_group_that_is_made_anew_under_the_same_name(it: Scene) -> None:
    for _ in range(3):
        await it.gang("again", 2, "one")
        await it.api.delete(it.group_kind.path("trouble", "again"), {"propagationPolicy": "Background"})
        for number in range(2):
            await it.delete(f"again-{number}")
        await it.until("it is gone", lambda: not it.pods.items and not it.groups.items)
    await it.gang("again", 2, "one")
    await it.until("it runs", lambda: len(it.running("again")) == 2)


async def test_a_member_that_is_replaced_between_decision_and_writing(it: Scene, cluster: Cluster) -> None:
    """Just before the first write a pod goes; one of the same name comes later and the gang becomes whole."""
    async with without_controller(cluster):
        await it.gang("swap", 2, "node")
        async with controller_inside(cluster) as api:
            api.before_first = lambda: _replace(it)
            await it.until("the gang runs", lambda: len(it.running("swap")) == 2)
            await it.until("nothing leaked", lambda: not it.leaked())


async def _replace(it: Scene) -> None:
    await it.delete("swap-1")
    while "trouble/swap-1" in it.pods.items:
        await asyncio.sleep(0.01)
    await it.api.create(PODS.path("trouble"), it.pod("swap-1", "node", "swap"))


async def test_a_storm_of_conflicts_delays_and_breaks_nothing(it: Scene) -> None:
    async def storm() -> None:
        number = 0
        while True:
            number += 1
            await asyncio.sleep(0.005)
            for pod in list(it.pods.items.values()):
                patch = {"metadata": {"annotations": {"example.com/touched": str(number)}}}
                with contextlib.suppress(ApiError):
                    await it.api.patch(PODS.path_of(pod.metadata.key), patch)

    task = asyncio.create_task(storm())
    try:
        await it.gang("storm", 2, "node")
        await it.until("it runs all the same", lambda: len(it.running("storm")) == 2)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_api_server_that_is_killed_while_a_gang_is_placed(it: Scene, cluster: Cluster) -> None:
    await it.gang("cut", 2, "node")
    await asyncio.to_thread(cluster.kill, None, "kube-apiserver")
    await asyncio.to_thread(up, cluster.spec, lambda *_: None)
    await it.until("it runs", lambda: len(it.running("cut")) == 2, 90)
    await it.until("nothing leaked", lambda: not it.leaked())


async def test_a_placement_costs_two_writes_a_member(it: Scene, cluster: Cluster) -> None:
    size = len(it.cluster.nodes) - 1
    async with without_controller(cluster), controller_inside(cluster) as api:
        await it.gang("count", size, "node")
        await it.until("it runs", lambda: len(it.running("count")) == size)
        await it.until("it is told", lambda: it.placed("count")[0] == "True")
        await asyncio.sleep(1.5)
        pods = [w for w in api.writes if "/pods/" in w or "/resourceclaims/" in w]
        assert len(pods) == 2 * size, api.writes
        assert len(api.writes) - len(pods) <= 4, api.writes


@pytest.mark.soak
def test_an_idle_controller_uses_little(cluster: Cluster, record_property: Callable[[str, object], None]) -> None:
    record = cluster.processes.get(CONTROLLER)
    assert record is not None
    process = psutil.Process(record.pid)
    everyone = [process, *process.children(recursive=True)]
    before, began = [sum(p.cpu_times()[:2]) for p in everyone], time.monotonic()
    time.sleep(5)
    used = sum(sum(p.cpu_times()[:2]) for p in everyone) - sum(before)
    record_property("idle_cpu_share", round(used / (time.monotonic() - began), 4))
    record_property("rss_mib", round(sum(p.memory_info().rss for p in everyone) / 2**20))
    assert used < 2.5, "half a core while nothing happens"


# -- what is written ----------------------------------------------------------------------------------------------


async def test_an_allocation_is_what_kube_scheduler_writes(it: Scene) -> None:
    """The same claim on the same slice, given out by kube-scheduler and by us."""
    tolerations = [{"key": "example.com/old", "operator": "Exists"}]
    devices: dict[str, Any] = {
        "requests": [
            {"name": "w", "exactly": {"deviceClassName": OTHER, "count": 1, "tolerations": tolerations, "selectors": [
                {"cel": {"expression": f'device.attributes["{OTHER}"].kind == "whole"'}}]}},
            {"name": "p", "firstAvailable": [
                {"name": "much", "deviceClassName": OTHER, "capacity": {"requests": {"memory": "99Gi"}}},
                {"name": "some", "deviceClassName": OTHER, "capacity": {"requests": {"memory": "1500Mi"}}}]},
        ],
        "config": [
            {"requests": ["w", "p/some"], "opaque": {"driver": OTHER, "parameters": {"of": "all"}}},
            {"requests": ["w"], "opaque": {"driver": OTHER, "parameters": {"of": "one"}}},
            {"requests": ["p/much"], "opaque": {"driver": OTHER, "parameters": {"of": "none"}}},
        ],
    }  # fmt: skip
    async with other_driver(it) as made:
        await it.template_of("gold", devices)
        await it.api.create(PODS.path("trouble"), it.pod("gold", "gold"))
        await it.until("kube-scheduler allocated", lambda: any(c.status.allocation for c in it.claims.items.values()))
        (key,) = it.claims.items
        theirs = msgspec.json.decode(await it.api.request("GET", CLAIMS.path_of(key)))
        ours = _ours(made, theirs, await it.api.get(NODES.path(name=made["spec"]["nodeName"]), Node))
        await it.clear()
    written = theirs["status"]["allocation"]
    for result in (*written["devices"]["results"], *ours["devices"]["results"]):
        result.pop("shareID", None)
    assert written.pop("allocationTimestamp")[:10] == ours.pop("allocationTimestamp")[:10]
    assert ours == written


def _ours(made: Json, claim: Json, node: Node) -> Json:
    from gpunode.model.resource import DeviceClass

    slice_ = msgspec.convert({k: made[k] for k in ("metadata", "spec")}, ResourceSlice)
    rule = DeviceTaintRule(
        spec=DeviceTaintRuleSpec(
            taint=DeviceTaint(key=MANAGED_TAINT, value="true", effect="NoSchedule"),
            device_selector=DeviceTaintSelector(driver=OTHER),
        )
    )
    pools = build_pools({"s": slice_}, {"r": rule}, frozenset({OTHER}))
    wanted = msgspec.convert({k: claim[k] for k in ("metadata", "spec")}, ResourceClaim)
    classes = {OTHER: msgspec.convert(made["class"], DeviceClass)}
    answer = allocate([wanted], devices_on(node, pools.values()), Usage(pools), classes, Selectors(), datetime.now(UTC))
    assert isinstance(answer, tuple), answer
    found: Json = msgspec.json.decode(msgspec.json.encode(answer[0]))
    return found


# -- pods of every shape ------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "c"])
AMOUNTS = st.sampled_from(["1", "100m", "1Gi", "1e3", "0", "5E", "1.5", "123456789123456789123456789", "100n", "-1"])
KEYS = st.sampled_from(["cpu", "memory", "ephemeral-storage", "example.com/x", "hugepages-2Mi", "nvidia.com/gpu",
                        "deviceclass.resource.kubernetes.io/gpu.gpunode.dev"])  # fmt: skip
VALUES = st.sampled_from(["", "a", "1", "-9", "true", "gpu-node-0", "x" * 63])
TERM = st.fixed_dictionaries({}, optional={
    "matchExpressions": st.lists(st.fixed_dictionaries({
        "key": st.sampled_from(["kubernetes.io/hostname", "zone", "example.com/n"]),
        "operator": st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"])},
        optional={"values": st.lists(VALUES, max_size=2)}), max_size=2),
    "matchFields": st.lists(st.fixed_dictionaries({
        "key": st.just("metadata.name"), "operator": st.sampled_from(["In", "NotIn"]),
        "values": st.lists(VALUES, min_size=1, max_size=1)}), max_size=2),
})  # fmt: skip
PODS_OF_ANY_SHAPE = st.fixed_dictionaries(
    {"restartPolicy": st.sampled_from(["Always", "Never", "OnFailure"]),
     "terminationGracePeriodSeconds": st.sampled_from([0, 1, 3600])},
    optional={
        "schedulingGroup": st.fixed_dictionaries({"podGroupName": st.sampled_from(["none", "some"])}),
        "nodeSelector": st.dictionaries(st.sampled_from(["zone", "a/b"]), VALUES, max_size=2),
        "priority": st.integers(-5, 5),
        "schedulerName": st.sampled_from(["default-scheduler", "nobody"]),
        "hostNetwork": st.booleans(),
        "schedulingGates": st.lists(st.fixed_dictionaries({"name": st.sampled_from(["x/y", "z"])}), max_size=2),
        "tolerations": st.lists(st.fixed_dictionaries({}, optional={
            "key": NAMES, "operator": st.sampled_from(["Exists", "Equal", "Lt"]), "value": VALUES,
            "effect": st.sampled_from(["NoSchedule", "NoExecute", "PreferNoSchedule"])}), max_size=3),
        "affinity": st.fixed_dictionaries({}, optional={
            "nodeAffinity": st.fixed_dictionaries({}, optional={
                "requiredDuringSchedulingIgnoredDuringExecution": st.fixed_dictionaries(
                    {"nodeSelectorTerms": st.lists(TERM, min_size=1, max_size=3)})}),
            "podAffinity": st.just({})}),
        "resourceClaims": st.lists(st.one_of(
            st.fixed_dictionaries({"name": NAMES, "resourceClaimTemplateName": st.sampled_from(["one", "absent"])}),
            st.fixed_dictionaries({"name": NAMES, "resourceClaimName": st.sampled_from(["shared", "absent"])}),
        ), max_size=3),
        "topologySpreadConstraints": st.just(
            [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
        ),
        "overhead": st.dictionaries(KEYS, AMOUNTS, max_size=1),
    },
)  # fmt: skip
RESOURCES = st.fixed_dictionaries(
    {},
    optional={
        "requests": st.dictionaries(KEYS, AMOUNTS, max_size=3),
        "limits": st.dictionaries(KEYS, AMOUNTS, max_size=3),
    },
)


@pytest.mark.soak
async def test_pods_of_every_shape_do_not_stop_the_controller(it: Scene, cluster: Cluster) -> None:
    """Whatever pods the API server takes, the controller goes on deciding for the sane ones beside them."""
    shapes: list[tuple[Json, Json]] = []

    @seed(20261129)
    @settings(max_examples=400, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(PODS_OF_ANY_SHAPE, RESOURCES)
    def collect(spec: Json, resources: Json) -> None:
        shapes.append((spec, resources))

    collect()
    record = cluster.processes.get(CONTROLLER)
    shared = {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu.gpunode.dev"}}]}
    meta = {"name": "shared", "namespace": "trouble"}
    body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": meta, "spec": {"devices": shared}}
    await it.api.create(CLAIMS.path("trouble"), body)
    taken = 0
    for number, (spec, resources) in enumerate(shapes):
        if taken >= 200:
            break
        box = {"name": "c", "image": "localhost/none:1", "imagePullPolicy": "Never", "resources": resources}
        meta = {"name": f"odd-{number}", "namespace": "trouble"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec | {"containers": [box]}}
        with contextlib.suppress(ApiError):
            await it.api.create(PODS.path("trouble"), pod)
            taken += 1
    assert taken > 50, "the API server takes few of these shapes: widen them"
    await it.gang("sane", 1, "one")
    await it.until("the sane gang runs", lambda: len(it.running("sane")) == 1, 120)
    now = cluster.processes.get(CONTROLLER)
    assert record is not None and now is not None and record.pid == now.pid, "the controller died"
    assert "Traceback" not in cluster.processes.log(CONTROLLER).read_text()[-200_000:]
