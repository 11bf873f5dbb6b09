"""The fake is pynvml in every function it offers, and offers every function the project calls."""

import ast
import inspect
import itertools
from pathlib import Path

import pynvml

from gpunode.hardware.fake import FakeNvml
from gpunode.hardware.nvml import Nvml

PACKAGE = Path(inspect.getfile(Nvml)).parents[1]


def functions(of: object) -> set[str]:
    return {name for name, _ in inspect.getmembers(of) if name.startswith("nvml") and callable(getattr(of, name))}


def parameters(function: object, skip: int) -> list[tuple[str, bool]]:
    found = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(p.name, p.default is inspect.Parameter.empty) for p in itertools.islice(found, skip, None)]


def called() -> set[str]:
    """Names of NVML functions the package's sources use, outside the protocol and the fake themselves."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        if "fake" in path.parts or path.name == "nvml.py":
            continue
        tree = ast.parse(path.read_text())
        names |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr.startswith("nvml")}
    return {n for n in names if inspect.isfunction(getattr(pynvml, n, None))}


def test_fake_and_protocol_offer_the_same_functions() -> None:
    assert functions(FakeNvml) == functions(Nvml)


def test_each_function_is_pynvmls_with_the_same_parameters() -> None:
    for name in sorted(functions(FakeNvml)):
        theirs = inspect.unwrap(getattr(pynvml, name))
        for ours in (FakeNvml, Nvml):
            assert parameters(getattr(ours, name), 1) == parameters(theirs, 0), name


def test_the_protocol_is_exactly_what_is_called() -> None:
    assert called() == functions(Nvml)


def test_the_real_module_has_the_protocols_functions() -> None:
    assert functions(Nvml) <= functions(pynvml)
