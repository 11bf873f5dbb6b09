"""What claims ask for, with device classes resolved: the allocator's input, independent of any node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gpunode.model.quantity import parse_milli
from gpunode.model.resource import (
    ClaimConfig,
    DeviceClass,
    DeviceRequest,
    DeviceSelector,
    DeviceToleration,
    ExactRequest,
    ResourceClaim,
    SubRequest,
)

# k8s.io/api/resource/v1 AllocationResultsMaxSize.
MAX_RESULTS: Final = 32


class FailureKind(StrEnum):
    """Why claims got no devices."""

    NO_SUCH_CLASS = "NoSuchClass"
    SELECTOR = "SelectorError"
    INVALID = "InvalidClaim"
    POOL_INCOMPLETE = "PoolIncomplete"
    POOL_INVALID = "PoolInvalid"
    NOT_ENOUGH = "NotEnoughDevices"
    SEARCH_LIMIT = "SearchLimit"


@dataclass(frozen=True)
class Failure:
    """A typed refusal. `claim` and `request` say where, where that is known."""

    kind: FailureKind
    text: str
    claim: str = ""
    request: str = ""

    @property
    def permanent(self) -> bool:
        """Whether the claim (or its class) has to change before any node can serve it."""
        return self.kind in (FailureKind.NO_SUCH_CLASS, FailureKind.SELECTOR, FailureKind.INVALID)


@dataclass(frozen=True, eq=False)
class Want:
    """One concrete alternative of a request.

    claim: index into Ask.claims. name: `request` or `request/sub`. count: 0 means all matching devices.
    expressions: selectors of the class, then of the request. constraints: indexes into Ask.constraints.
    """

    index: int
    claim: int
    request: str
    name: str
    expressions: tuple[str, ...]
    count: int
    tolerations: tuple[DeviceToleration, ...]
    capacity: dict[str, str]
    admin: bool
    class_name: str
    class_config: tuple[ClaimConfig, ...]
    constraints: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Constraint:
    """A matchAttribute (distinct false) or distinctAttribute constraint of one claim."""

    attribute: str
    distinct: bool


@dataclass(frozen=True, eq=False)
class Ask:
    """Claims that are allocated together on one node.

    requests: for each request in claim and spec order, its alternatives in order of preference.
    """

    claims: tuple[ResourceClaim, ...]
    requests: tuple[tuple[Want, ...], ...]
    constraints: tuple[Constraint, ...]

    @property
    def wants(self) -> tuple[Want, ...]:
        return tuple(want for request in self.requests for want in request)

    @property
    def least_devices(self) -> int:
        """Lower bound of the devices needed; administrative access takes none."""
        return sum(min((0 if w.admin else max(w.count, 1)) for w in request) for request in self.requests)


def build_ask(claims: Sequence[ResourceClaim], classes: Mapping[str, DeviceClass]) -> Ask | Failure:
    """Resolve classes and constraints of unallocated claims."""
    requests: list[tuple[Want, ...]] = []
    constraints: list[Constraint] = []
    index = 0
    for position, claim in enumerate(claims):
        own = list(enumerate(claim.spec.devices.constraints, start=len(constraints)))
        for number, constraint in own:
            name = constraint.match_attribute or constraint.distinct_attribute
            if not name:
                return Failure(FailureKind.INVALID, f"constraint {number} names no attribute", claim.metadata.key)
            constraints.append(Constraint(name, constraint.match_attribute is None))
        for request in claim.spec.devices.requests:
            wants: list[Want] = []
            for name, source in _alternatives(request):
                applying = tuple(
                    number for number, c in own if not c.requests or request.name in c.requests or name in c.requests
                )
                want = _want(index, position, request.name, name, source, classes, applying)
                if isinstance(want, Failure):
                    return Failure(want.kind, want.text, claim.metadata.key, request.name)
                wants.append(want)
                index += 1
            if not wants:
                text = "request is neither exact nor a list"
                return Failure(FailureKind.INVALID, text, claim.metadata.key, request.name)
            requests.append(tuple(wants))
        if sum(min(w.count for w in r) for r in requests if r[0].claim == position) > MAX_RESULTS:
            return Failure(FailureKind.INVALID, f"asks for more than {MAX_RESULTS} devices", claim.metadata.key)
    return Ask(tuple(claims), tuple(requests), tuple(constraints))


def _alternatives(request: DeviceRequest) -> list[tuple[str, ExactRequest | SubRequest]]:
    if request.exactly is not None:
        return [(request.name, request.exactly)]
    return [(f"{request.name}/{sub.name}", sub) for sub in request.first_available]


def _want(
    index: int,
    claim: int,
    request: str,
    name: str,
    source: ExactRequest | SubRequest,
    classes: Mapping[str, DeviceClass],
    constraints: tuple[int, ...],
) -> Want | Failure:
    class_ = classes.get(source.device_class_name)
    if class_ is None:
        return Failure(FailureKind.NO_SUCH_CLASS, f"device class {source.device_class_name} does not exist")
    if source.allocation_mode not in ("ExactCount", "All"):
        return Failure(FailureKind.INVALID, f"unknown allocation mode {source.allocation_mode}")
    capacity = source.capacity.requests if source.capacity is not None else {}
    for key, text in capacity.items():
        try:
            parse_milli(text)
        except ValueError as error:
            return Failure(FailureKind.INVALID, f"capacity {key}: {error}")
    return Want(
        index=index,
        claim=claim,
        request=request,
        name=name,
        expressions=(*_expressions(class_.spec.selectors), *_expressions(source.selectors)),
        count=0 if source.allocation_mode == "All" else max(source.count, 1),
        tolerations=source.tolerations,
        capacity=dict(capacity),
        admin=isinstance(source, ExactRequest) and bool(source.admin_access),
        class_name=source.device_class_name,
        class_config=class_.spec.config,
        constraints=constraints,
    )


def _expressions(selectors: Sequence[DeviceSelector]) -> list[str]:
    return [s.cel.expression for s in selectors if s.cel is not None]
