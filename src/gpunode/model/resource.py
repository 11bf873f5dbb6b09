"""resource.k8s.io/v1 objects: slices, claims, classes, taint rules.

Field meanings and limits: k8s.io/api/resource/v1/types.go (v1.37).
"""

from typing import Any

from msgspec import field

from gpunode.model.meta import ApiStruct, ObjectMeta


class NodeSelectorRequirement(ApiStruct, frozen=True):
    key: str
    operator: str
    values: tuple[str, ...] = ()


class NodeSelectorTerm(ApiStruct, frozen=True):
    match_expressions: tuple[NodeSelectorRequirement, ...] = ()
    match_fields: tuple[NodeSelectorRequirement, ...] = ()


class NodeSelector(ApiStruct, frozen=True):
    node_selector_terms: tuple[NodeSelectorTerm, ...] = ()


class Attribute(ApiStruct, frozen=True):
    """One attribute value; exactly one field is set."""

    int_: int | None = field(default=None, name="int")
    bool_: bool | None = field(default=None, name="bool")
    string: str | None = None
    version: str | None = None

    @property
    def value(self) -> int | bool | str | None:
        """The value that is set, as a plain Python value (versions as text)."""
        for value in (self.string, self.int_, self.bool_, self.version):
            if value is not None:
                return value
        return None


class ValidRange(ApiStruct, frozen=True):
    min: str
    max: str | None = None
    step: str | None = None


class RequestPolicy(ApiStruct, frozen=True):
    default: str | None = None
    valid_values: tuple[str, ...] = ()
    valid_range: ValidRange | None = None


class Capacity(ApiStruct, frozen=True):
    value: str
    request_policy: RequestPolicy | None = None


class Counter(ApiStruct, frozen=True):
    value: str


class CounterSet(ApiStruct, frozen=True):
    name: str
    counters: dict[str, Counter] = {}


class CounterConsumption(ApiStruct, frozen=True):
    counter_set: str
    counters: dict[str, Counter] = {}


class DeviceTaint(ApiStruct, frozen=True):
    key: str
    effect: str
    value: str = ""
    time_added: str | None = None


class DeviceToleration(ApiStruct, frozen=True):
    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""
    toleration_seconds: int | None = None


class Device(ApiStruct, frozen=True):
    """A device as a slice publishes it. Attribute names without a domain belong to the driver."""

    name: str
    attributes: dict[str, Attribute] = {}
    capacity: dict[str, Capacity] = {}
    consumes_counters: tuple[CounterConsumption, ...] = ()
    taints: tuple[DeviceTaint, ...] = ()
    allow_multiple_allocations: bool = False
    binding_conditions: tuple[str, ...] = ()
    binding_failure_conditions: tuple[str, ...] = ()
    node_name: str | None = None
    node_selector: NodeSelector | None = None
    all_nodes: bool = False


class Pool(ApiStruct, frozen=True):
    name: str
    generation: int
    resource_slice_count: int


class ResourceSliceSpec(ApiStruct, frozen=True):
    driver: str
    pool: Pool
    node_name: str | None = None
    node_selector: NodeSelector | None = None
    all_nodes: bool = False
    per_device_node_selection: bool = False
    devices: tuple[Device, ...] = ()
    shared_counters: tuple[CounterSet, ...] = ()


class ResourceSlice(ApiStruct, frozen=True):
    spec: ResourceSliceSpec
    metadata: ObjectMeta = ObjectMeta()


class CelSelector(ApiStruct, frozen=True):
    expression: str


class DeviceSelector(ApiStruct, frozen=True):
    cel: CelSelector | None = None


class CapacityRequests(ApiStruct, frozen=True):
    requests: dict[str, str] = {}


class ExactRequest(ApiStruct, frozen=True):
    device_class_name: str
    selectors: tuple[DeviceSelector, ...] = ()
    allocation_mode: str = "ExactCount"
    count: int = 1
    admin_access: bool | None = None
    tolerations: tuple[DeviceToleration, ...] = ()
    capacity: CapacityRequests | None = None


class SubRequest(ApiStruct, frozen=True):
    """One alternative of a firstAvailable list; referred to as `<request>/<name>`."""

    name: str
    device_class_name: str
    selectors: tuple[DeviceSelector, ...] = ()
    allocation_mode: str = "ExactCount"
    count: int = 1
    tolerations: tuple[DeviceToleration, ...] = ()
    capacity: CapacityRequests | None = None


class DeviceRequest(ApiStruct, frozen=True):
    name: str
    exactly: ExactRequest | None = None
    first_available: tuple[SubRequest, ...] = ()


class DeviceConstraint(ApiStruct, frozen=True):
    requests: tuple[str, ...] = ()
    match_attribute: str | None = None
    distinct_attribute: str | None = None


class OpaqueConfig(ApiStruct, frozen=True):
    driver: str
    parameters: dict[str, Any] = {}


class ClaimConfig(ApiStruct, frozen=True):
    requests: tuple[str, ...] = ()
    opaque: OpaqueConfig | None = None


class DeviceClaim(ApiStruct, frozen=True):
    requests: tuple[DeviceRequest, ...] = ()
    constraints: tuple[DeviceConstraint, ...] = ()
    config: tuple[ClaimConfig, ...] = ()


class ResourceClaimSpec(ApiStruct, frozen=True):
    devices: DeviceClaim = DeviceClaim()


class AllocationResult(ApiStruct, frozen=True):
    """One allocated device. `request` is `req` or `req/sub`."""

    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool | None = None
    tolerations: tuple[DeviceToleration, ...] = ()
    binding_conditions: tuple[str, ...] = ()
    binding_failure_conditions: tuple[str, ...] = ()
    share_id: str | None = field(default=None, name="shareID")
    consumed_capacity: dict[str, str] = {}


class AllocatedConfig(ApiStruct, frozen=True):
    source: str
    requests: tuple[str, ...] = ()
    opaque: OpaqueConfig | None = None


class AllocatedDevices(ApiStruct, frozen=True):
    results: tuple[AllocationResult, ...] = ()
    config: tuple[AllocatedConfig, ...] = ()


class Allocation(ApiStruct, frozen=True):
    devices: AllocatedDevices = AllocatedDevices()
    node_selector: NodeSelector | None = None
    allocation_timestamp: str | None = None


class ConsumerReference(ApiStruct, frozen=True):
    resource: str
    name: str
    uid: str


class ResourceClaimStatus(ApiStruct, frozen=True):
    allocation: Allocation | None = None
    reserved_for: tuple[ConsumerReference, ...] = ()


class ResourceClaim(ApiStruct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: ResourceClaimSpec = ResourceClaimSpec()
    status: ResourceClaimStatus = ResourceClaimStatus()


class DeviceClassSpec(ApiStruct, frozen=True):
    selectors: tuple[DeviceSelector, ...] = ()
    config: tuple[ClaimConfig, ...] = ()
    extended_resource_name: str | None = None


class DeviceClass(ApiStruct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: DeviceClassSpec = DeviceClassSpec()


class DeviceTaintSelector(ApiStruct, frozen=True):
    """Which devices a rule taints: all given fields must match. An absent selector matches nothing."""

    driver: str | None = None
    pool: str | None = None
    device: str | None = None


class DeviceTaintRuleSpec(ApiStruct, frozen=True):
    taint: DeviceTaint
    device_selector: DeviceTaintSelector | None = None


class DeviceTaintRule(ApiStruct, frozen=True):
    spec: DeviceTaintRuleSpec
    metadata: ObjectMeta = ObjectMeta()
