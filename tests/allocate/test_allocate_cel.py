"""Selectors behave as the documented Kubernetes CEL environment does."""

import pytest

from gpunode.allocate.cel import MAX_EXPRESSION, SelectorError, Selectors
from gpunode.model.resource import Attribute, Capacity, Device

DRIVER = "gpu.gpunode.dev"
A = f'device.attributes["{DRIVER}"]'
C = f'device.capacity["{DRIVER}"]'
DEVICE = Device(
    name="gpu-0",
    attributes={
        "model": Attribute(string="A100-SXM4-80GB"),
        "driverVersion": Attribute(version="580.65.6"),
        "resource.kubernetes.io/pcieRoot": Attribute(string="pci0000:00"),
        "index": Attribute(int_=3),
        "mig": Attribute(bool_=False),
    },
    capacity={"memory": Capacity(value="80Gi"), "example.com/slots": Capacity(value="7")},
)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (f'{A}.model == "A100-SXM4-80GB" && {C}.memory.compareTo(quantity("40Gi")) >= 0', True),
        (f'{C}.memory.isGreaterThan(quantity("80Gi"))', False),
        (f'{C}.memory.isLessThan(quantity("81Gi"))', True),
        (f'{C}.memory == quantity("81920Mi")', True),
        (f"{C}.memory.asInteger() == 85899345920", True),
        (f'{C}.memory.add(quantity("1Gi")).sub(quantity("1Gi")) == {C}.memory', True),
        ('device.capacity["example.com"].slots.compareTo(quantity("7")) == 0', True),
        (f'{A}.driverVersion.isGreaterThan(semver("580.9.0"))', True),  # numeric, not as text
        (f'{A}.driverVersion.compareTo(semver("580.65.6")) == 0', True),
        (f"{A}.driverVersion.major() == 580", True),
        ('semver("1.0.0-rc.1").isLessThan(semver("1.0.0"))', True),
        ('semver("1.0.0-2").isLessThan(semver("1.0.0-10"))', True),
        ('semver("v1.2", true) == semver("1.2.0")', True),
        ('isSemver("1.2") || isQuantity("1x")', False),
        (f'device.driver == "{DRIVER}"', True),
        ("device.allowMultipleAllocations", False),
        ('device.attributes["resource.kubernetes.io"].pcieRoot.startsWith("pci")', True),
        (f"cel.bind(a, {A}, a.index == 3 && !a.mig)", True),
        (f'{A}.?nothing.orValue("x") == "x"', True),
        (f"has({A}.nothing)", False),
        ('has(device.attributes["other.example.com"].model)', False),  # an absent domain reads as empty
        ('"other.example.com" in device.attributes', False),
        (f'"{DRIVER}" in device.attributes', True),
        (f'{A}.model.lowerAscii().contains("a100")', True),
        (f'{A}.model in ["A100-SXM4-80GB", "H100"]', True),
    ],
)
def test_expression(expression: str, expected: bool) -> None:
    assert Selectors().matches(expression, DRIVER, DEVICE) is expected


@pytest.mark.parametrize(
    ("expression", "part"),
    [
        (f'{A}.nothing == "x"', "nothing"),
        (f'{C}.nothing.isGreaterThan(quantity("1"))', "nothing"),
        ('device.attributes["other.example.com"].model == "x"', "model"),
        (f'{C}.memory.isGreaterThan(quantity("many"))', "quantity"),
        (f"{A}.index.isGreaterThan(1)", ""),
        ("device.serial == 1", "device.serial"),
        ("1 + 1", "bool"),
        (f"{A}.model", "bool"),
        ("device.driver ==", ""),
        ("x" * (MAX_EXPRESSION + 1), "longer"),
    ],
)
def test_failing_expression_names_itself(expression: str, part: str) -> None:
    with pytest.raises(SelectorError) as caught:
        Selectors().matches(expression, DRIVER, DEVICE)
    assert caught.value.expression.startswith(expression[:80])
    assert part in caught.value.detail
    assert len(str(caught.value)) < MAX_EXPRESSION + 1000


def test_an_error_is_remembered_like_a_result() -> None:
    selectors = Selectors()
    for _ in range(2):
        with pytest.raises(SelectorError):
            selectors.matches(f"{A}.nothing == 1", DRIVER, DEVICE)


def test_results_are_not_confused_between_devices() -> None:
    """The memory of results keys on exactly the values an expression reads."""
    selectors = Selectors()

    def device(**attributes: Attribute) -> Device:
        return Device(name="x", attributes=attributes)

    plain, bound = f"{A}.n == 1", f"cel.bind(a, {A}, a.n == 1)"
    for expression in (plain, bound):
        assert selectors.matches(expression, DRIVER, device(n=Attribute(int_=1)))
        assert not selectors.matches(expression, DRIVER, device(n=Attribute(int_=2)))
        assert not selectors.matches(expression, DRIVER, device(n=Attribute(string="1")))
        assert selectors.matches(expression, DRIVER, device(n=Attribute(int_=1), other=Attribute(int_=5)))
    version = f'{A}.v == "1.2.3"'
    assert selectors.matches(version, DRIVER, device(v=Attribute(string="1.2.3")))
    assert not selectors.matches(version, DRIVER, device(v=Attribute(version="1.2.3")))
    assert not selectors.matches('device.driver == "gpu.gpunode.dev"', "other.example.com", device())


def test_check_compiles_without_a_device() -> None:
    Selectors().check(f'{A}.model == "x"')
    with pytest.raises(SelectorError, match="undeclared"):
        Selectors().check("nodes.size() == 1")
