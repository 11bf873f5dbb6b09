"""CEL selectors of DRA requests and device classes.

The runtime is Google's C++ CEL (cel-expr-python). Kubernetes' own types are protobuf messages made at
start-up, so that the type checker tells a Quantity from a string, and its library functions are Python
functions over them. The four fields of `device` are declared as qualified variables, which gives the same
compile errors as an object type would.

Environment followed: k8s.io/dynamic-resource-allocation/cel/compile.go (v1.37) and the Quantity and Semver
libraries of k8s.io/apiserver/pkg/cel/library. Known differences:
* quantities are exact to a thousandth, not to a billionth;
* a domain that a device lacks reads as an empty map only where the expression names it in a plain string
  literal, and not in an expression that tests `in device.attributes` or `in device.capacity`;
* the ip, cidr, url, authorizer and format libraries are not offered, and cost is bounded by length only;
* list-valued attributes (alpha) are not published by this project and read as absent.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from cel_expr_python import cel
from cel_expr_python.ext import ext_bindings, ext_optional, ext_strings
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from gpunode.model.quantity import format_milli, parse_milli
from gpunode.model.resource import Device

# Limit of the API: k8s.io/api/resource/v1 CELSelectorExpressionMaxLength.
MAX_EXPRESSION: Final = 10 * 1024
# How many results one evaluator remembers before it starts over.
MAX_RESULTS: Final = 200_000

_LITERAL = re.compile(r'"([^"\\\n]{1,128})"|\'([^\'\\\n]{1,128})\'')
_PLAIN_READ = re.compile(r'device\.(attributes|capacity)\[\??["\']([^"\'\\]+)["\']\]\.\??([A-Za-z_][A-Za-z0-9_]*)')
_ANY_READ = re.compile(r"device\s*\.\s*\??\s*(attributes|capacity)|device\s*\[|\bdevice\s*[^.\w\s]")
_MEMBERSHIP = re.compile(r"\bin\s+device\s*\.\s*(attributes|capacity)\b(?!\s*\[)")
_SEMVER = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?(?:\+[0-9A-Za-z.-]+)?"
)


class SelectorError(Exception):
    """An expression that does not compile, or that fails on a device.

    kube-scheduler stops scheduling a pod whose selector fails; so does this project.
    """

    def __init__(self, expression: str, detail: str, device: str = "") -> None:
        where = f" on device {device}" if device else ""
        super().__init__(f"CEL selector {expression!r} fails{where}: {detail}")
        self.expression = expression
        self.detail = detail
        self.device = device


def _semver_key(text: str) -> tuple[Any, ...]:
    """Sort key by the precedence rules of semver.org 2.0.0, section 11. Raises ValueError."""
    match = _SEMVER.fullmatch(text)
    if match is None:
        raise ValueError(f"not a semantic version: {text[:64]!r}")
    major, minor, patch, pre = match.groups()
    parts = tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in pre.split(".")) if pre else ((2, 0, ""),)
    return int(major), int(minor), int(patch), parts


def _normalised(text: str, normalise: bool) -> str:
    """Drop a leading v, add missing parts and strip leading zeros, as semver(text, true) does."""
    if not normalise:
        return text
    core, sep, rest = text.removeprefix("v").partition("-")
    numbers = core.split(".")
    numbers += ["0"] * (3 - len(numbers))
    return ".".join(n.lstrip("0") or "0" for n in numbers) + sep + rest


def _valid(parse: Callable[[str], object], text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def _sign(left: Any, right: Any) -> int:
    return int(left > right) - int(left < right)


def _messages() -> tuple[Any, Any, Any]:
    """A descriptor pool with the two message types, and their classes."""
    file = descriptor_pb2.FileDescriptorProto(name="gpunode/cel.proto", package="kubernetes", syntax="proto3")
    for name in ("Quantity", "Semver"):
        file.message_type.add(name=name).field.add(name="text", number=1, type=9, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    quantity, semver = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"kubernetes.{name}"))
        for name in ("Quantity", "Semver")
    )
    return pool, quantity, semver


def _functions(quantity: Callable[[str], Any], semver: Callable[[str], Any]) -> list[Any]:
    """Declarations of the Quantity and Semver libraries."""
    q, v = cel.Type("kubernetes.Quantity"), cel.Type("kubernetes.Semver")
    string, int_, bool_ = cel.Type.STRING, cel.Type.INT, cel.Type.BOOL
    overloads: dict[str, list[Any]] = {}

    def declare(
        name: str, returns: Any, takes: list[Any], impl: Callable[..., Any] | None, member: bool = True
    ) -> None:
        ident = "_".join([name, *(t.name().replace(".", "_") for t in takes)])
        overloads.setdefault(name, []).append(
            cel.Overload(ident, return_type=returns, parameters=takes, is_member=member, impl=impl)
        )

    def milli(value: Any) -> int:
        return parse_milli(value.text)

    def whole(value: Any) -> int:
        number = milli(value)
        if number % 1000:
            raise ValueError(f"quantity {value.text} is not an integer")
        return number // 1000

    def key(value: Any) -> tuple[Any, ...]:
        return _semver_key(value.text)

    def order(value: Any) -> Any:
        return milli(value) if value.DESCRIPTOR.name == "Quantity" else key(value)

    declare("quantity", q, [string], quantity, member=False)
    declare("isQuantity", bool_, [string], lambda s: _valid(parse_milli, s), member=False)
    declare("semver", v, [string], semver, member=False)
    declare("semver", v, [string, bool_], lambda s, n: semver(_normalised(s, n)), member=False)
    declare("isSemver", bool_, [string], lambda s: _valid(_semver_key, s), member=False)
    declare("isSemver", bool_, [string, bool_], lambda s, n: _valid(_semver_key, _normalised(s, n)), member=False)
    # The runtime tells overloads apart by kind, and both types are messages: one function serves both.
    for kind in (q, v):
        declare("compareTo", int_, [kind, kind], (lambda a, b: _sign(order(a), order(b))) if kind is q else None)
        declare("isLessThan", bool_, [kind, kind], (lambda a, b: order(a) < order(b)) if kind is q else None)
        declare("isGreaterThan", bool_, [kind, kind], (lambda a, b: order(a) > order(b)) if kind is q else None)
    declare("sign", int_, [q], lambda a: _sign(milli(a), 0))
    declare("isInteger", bool_, [q], lambda a: milli(a) % 1000 == 0)
    declare("asInteger", int_, [q], whole)
    declare("asApproximateFloat", cel.Type.DOUBLE, [q], lambda a: milli(a) / 1000)
    declare("add", q, [q, q], lambda a, b: quantity(format_milli(milli(a) + milli(b))))
    declare("sub", q, [q, q], lambda a, b: quantity(format_milli(milli(a) - milli(b))))
    declare("add", q, [q, int_], lambda a, b: quantity(format_milli(milli(a) + 1000 * b)))
    declare("sub", q, [q, int_], lambda a, b: quantity(format_milli(milli(a) - 1000 * b)))
    for index, part in enumerate(("major", "minor", "patch")):
        declare(part, int_, [v], lambda a, i=index: key(a)[i])
    return [cel.FunctionDecl(name, choices) for name, choices in overloads.items()]


class _Program:
    """A compiled expression with what is known about the values it reads."""

    def __init__(self, expression: str, compiled: Any) -> None:
        self.expression = expression
        self.compiled = compiled
        literals = {a or b for a, b in _LITERAL.findall(expression)}
        self.domains = frozenset() if _MEMBERSHIP.search(expression) else frozenset(literals)
        reads = _PLAIN_READ.findall(expression)
        # Every use of the two maps has the plain form `device.attributes["domain"].name`: only those values matter.
        plain = len(_ANY_READ.findall(expression)) == len(reads)
        self.reads: tuple[tuple[str, str, str], ...] | None = tuple(sorted(set(reads))) if plain else None

    def key(self, driver: str, device: Device) -> tuple[object, ...]:
        """What the result depends on: equal keys of one expression give equal results."""
        if self.reads is None:
            attributes = tuple((n, repr(a)) for n, a in sorted(device.attributes.items()))
            capacity = tuple((n, c.value) for n, c in sorted(device.capacity.items()))
            return driver, device.allow_multiple_allocations, attributes, capacity
        values: list[object] = [driver, device.allow_multiple_allocations]
        for kind, domain, name in self.reads:
            values.append(_lookup(getattr(device, kind), driver, domain, name))
        return tuple(values)


def _lookup(table: Mapping[str, Any], driver: str, domain: str, name: str) -> object:
    entry = table.get(f"{domain}/{name}")
    if entry is None and domain == driver:
        entry = table.get(name)
    if entry is None:
        return None
    value = entry.value
    return (type(value).__name__, getattr(entry, "version", None) is not None, value)


class Selectors:
    """Compiles and evaluates selectors; programs and results are remembered in this object.

    Not safe for use by several threads at once.
    """

    def __init__(self) -> None:
        pool, self._quantity_type, self._semver_type = _messages()
        nested = cel.Type.Map(cel.Type.STRING, cel.Type.Map(cel.Type.STRING, cel.Type.DYN))
        quantities = cel.Type.Map(cel.Type.STRING, cel.Type.Map(cel.Type.STRING, cel.Type("kubernetes.Quantity")))
        self._env = cel.NewEnv(
            pool,
            variables={
                "device.driver": cel.Type.STRING,
                "device.attributes": nested,
                "device.capacity": quantities,
                "device.allowMultipleAllocations": cel.Type.BOOL,
            },
            extensions=[ext_optional.ExtOptional(), ext_bindings.ExtBindings(), ext_strings.ExtStrings()],
            functions=_functions(self._quantity, self._semver),
        )
        self._programs: dict[str, _Program | SelectorError] = {}
        self._results: dict[tuple[object, ...], bool | SelectorError] = {}

    def _quantity(self, text: str) -> Any:
        return self._quantity_type(text=format_milli(parse_milli(text)))

    def _semver(self, text: str) -> Any:
        _semver_key(text)
        return self._semver_type(text=text)

    def check(self, expression: str) -> None:
        """Compile without evaluating. Raises SelectorError."""
        program = self._programs.get(expression)
        if program is None:
            program = self._programs[expression] = self._compile(expression)
        if isinstance(program, SelectorError):
            raise program

    def matches(self, expression: str, driver: str, device: Device) -> bool:
        """Whether a published device meets a selector. Raises SelectorError."""
        program = self._programs.get(expression)
        if program is None:
            program = self._programs[expression] = self._compile(expression)
        if isinstance(program, SelectorError):
            raise program
        key = (expression, *program.key(driver, device))
        result = self._results.get(key)
        if result is None:
            if len(self._results) >= MAX_RESULTS:
                self._results.clear()
            result = self._results[key] = self._evaluate(program, driver, device)
        if isinstance(result, SelectorError):
            raise result
        return result

    def _compile(self, expression: str) -> _Program | SelectorError:
        if len(expression.encode()) > MAX_EXPRESSION:
            return SelectorError(expression[:80] + "…", f"longer than {MAX_EXPRESSION} bytes")
        try:
            compiled = self._env.compile(expression)
        except RuntimeError as error:
            lines = str(error).removeprefix("INVALID_ARGUMENT: ").splitlines()
            return SelectorError(expression, lines[0].removeprefix("ERROR: ") if lines else "does not compile")
        kind = compiled.return_type().name()
        if kind not in ("BOOL", "DYN"):
            return SelectorError(expression, f"gives {kind}, must give bool")
        return _Program(expression, compiled)

    def _evaluate(self, program: _Program, driver: str, device: Device) -> bool | SelectorError:
        value = program.compiled.eval(data=self._data(program, driver, device))
        kind = value.type().name()
        if kind == "ERROR":
            return SelectorError(program.expression, str(value.value()), device.name)
        if kind != "BOOL":
            return SelectorError(program.expression, f"gives {kind}, must give bool", device.name)
        return bool(value.value())

    def _data(self, program: _Program, driver: str, device: Device) -> dict[str, Any]:
        attributes: dict[str, dict[str, Any]] = {d: {} for d in program.domains}
        capacity: dict[str, dict[str, Any]] = {d: {} for d in program.domains}
        for qualified, attribute in device.attributes.items():
            domain, name = split_name(qualified, driver)
            value = attribute.value
            if value is not None:
                version = attribute.version is not None and value is attribute.version
                attributes.setdefault(domain, {})[name] = self._semver_type(text=value) if version else value
        for qualified, entry in device.capacity.items():
            domain, name = split_name(qualified, driver)
            capacity.setdefault(domain, {})[name] = self._quantity(entry.value)
        return {
            "device.driver": driver,
            "device.attributes": attributes,
            "device.capacity": capacity,
            "device.allowMultipleAllocations": device.allow_multiple_allocations,
        }


def split_name(qualified: str, driver: str) -> tuple[str, str]:
    """Domain and identifier of an attribute or capacity; names without a domain belong to the driver."""
    domain, sep, name = qualified.rpartition("/")
    return (domain, name) if sep else (driver, qualified)
