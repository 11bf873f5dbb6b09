"""Gangs, plans and reasons: what the placement side decides about."""

from dataclasses import dataclass, field
from enum import StrEnum

from gpunode.model.core import Job, Node, Pod, PodGroup
from gpunode.model.resource import Allocation, DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice


@dataclass(frozen=True)
class Snapshot:
    """All of the API server's state that a decision may depend on, keyed `namespace/name` or `name`.

    `gang_namespaces` are the namespaces where the admission policy gates pods.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    slices: dict[str, ResourceSlice] = field(default_factory=dict)
    claims: dict[str, ResourceClaim] = field(default_factory=dict)
    classes: dict[str, DeviceClass] = field(default_factory=dict)
    taint_rules: dict[str, DeviceTaintRule] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    pod_groups: dict[str, PodGroup] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    gang_namespaces: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Config:
    """What an administrator can set. `drivers` are the DRA drivers whose devices the controller owns.

    release_timeout_s: how long a placed pod may stay unbound before its gang's reason says so.
    blast_share, blast_window_s, blast_minimum: when more than this share of all GPUs, and at least so many, fail within
    so many seconds of each other, no gang is restarted for them.
    """

    drivers: frozenset[str]
    release_timeout_s: float = 30.0
    blast_share: float = 0.2
    blast_window_s: float = 600.0
    blast_minimum: int = 16


@dataclass(frozen=True)
class Gang:
    """Pods that start together or not at all.

    key: `podgroup/<namespace>/<name>` or `pod/<namespace>/<name>` for a pod on its own.
    members: keys of its live pods (not finished, not terminating), sorted by rank then name.
    topology: node label whose value all members must share, or "".
    """

    key: str
    namespace: str
    name: str
    min_count: int
    priority: int
    created: str
    members: tuple[str, ...]
    finished: int = 0
    topology: str = ""


class ReasonCode(StrEnum):
    """Machine-readable why; used as condition and Event reason, so CamelCase."""

    PLACED = "Placed"
    WAITING_FOR_MEMBERS = "WaitingForMembers"
    WAITING_FOR_CLAIMS = "WaitingForClaims"
    WAITING_FOR_DEVICES = "WaitingForDevices"
    WAITING_FOR_RELEASE = "WaitingForRelease"
    WAITING_FOR_TAINT = "WaitingForManagedTaint"
    FOREIGN_GATE = "WaitingForForeignGate"
    WAITING_FOR_BINDING = "WaitingForBinding"
    NO_SUCH_CLASS = "DeviceClassNotFound"
    NO_MATCHING_DEVICES = "NoMatchingDevices"
    SELECTOR_ERROR = "SelectorError"
    NODE_FIT = "NodesDoNotFit"
    INVALID = "InvalidGang"
    DEVICE_FAULT = "DeviceFault"
    FAULT_NO_ROOM = "DeviceFaultNoRoom"
    FAULT_HELD = "DeviceFaultHeld"
    FAULT_GRACE = "DeviceFaultGrace"


@dataclass(frozen=True)
class Reason:
    """Why a gang is where it is. `facts` holds the numbers; `text` is one sentence for a person."""

    code: ReasonCode
    text: str
    facts: dict[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True)
class ClaimAllocation:
    """An allocation to write into one claim's status."""

    claim: str
    allocation: Allocation


@dataclass(frozen=True)
class Assignment:
    """Where one member goes. Claims that are already allocated are not listed. uid: of the pod decided on."""

    pod: str
    node: str
    claims: tuple[ClaimAllocation, ...] = ()
    uid: str = ""


@dataclass(frozen=True)
class Place:
    """Allocate, pin and release the members of a gang; `stragglers` only lose their gate."""

    gang: str
    decision: str
    assignments: tuple[Assignment, ...]
    stragglers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evict:
    """Stop the whole gang through its owner. `devices` are the faulty ones, driver/pool/device."""

    gang: str
    decision: str
    pods: tuple[str, ...]
    jobs: tuple[str, ...]
    reason: Reason
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resume:
    """Finish a restart that an Evict began: un-suspend a Job that carries our restart annotation."""

    job: str


@dataclass(frozen=True)
class Release:
    """Take back the allocations of claims whose pods still carry our gate.

    A crash or a lost race left them, and the gang cannot be completed around them: without this they would hold
    devices for a gang that waits.
    """

    gang: str
    claims: tuple[str, ...]


@dataclass(frozen=True)
class Bind:
    """Bind a placed member ourselves, where kube-scheduler never will (see gpunode.gang.quorum)."""

    gang: str
    pod: str
    node: str


@dataclass(frozen=True)
class Report:
    """The one current reason of a gang, to be shown on its PodGroup (or pod)."""

    gang: str
    reason: Reason


@dataclass(frozen=True)
class EnsureTaintRule:
    """Write the DeviceTaintRule that keeps kube-scheduler off a driver's devices."""

    driver: str


Action = Place | Evict | Resume | Release | Bind | Report | EnsureTaintRule
