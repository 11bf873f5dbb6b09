"""Refuses locally what the API server would refuse, so that one bad device does not take its node's pool away.

Limits and forms: k8s.io/api/resource/v1/types.go and pkg/apis/resource/validation (v1.37).
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from gpunode.model.quantity import parse_milli
from gpunode.model.resource import (
    Attribute,
    Capacity,
    CounterConsumption,
    CounterSet,
    Device,
    DeviceTaint,
    RequestPolicy,
    ResourceSlice,
    ResourceSliceSpec,
)

MAX_DEVICES = 128
MAX_DEVICES_ADVANCED = 64
MAX_COUNTER_SETS = 8
MAX_COUNTERS = 32
MAX_CONSUMED_SETS = 2
MAX_ATTRIBUTES_AND_CAPACITY = 32
MAX_TAINTS = 16
MAX_TEXT = 64
MAX_VALID_VALUES = 10
MAX_BINDING_CONDITIONS = 4
_INT64 = 2**63
_EFFECTS = ("None", "NoSchedule", "NoExecute")

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_SEMVER = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    r"(-(0|[1-9]\d*|\d*[A-Za-z-][0-9A-Za-z-]*)(\.(0|[1-9]\d*|\d*[A-Za-z-][0-9A-Za-z-]*))*)?"
    r"(\+[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?",
    re.ASCII,
)


@dataclass(frozen=True)
class Problem:
    """Where and what; device is "" when the slice itself is at fault."""

    slice: str
    device: str
    text: str

    def __str__(self) -> str:
        where = f"ResourceSlice {self.slice}" + (f", device {self.device}" if self.device else "")
        return f"{where}: {self.text}"


def lint(slices: Sequence[ResourceSlice]) -> tuple[Problem, ...]:
    """Every reason the API server or the allocator would refuse these slices; empty when all are fine."""
    problems: list[Problem] = []
    for one in slices:
        problems += (Problem(one.metadata.name, "", text) for text in _slice_problems(one))
        for device in one.spec.devices:
            problems += (Problem(one.metadata.name, device.name, text) for text in device_problems(device))
    return (*problems, *_pool_problems(slices))


def drop_bad(slices: Sequence[ResourceSlice]) -> tuple[tuple[ResourceSlice, ...], tuple[Problem, ...]]:
    """The slices without the devices that have problems of their own, and those problems (to be reported)."""
    problems = lint(slices)
    bad = {(p.slice, p.device) for p in problems if p.device}
    kept = [_without(s, {name for slice_, name in bad if slice_ == s.metadata.name}) for s in slices]
    return tuple(kept), problems


def _without(found: ResourceSlice, bad: set[str]) -> ResourceSlice:
    if not bad:
        return found
    return replace(found, spec=replace(found.spec, devices=tuple(d for d in found.spec.devices if d.name not in bad)))


def device_problems(device: Device) -> list[str]:
    """What is wrong with one device, taken by itself."""
    problems = [] if _LABEL.fullmatch(device.name) else [f"name {device.name[:80]!r} is not a DNS label"]
    total = len(device.attributes) + len(device.capacity)
    if total > MAX_ATTRIBUTES_AND_CAPACITY:
        problems.append(f"{total} attributes and capacities, the limit is {MAX_ATTRIBUTES_AND_CAPACITY}")
    for name, attribute in device.attributes.items():
        problems += _qualified_name("attribute", name)
        problems += _attribute(name, attribute)
    for name, capacity in device.capacity.items():
        problems += _qualified_name("capacity", name)
        problems += _capacity(name, capacity, shared=device.allow_multiple_allocations)
    problems += _taints(device.taints)
    problems += _consumption(device.consumes_counters)
    problems += _binding(device)
    return problems


def _slice_problems(found: ResourceSlice) -> list[str]:
    spec = found.spec
    problems = []
    if not _subdomain(found.metadata.name, 253):
        problems.append(f"name {found.metadata.name[:80]!r} is not a DNS subdomain of at most 253 characters")
    if not _subdomain(spec.driver.lower(), 63):
        problems.append(f"driver {spec.driver[:80]!r} is not a DNS subdomain of at most 63 characters")
    parts = spec.pool.name.split("/")
    if len(spec.pool.name) > 253 or not all(_SUBDOMAIN.fullmatch(p) for p in parts):
        problems.append(f"pool name {spec.pool.name[:80]!r} is not a path of DNS subdomains of at most 253 characters")
    if not 0 <= spec.pool.generation < _INT64:
        problems.append(f"pool generation {spec.pool.generation} is negative or does not fit in 64 bits")
    if not 1 <= spec.pool.resource_slice_count < _INT64:
        problems.append(f"pool slice count {spec.pool.resource_slice_count} is not positive or not of 64 bits")
    if spec.node_name and not _subdomain(spec.node_name, 253):
        problems.append(f"node name {spec.node_name[:80]!r} is not a DNS subdomain of at most 253 characters")
    return problems + _selection(spec) + _sizes(spec)


def _selection(spec: ResourceSliceSpec) -> list[str]:
    ways = [bool(spec.node_name), spec.node_selector is not None, spec.all_nodes, spec.per_device_node_selection]
    if sum(ways) != 1:
        return ["exactly one of nodeName, nodeSelector, allNodes, perDeviceNodeSelection is needed"]
    return []


def _sizes(spec: ResourceSliceSpec) -> list[str]:
    problems = []
    advanced = any(d.taints or d.consumes_counters for d in spec.devices)
    limit = MAX_DEVICES_ADVANCED if advanced else MAX_DEVICES
    if len(spec.devices) > limit:
        reason = " with taints or counters" if advanced else ""
        problems.append(f"{len(spec.devices)} devices, the limit{reason} is {limit}")
    if spec.devices and spec.shared_counters:
        problems.append("devices and shared counters must be in slices of their own")
    if len(spec.shared_counters) > MAX_COUNTER_SETS:
        problems.append(f"{len(spec.shared_counters)} counter sets, the limit is {MAX_COUNTER_SETS}")
    for counter_set in spec.shared_counters:
        problems += _counter_set(counter_set)
    problems += (f"counter set {name} appears twice" for name in _repeated(c.name for c in spec.shared_counters))
    return problems


def _counter_set(counter_set: CounterSet) -> list[str]:
    problems = _dns_label("counter set", counter_set.name)
    if not 1 <= len(counter_set.counters) <= MAX_COUNTERS:
        problems.append(
            f"counter set {counter_set.name} has {len(counter_set.counters)} counters, 1 to {MAX_COUNTERS} are allowed"
        )
    for name, counter in counter_set.counters.items():
        problems += _dns_label("counter", name) + _quantity(f"counter {name}", counter.value)
    return problems


def _pool_problems(slices: Sequence[ResourceSlice]) -> Iterable[Problem]:
    """Names are unique in a pool, and consumed counters exist; else the allocator ignores the whole pool."""
    seen: Counter[tuple[str, str, str]] = Counter()
    counters = {
        (s.spec.driver, s.spec.pool.name, c.name): set(c.counters) for s in slices for c in s.spec.shared_counters
    }
    for one in slices:
        pool = (one.spec.driver, one.spec.pool.name)
        for device in one.spec.devices:
            seen[*pool, device.name] += 1
            if seen[*pool, device.name] == 2:
                yield Problem(one.metadata.name, device.name, "the name appears twice in its pool")
            for consumed in device.consumes_counters:
                missing = set(consumed.counters) - counters.get((*pool, consumed.counter_set), set())
                if missing or (*pool, consumed.counter_set) not in counters:
                    text = f"consumes {sorted(missing)} of counter set {consumed.counter_set}, which has none such"
                    yield Problem(one.metadata.name, device.name, text)


def _attribute(name: str, attribute: Attribute) -> list[str]:
    given = [v for v in (attribute.int_, attribute.bool_, attribute.string, attribute.version) if v is not None]
    if len(given) != 1:
        return [f"attribute {name} has {len(given)} values, exactly one is needed"]
    if attribute.int_ is not None and not -_INT64 <= attribute.int_ < _INT64:
        return [f"attribute {name} does not fit in 64 bits"]
    for value in (attribute.string, attribute.version):
        if value is not None and (size := len(value.encode(errors="replace"))) > MAX_TEXT:
            return [f"attribute {name} has {size} bytes, the limit is {MAX_TEXT}"]
    if attribute.version is not None and not _SEMVER.fullmatch(attribute.version):
        return [f"attribute {name}: {attribute.version!r} is not a semantic version"]
    return []


def _capacity(name: str, capacity: Capacity, *, shared: bool) -> list[str]:
    problems = _quantity(f"capacity {name}", capacity.value)
    policy = capacity.request_policy
    if policy is None:
        return problems
    if not shared:
        problems.append(f"capacity {name} has a request policy, but the device does not allow multiple allocations")
    if len(policy.valid_values) > MAX_VALID_VALUES:
        problems.append(f"capacity {name} lists {len(policy.valid_values)} values, the limit is {MAX_VALID_VALUES}")
    if (policy.valid_values or policy.valid_range) and policy.default is None:
        problems.append(f"capacity {name} restricts values but gives no default")
    if policy.valid_values and policy.valid_range:
        problems.append(f"capacity {name} gives both a list and a range of values")
    return problems or _policy_values(name, capacity.value, policy)


def _policy_values(name: str, value: str, policy: RequestPolicy) -> list[str]:
    """Order and steps of the values a request may name; all of them are within the capacity."""
    try:
        total, default = parse_milli(value), parse_milli("0" if policy.default is None else policy.default)
        listed = [parse_milli(v) for v in policy.valid_values]
        given = policy.valid_range
        bounds = (given.min, given.max, given.step) if given else (None, None, None)
        low, high, step = (None if bound is None else parse_milli(bound) for bound in bounds)
    except ValueError as error:
        return [f"request policy of capacity {name}: {error}"]
    if listed and (listed != sorted(set(listed)) or default not in listed or listed[-1] > total):
        return [f"capacity {name}: listed values must ascend, hold the default and stay within {value}"]
    if low is None:
        return []
    top = total if high is None else high
    if not low <= default <= top <= total:
        return [f"capacity {name}: a range needs min <= default <= max <= {value}"]
    if step is not None and (
        min(low, step) < 0 or low + step > total or max(low, default, top, step) // 1000 >= _INT64
    ):
        return [f"capacity {name}: min and one step must be within {value} and fit in 64 bits"]
    if step is not None and (step <= 0 or (default - low) % step or ((top - low) % step and high is not None)):
        return [f"capacity {name}: default and max must be min plus whole steps"]
    return []


def _taints(taints: tuple[DeviceTaint, ...]) -> list[str]:
    problems = [f"{len(taints)} taints, the limit is {MAX_TAINTS}"] if len(taints) > MAX_TAINTS else []
    for taint in taints:
        if not _label_name(taint.key):
            problems.append(f"taint key {taint.key[:80]!r} is not a label name")
        if taint.value and not _LABEL_NAME.fullmatch(taint.value):
            problems.append(f"value {taint.value[:80]!r} of taint {taint.key} is not a label value")
        if taint.effect not in _EFFECTS:
            problems.append(f"effect {taint.effect[:40]!r} of taint {taint.key} is none of {', '.join(_EFFECTS)}")
    return problems


def _consumption(consumed: tuple[CounterConsumption, ...]) -> list[str]:
    problems = []
    names = [c.counter_set for c in consumed]
    if len(names) > MAX_CONSUMED_SETS:
        problems.append(f"consumes from {len(names)} counter sets, the limit is {MAX_CONSUMED_SETS}")
    if len(set(names)) != len(names):
        problems.append("names a counter set twice")
    for one in consumed:
        problems += _dns_label("counter set", one.counter_set)
        if not 1 <= len(one.counters) <= MAX_COUNTERS:
            problems.append(f"consumes {len(one.counters)} counters of {one.counter_set}, 1 to {MAX_COUNTERS} allowed")
        for name, counter in one.counters.items():
            problems += _dns_label("counter", name) + _quantity(f"consumed counter {name}", counter.value)
    return problems


def _binding(device: Device) -> list[str]:
    ready, failed = device.binding_conditions, device.binding_failure_conditions
    problems = []
    if bool(ready) != bool(failed):
        problems.append("binding conditions and binding failure conditions come together or not at all")
    if max(len(ready), len(failed)) > MAX_BINDING_CONDITIONS:
        problems.append(f"more than {MAX_BINDING_CONDITIONS} binding conditions of a kind")
    problems += (
        f"binding condition {name[:80]!r} is not a label name" for name in ready + failed if not _label_name(name)
    )
    problems += (f"binding condition {name[:80]!r} appears twice" for name in _repeated(ready + failed))
    return problems


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _subdomain(name: str, limit: int) -> bool:
    return len(name) <= limit and _SUBDOMAIN.fullmatch(name) is not None


def _label_name(key: str) -> bool:
    """[domain/]name, as for labels."""
    prefix, slash, name = key.rpartition("/")
    return _LABEL_NAME.fullmatch(name) is not None and (not slash or _subdomain(prefix, 253))


def _qualified_name(what: str, name: str) -> list[str]:
    domain, _, identifier = name.rpartition("/")
    good = _IDENTIFIER.fullmatch(identifier) is not None
    if "/" in name:
        good = good and _subdomain(domain, 63)
    return [] if good else [f"{what} name {name[:100]!r} is not [domain/]identifier (32 characters at most)"]


def _dns_label(what: str, name: str) -> list[str]:
    return [] if _LABEL.fullmatch(name) else [f"{what} name {name[:80]!r} is not a DNS label"]


def _quantity(what: str, value: str) -> list[str]:
    try:
        parse_milli(value)
    except ValueError as error:
        return [f"{what}: {error}"]
    return []
