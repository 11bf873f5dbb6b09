"""Nodes, pods, PodGroups and Jobs, reduced to what placement and eviction read."""

from msgspec import field

from gpunode.model.meta import ApiStruct, Condition, ObjectMeta
from gpunode.model.resource import NodeSelector


class NodeTaint(ApiStruct, frozen=True):
    key: str
    effect: str
    value: str = ""


class NodeSpec(ApiStruct, frozen=True):
    unschedulable: bool = False
    taints: tuple[NodeTaint, ...] = ()


class NodeStatus(ApiStruct, frozen=True):
    allocatable: dict[str, str] = {}
    conditions: tuple[Condition, ...] = ()


class Node(ApiStruct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def ready(self) -> bool:
        """Whether the kubelet reports Ready; a node without that condition counts as ready (bare test nodes)."""
        return next((c.status == "True" for c in self.status.conditions if c.type == "Ready"), True)


class Toleration(ApiStruct, frozen=True):
    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


class ContainerClaim(ApiStruct, frozen=True):
    name: str
    request: str | None = None


class ContainerResources(ApiStruct, frozen=True):
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    claims: tuple[ContainerClaim, ...] = ()


class ContainerPort(ApiStruct, frozen=True):
    host_port: int | None = None
    host_ip: str = field(default="", name="hostIP")
    protocol: str = "TCP"


class Container(ApiStruct, frozen=True):
    name: str = ""
    resources: ContainerResources = ContainerResources()
    restart_policy: str | None = None
    ports: tuple[ContainerPort, ...] = ()


class NodeAffinity(ApiStruct, frozen=True):
    required: NodeSelector | None = field(default=None, name="requiredDuringSchedulingIgnoredDuringExecution")


class Affinity(ApiStruct, frozen=True):
    node_affinity: NodeAffinity | None = None


class PodResourceClaim(ApiStruct, frozen=True):
    name: str
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class SchedulingGate(ApiStruct, frozen=True):
    name: str


class SchedulingGroup(ApiStruct, frozen=True):
    pod_group_name: str | None = None


class PodSpec(ApiStruct, frozen=True):
    node_name: str = ""
    scheduler_name: str = "default-scheduler"
    priority: int = 0
    preemption_policy: str = "PreemptLowerPriority"
    node_selector: dict[str, str] = {}
    affinity: Affinity | None = None
    tolerations: tuple[Toleration, ...] = ()
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    overhead: dict[str, str] = {}
    resource_claims: tuple[PodResourceClaim, ...] = ()
    scheduling_gates: tuple[SchedulingGate, ...] = ()
    scheduling_group: SchedulingGroup | None = None


class PodResourceClaimStatus(ApiStruct, frozen=True):
    name: str
    resource_claim_name: str | None = None


class ResourceHealth(ApiStruct, frozen=True):
    resource_id: str = field(default="", name="resourceID")
    health: str = "Unknown"
    message: str = ""


class ResourceStatus(ApiStruct, frozen=True):
    name: str = ""
    resources: tuple[ResourceHealth, ...] = ()


class ContainerStatus(ApiStruct, frozen=True):
    name: str = ""
    ready: bool = False
    allocated_resources_status: tuple[ResourceStatus, ...] = ()


class PodStatus(ApiStruct, frozen=True):
    phase: str = ""
    conditions: tuple[Condition, ...] = ()
    resource_claim_statuses: tuple[PodResourceClaimStatus, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(ApiStruct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def finished(self) -> bool:
        return self.status.phase in ("Succeeded", "Failed")

    @property
    def terminating(self) -> bool:
        return self.metadata.deletion_timestamp is not None


class GangPolicy(ApiStruct, frozen=True):
    min_count: int


class SchedulingPolicy(ApiStruct, frozen=True):
    gang: GangPolicy | None = None


class TopologyConstraint(ApiStruct, frozen=True):
    key: str


class SchedulingConstraints(ApiStruct, frozen=True):
    topology: tuple[TopologyConstraint, ...] = ()


class PodGroupSpec(ApiStruct, frozen=True):
    scheduling_policy: SchedulingPolicy = SchedulingPolicy()
    scheduling_constraints: SchedulingConstraints | None = None
    priority: int | None = None


class PodGroupStatus(ApiStruct, frozen=True):
    conditions: tuple[Condition, ...] = ()


class PodGroup(ApiStruct, frozen=True):
    """scheduling.k8s.io PodGroup; the fields read here are the same in v1alpha2 (1.36) and v1beta1 (1.37)."""

    metadata: ObjectMeta = ObjectMeta()
    spec: PodGroupSpec = PodGroupSpec()
    status: PodGroupStatus = PodGroupStatus()


class JobSpec(ApiStruct, frozen=True):
    suspend: bool = False


class JobStatus(ApiStruct, frozen=True):
    conditions: tuple[Condition, ...] = ()
    active: int = 0
    succeeded: int = 0
    failed: int = 0
    terminating: int | None = None


class Job(ApiStruct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: JobSpec = JobSpec()
    status: JobStatus = JobStatus()
