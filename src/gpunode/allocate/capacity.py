"""How much of a shareable device's capacity one allocation consumes.

Rules: k8s.io/dynamic-resource-allocation/structured/internal/incubating/allocator_incubating.go and
api/resource/v1 CapacityRequestPolicy: a request is rounded up to the policy, what is not requested takes the
policy's default, or the whole capacity where there is no policy.
"""

from collections.abc import Mapping

from gpunode.model.quantity import format_bytes, format_milli, parse_milli
from gpunode.model.resource import Capacity, Device, RequestPolicy, ValidRange


def consumption(device: Device, requests: Mapping[str, str]) -> dict[str, str] | None:
    """Consumed quantity by capacity name of one more allocation of a shareable device.

    None if the device lacks a requested capacity or its policy cannot serve the amount. Names must be equal to the
    letter, as upstream: `memory` and `<driver>/memory` are two names here, other than for attributes.
    """
    wanted = dict(requests)
    consumed: dict[str, str] = {}
    for name, capacity in device.capacity.items():
        text = _amount(capacity, wanted.pop(name, None))
        if text is None or parse_milli(text) > parse_milli(capacity.value):
            return None
        consumed[name] = text
    return None if wanted else consumed


def holds(device: Device, requests: Mapping[str, str]) -> bool:
    """Whether a device given out whole has at least the requested capacities."""
    return all(
        (found := device.capacity.get(name)) is not None and parse_milli(text) <= parse_milli(found.value)
        for name, text in requests.items()
    )


def _amount(capacity: Capacity, requested: str | None) -> str | None:
    policy = capacity.request_policy
    if requested is None:
        return policy.default if policy is not None and policy.default is not None else capacity.value
    return requested if policy is None else _rounded(policy, requested)


def _rounded(policy: RequestPolicy, requested: str) -> str | None:
    amount = parse_milli(requested)
    if policy.valid_values:
        fitting = [v for v in policy.valid_values if parse_milli(v) >= amount]
        return min(fitting, key=parse_milli, default=None)
    if policy.valid_range is None:
        return requested
    low = parse_milli(policy.valid_range.min)
    rounded = max(amount, low)
    if policy.valid_range.step is not None and (step := parse_milli(policy.valid_range.step)) > 0:
        rounded = low + -(-(rounded - low) // step) * step
    if policy.valid_range.max is not None and rounded > parse_milli(policy.valid_range.max):
        return None
    if rounded == amount:
        return requested
    return (
        format_bytes(rounded // 1000) if rounded % 1000 == 0 and _binary(policy.valid_range) else format_milli(rounded)
    )


def _binary(span: ValidRange) -> bool:
    """Rounded amounts are written in the form of the step."""
    return span.step is not None and span.step.endswith("i")
