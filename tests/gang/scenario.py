"""Clusters and gangs as short text, for tests.

    node n1 gpus=8 model=h100 cpu=64 link=4 rack=r1 cordoned
    gang train pods=4,4,8 min=3 prio=10 topology=rack same=nvlinkDomain
    gang old pods=8 bound=n1
    pod single gpus=1
    taint n1/gpu-3 xid=79
    grace n1/gpu-3 xid=600s
    norule

`link=4`: NVLink domains of four GPUs. `bound=`: node of each pod; its claim holds the first free GPUs there.
`alt=h100,a100`: the claim is a prioritized list of GPU models. Words without `=` are flags.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from gpunode.gang.decide import decide
from gpunode.model.core import (
    Affinity,
    Container,
    ContainerResources,
    GangPolicy,
    Job,
    Node,
    NodeAffinity,
    NodeSpec,
    NodeStatus,
    Pod,
    PodGroup,
    PodGroupSpec,
    PodGroupStatus,
    PodResourceClaim,
    PodResourceClaimStatus,
    PodSpec,
    PodStatus,
    SchedulingConstraints,
    SchedulingGate,
    SchedulingGroup,
    SchedulingPolicy,
    TopologyConstraint,
)
from gpunode.model.gang import Action, Config, Place, Report, Snapshot
from gpunode.model.meta import Condition, ObjectMeta, OwnerReference
from gpunode.model.names import DECISION_ANNOTATION, MANAGED_TAINT, PLACED_CONDITION, PLACEMENT_GATE
from gpunode.model.resource import (
    AllocatedDevices,
    Allocation,
    AllocationResult,
    Attribute,
    Capacity,
    CelSelector,
    ConsumerReference,
    Device,
    DeviceClaim,
    DeviceClass,
    DeviceClassSpec,
    DeviceConstraint,
    DeviceRequest,
    DeviceSelector,
    DeviceTaint,
    DeviceTaintRule,
    DeviceTaintRuleSpec,
    DeviceTaintSelector,
    DeviceToleration,
    ExactRequest,
    NodeSelector,
    NodeSelectorRequirement,
    NodeSelectorTerm,
    Pool,
    ResourceClaim,
    ResourceClaimSpec,
    ResourceClaimStatus,
    ResourceSlice,
    ResourceSliceSpec,
    SubRequest,
)

DRIVER = "gpu.gpunode.dev"
NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
CREATED = "2026-11-29T00:00:00Z"
# What a gang shows that has been placed.
TOLD = Condition(type=PLACED_CONDITION, status="True", reason="Placed", message="pods placed")
CONFIG = Config(drivers=frozenset({DRIVER}))


def model_is(model: str) -> str:
    return f'device.attributes["{DRIVER}"].model == "{model}"'


def pinned(node: str) -> NodeSelector:
    requirement = NodeSelectorRequirement(key="metadata.name", operator="In", values=(node,))
    return NodeSelector(node_selector_terms=(NodeSelectorTerm(match_fields=(requirement,)),))


@dataclass
class Scenario:
    """Objects under construction; `snapshot` freezes them."""

    nodes: dict[str, Node] = field(default_factory=dict)
    slices: dict[str, ResourceSlice] = field(default_factory=dict)
    claims: dict[str, ResourceClaim] = field(default_factory=dict)
    rules: dict[str, DeviceTaintRule] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    groups: dict[str, PodGroup] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)

    def snapshot(self) -> Snapshot:
        selector = DeviceSelector(cel=CelSelector(expression=f'device.driver == "{DRIVER}"'))
        class_ = DeviceClass(metadata=ObjectMeta(name="gpu"), spec=DeviceClassSpec(selectors=(selector,)))
        return Snapshot(
            nodes=dict(self.nodes),
            slices=dict(self.slices),
            claims=dict(self.claims),
            classes={"gpu": class_},
            taint_rules=dict(self.rules),
            pods=dict(self.pods),
            pod_groups=dict(self.groups),
            jobs=dict(self.jobs),
        )

    # -- lines -------------------------------------------------------------------------------------------------

    def node(self, name: str, **options: str) -> None:
        labels = {k: v for k, v in options.items() if k in ("rack", "zone")}
        ready = "False" if "notready" in options else "True"
        self.nodes[name] = Node(
            metadata=ObjectMeta(name=name, labels={"kubernetes.io/hostname": name, **labels}),
            spec=NodeSpec(unschedulable="cordoned" in options),
            status=NodeStatus(
                allocatable={"cpu": options.get("cpu", "128"), "memory": "1Ti", "pods": "110"},
                conditions=(Condition(type="Ready", status=ready),),
            ),
        )
        count, link = int(options.get("gpus", "8")), int(options.get("link", "8"))
        devices = tuple(
            Device(
                name=f"gpu-{i}",
                attributes={
                    "model": Attribute(string=options.get("model", "h100")),
                    "uuid": Attribute(string=f"GPU-{name}-{i}"),
                    "nvlinkDomain": Attribute(string=f"{name}-{i // link}"),
                },
                capacity={"memory": Capacity(value="80Gi")},
            )
            for i in range(count)
        )
        slices = 2 if "incomplete" in options else 1
        self.slices[f"{name}-s"] = ResourceSlice(
            metadata=ObjectMeta(name=f"{name}-s"),
            spec=ResourceSliceSpec(
                driver=DRIVER,
                pool=Pool(name=name, generation=1, resource_slice_count=slices),
                node_name=name,
                devices=devices,
            ),
        )

    def gang(self, name: str, **options: str) -> None:
        sizes = [int(s) for s in options["pods"].split(",")]
        namespace = options.get("ns", "default")
        topology = (TopologyConstraint(key=options["topology"]),) if "topology" in options else ()
        self.groups[f"{namespace}/{name}"] = PodGroup(
            metadata=ObjectMeta(name=name, namespace=namespace, creation_timestamp=options.get("at", CREATED)),
            spec=PodGroupSpec(
                scheduling_policy=SchedulingPolicy(gang=GangPolicy(min_count=int(options.get("min", len(sizes))))),
                scheduling_constraints=SchedulingConstraints(topology=topology) if topology else None,
                priority=int(options["prio"]) if "prio" in options else None,
            ),
            status=PodGroupStatus(conditions=(TOLD,) if "bound" in options else ()),
        )  # fmt: skip
        nodes = options["bound"].split(",") if "bound" in options else [""] * len(sizes)
        if "job" in options:
            self.jobs[f"{namespace}/{options['job']}"] = Job(
                metadata=ObjectMeta(name=options["job"], namespace=namespace, uid=f"uid-{options['job']}")
            )
        for i, (size, node) in enumerate(zip(sizes, nodes, strict=False)):
            self.pod(f"{name}-{i}", **{**options, "gpus": str(size), "group": name, "on": node})

    def pod(self, name: str, **options: str) -> None:
        namespace, node = options.get("ns", "default"), options.get("on", "")
        size = int(options.get("gpus", "1"))
        owner = options.get("job")
        gate = () if node or "ungated" in options else (SchedulingGate(name=PLACEMENT_GATE),)
        foreign = (SchedulingGate(name="example.com/wait"),) if "foreign" in options else ()
        key = f"{namespace}/{name}"
        required = NodeAffinity(required=pinned(node)) if node and "ungated" not in options else None
        self.pods[key] = Pod(
            metadata=ObjectMeta(
                name=name,
                namespace=namespace,
                uid=f"uid-{name}",
                creation_timestamp=options.get("at", CREATED),
                annotations={DECISION_ANNOTATION: "000000000000"} if required else {},
                deletion_timestamp="2026-11-29T11:59:00Z" if "terminating" in options else None,
                owner_references=(
                    OwnerReference(kind="Job", name=owner, uid=f"uid-{owner}", controller=True),
                ) if owner else (),
            ),
            spec=PodSpec(
                node_name=node,
                priority=int(options.get("prio", "0")),
                affinity=Affinity(node_affinity=required) if required else None,
                containers=(Container(resources=ContainerResources(requests={"cpu": options.get("cpu", "1")})),),
                resource_claims=(PodResourceClaim(name="gpu", resource_claim_template_name="t"),) if size else (),
                scheduling_gates=(*gate, *foreign),
                scheduling_group=SchedulingGroup(pod_group_name=options["group"]) if "group" in options else None,
            ),
            status=PodStatus(
                phase="Running" if node else "Pending",
                conditions=(TOLD,) if required and "group" not in options else (),
                resource_claim_statuses=(
                    PodResourceClaimStatus(name="gpu", resource_claim_name=f"{name}-gpu"),
                ) if size else (),
            ),
        )  # fmt: skip
        if size and "noclaim" not in options:
            self._claim(f"{name}-gpu", namespace, name, size, node, options)

    def _claim(self, name: str, namespace: str, pod: str, size: int, node: str, options: dict[str, str]) -> None:
        constraint = (DeviceConstraint(match_attribute=f"{DRIVER}/{options['same']}"),) if "same" in options else ()
        tolerations: tuple[DeviceToleration, ...] = ()
        if "tolerates" in options:
            key, _, seconds = options["tolerates"].partition(":")
            tolerations = (
                DeviceToleration(
                    key=f"gpunode.dev/{key}", operator="Exists", effect="NoExecute",
                    toleration_seconds=int(seconds) if seconds else None,
                ),
            )  # fmt: skip
        if "alt" in options:
            subs = tuple(
                SubRequest(name=m, device_class_name="gpu", count=size, selectors=(_selector(model_is(m)),))
                for m in options["alt"].split(",")
            )
            request = DeviceRequest(name="gpu", first_available=subs)
        else:
            selectors = (_selector(model_is(options["model"])),) if "model" in options else ()
            if "cel" in options:
                selectors = (_selector(options["cel"]),)
            exact = ExactRequest(
                device_class_name=options.get("class", "gpu"), count=size, selectors=selectors, tolerations=tolerations
            )
            request = DeviceRequest(name="gpu", exactly=exact)
        status = ResourceClaimStatus()
        if node:
            first = self.held.get(node, 0)
            self.held[node] = first + size
            status = ResourceClaimStatus(
                allocation=allocated(node, [f"gpu-{i}" for i in range(first, first + size)], tolerations),
                reserved_for=(ConsumerReference(resource="pods", name=pod, uid=f"uid-{pod}"),),
            )
        self.claims[f"{namespace}/{name}"] = ResourceClaim(
            metadata=ObjectMeta(name=name, namespace=namespace, uid=f"uid-{name}"),
            spec=ResourceClaimSpec(devices=DeviceClaim(requests=(request,), constraints=constraint)),
            status=status,
        )

    def grace(self, target: str, **options: str) -> None:
        """The taint that an agent puts beside a health taint: `forever`, or seconds."""
        self.taint(target, **options, domain="grace.gpunode.dev", effect="None")

    def taint(self, target: str, **options: str) -> None:
        node, _, device = target.partition("/")
        name, value = next((k, v) for k, v in options.items() if k not in ("effect", "since", "domain"))
        domain = options.get("domain", "gpunode.dev")
        rule = f"taint-{node}-{device}-{name}" + ("" if domain == "gpunode.dev" else f"-{value}")
        self.rules[rule] = DeviceTaintRule(
            metadata=ObjectMeta(name=rule),
            spec=DeviceTaintRuleSpec(
                taint=DeviceTaint(
                    key=f"{domain}/{name}", value=value, effect=options.get("effect", "NoSchedule"),
                    time_added=options.get("since"),
                ),
                device_selector=DeviceTaintSelector(driver=DRIVER, pool=node, device=device or None),
            ),
        )  # fmt: skip


def _selector(expression: str) -> DeviceSelector:
    return DeviceSelector(cel=CelSelector(expression=expression))


def allocated(node: str, devices: list[str], tolerations: tuple[DeviceToleration, ...] = ()) -> Allocation:
    results = tuple(
        AllocationResult(request="gpu", driver=DRIVER, pool=node, device=d, tolerations=tolerations) for d in devices
    )
    return Allocation(devices=AllocatedDevices(results=results), node_selector=pinned(node))


def managed_rule(driver: str = DRIVER) -> DeviceTaintRule:
    return DeviceTaintRule(
        metadata=ObjectMeta(name=f"gpunode-managed-{driver}"),
        spec=DeviceTaintRuleSpec(
            taint=DeviceTaint(key=MANAGED_TAINT, value="true", effect="NoSchedule"),
            device_selector=DeviceTaintSelector(driver=driver),
        ),
    )


def scenario(text: str) -> Scenario:
    """Parse the lines of a scenario."""
    world = Scenario()
    world.rules["managed"] = managed_rule()
    for line in text.strip().splitlines():
        words = line.split("#")[0].split()
        if not words:
            continue
        if words[0] == "norule":
            del world.rules["managed"]
            continue
        options: dict[str, Any] = {}
        for word in words[2:]:
            name, _, value = word.partition("=")
            options[name] = value
        getattr(world, words[0])(words[1], **options)
    return world


def run(text: str) -> tuple[Action, ...]:
    return decide(scenario(text).snapshot(), NOW, CONFIG)


def places(actions: tuple[Action, ...]) -> dict[str, list[str]]:
    """Node of each member in rank order, by gang name; only gangs that were placed."""
    return {a.gang.rpartition("/")[2]: [x.node for x in a.assignments] for a in actions if isinstance(a, Place)}


def reasons(actions: tuple[Action, ...]) -> dict[str, str]:
    """`Code: text` by gang name."""
    return {a.gang.rpartition("/")[2]: f"{a.reason.code}: {a.reason.text}" for a in actions if isinstance(a, Report)}


def devices(actions: tuple[Action, ...]) -> list[str]:
    """Every device given, as pool/device."""
    return [
        f"{r.pool}/{r.device}"
        for a in actions
        if isinstance(a, Place)
        for assignment in a.assignments
        for claim in assignment.claims
        for r in claim.allocation.devices.results
    ]
