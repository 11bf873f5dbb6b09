"""Opaque configuration: what is understood, what is refused and where, which one applies."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubelet_fakes import DRIVER

from gpunode.kubelet.config import Config, ConfigError, Interval, Mps, Sharing, TimeSlicing, decode, lint, sharing_for
from gpunode.model.resource import AllocatedConfig

HEAD = {"apiVersion": "gpunode.dev/v1alpha1", "kind": "GpuConfig"}
MIG = HEAD | {"kind": "MigConfig"}


def sharing(strategy: str, **more: Any) -> dict[str, Any]:
    return HEAD | {"sharing": {"strategy": strategy, **more}}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (HEAD, None),
        (sharing("None"), None),
        (sharing("TimeSlicing"), TimeSlicing(Interval.DEFAULT)),
        (sharing("TimeSlicing", timeSlicing={"interval": "Long"}), TimeSlicing(Interval.LONG)),
        (sharing("MPS"), Mps()),
        (
            sharing("MPS", mps={"activeThreadPercentage": 25, "pinnedDeviceMemoryLimit": "10Gi"}),
            Mps(25, 10 * 2**30),
        ),
        (MIG | {"sharing": {"strategy": "MPS"}}, Mps()),
    ],
)
def test_what_is_understood(document: dict[str, Any], expected: Sharing | None) -> None:
    assert decode(document) == Config(document["kind"], expected)


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({}, "p: "),
        ([], "p: "),
        (None, "p: "),
        (HEAD | {"apiVersion": "gpunode.dev/v1"}, "p.apiVersion: "),
        (HEAD | {"kind": "gpuconfig"}, "p.kind: "),
        (HEAD | {"kind": 3}, "p.kind: "),
        (HEAD | {"shering": {}}, "p: .*shering"),
        (HEAD | {"sharing": {}}, "p.sharing: .*strategy"),
        (HEAD | {"sharing": "MPS"}, "p.sharing: "),
        (sharing("timeslicing"), "p.sharing.strategy: "),
        (sharing("TimeSlicing", timeSlicing={"interval": 3}), "p.sharing.timeSlicing.interval: "),
        (sharing("TimeSlicing", timeSlicing={"intervall": "Long"}), "p.sharing.timeSlicing: .*intervall"),
        (sharing("TimeSlicing", mps={}), "p.sharing.mps: only with strategy MPS"),
        (sharing("None", timeSlicing={}), "p.sharing.timeSlicing: only with strategy TimeSlicing"),
        (sharing("MPS", mps={"activeThreadPercentage": 0}), "p.sharing.mps.activeThreadPercentage: "),
        (sharing("MPS", mps={"activeThreadPercentage": True}), "p.sharing.mps.activeThreadPercentage: "),
        (sharing("MPS", mps={"pinnedDeviceMemoryLimit": "lots"}), "p.sharing.mps.pinnedDeviceMemoryLimit: "),
        (sharing("MPS", mps={"pinnedDeviceMemoryLimit": "0"}), "p.sharing.mps.pinnedDeviceMemoryLimit: "),
        (MIG | {"sharing": {"strategy": "TimeSlicing"}}, "p.sharing.strategy: "),
    ],
)
def test_what_is_refused_and_where(document: object, path: str) -> None:
    with pytest.raises(ConfigError, match=f"^{path}"):
        decode(document, "p")


@pytest.mark.parametrize(
    ("kind", "wrap", "path"),
    [
        ("ResourceClaim", lambda c: {"devices": {"config": c}}, "spec.devices"),
        ("ResourceClaimTemplate", lambda c: {"spec": {"devices": {"config": c}}}, "spec.spec.devices"),
        ("DeviceClass", lambda c: {"config": c}, "spec"),
    ],
)
def test_lint_reads_every_object_that_can_carry_a_configuration(kind: str, wrap: Any, path: str) -> None:
    good = {"opaque": {"driver": DRIVER, "parameters": HEAD}}
    bad = {"opaque": {"driver": DRIVER, "parameters": HEAD | {"kind": "x"}}}
    foreign = {"opaque": {"driver": "nic.example.com", "parameters": {}}}
    assert lint({"kind": kind, "spec": wrap([good, foreign])}, DRIVER) == []
    (found,) = lint({"kind": kind, "spec": wrap([good, bad])}, DRIVER)
    assert found.startswith(f"{path}.config[1].opaque.parameters.kind: ")


@given(st.recursive(st.none() | st.text(max_size=6), lambda i: st.lists(i) | st.dictionaries(st.text(max_size=6), i)))
def test_lint_survives_anything(document: object) -> None:
    assert lint(document, DRIVER) == []


def config(source: str, interval: str, *requests: str, driver: str = DRIVER, kind: str = "GpuConfig") -> Any:
    inner: dict[str, Any] = {"strategy": "TimeSlicing", "timeSlicing": {"interval": interval}}
    if kind == "MigConfig":
        inner = {"strategy": "MPS"}
    parameters = HEAD | {"kind": kind, "sharing": inner}
    return {"source": source, "requests": list(requests), "opaque": {"driver": driver, "parameters": parameters}}


@pytest.mark.parametrize(
    ("configs", "request_name", "expected"),
    [
        ([], "r", None),
        ([config("FromClass", "Short")], "r", "Short"),
        ([config("FromClass", "Short"), config("FromClaim", "Long")], "r", "Long"),
        ([config("FromClaim", "Long"), config("FromClass", "Short")], "r", "Long"),  # order written does not matter
        ([config("FromClaim", "Short"), config("FromClaim", "Long")], "r", "Long"),
        ([config("FromClaim", "Short"), config("FromClaim", "Long", "other")], "r", "Short"),
        ([config("FromClaim", "Short", "r")], "r/sub", "Short"),
        ([config("FromClaim", "Short", "r/sub")], "r/sub", "Short"),
        ([config("FromClaim", "Short", "r/big")], "r/sub", None),
        ([config("FromClaim", "Short", driver="nic.example.com")], "r", None),
        ([{"source": "FromClaim", "opaque": {"driver": "nic.example.com", "parameters": {"x": 1}}}], "r", None),
        ([{"source": "FromClaim"}], "r", None),
        ([config("FromClaim", "", kind="MigConfig")], "r", None),  # names no request: for partitions only
    ],
)
def test_which_configuration_applies(configs: list[Any], request_name: str, expected: str | None) -> None:
    typed = msgspec.convert(configs, list[AllocatedConfig])
    found = sharing_for(typed, DRIVER, request_name, partition=False)
    assert found == (TimeSlicing(Interval(expected)) if expected else None)


def test_a_partition_takes_its_own_kind() -> None:
    typed = msgspec.convert(
        [config("FromClaim", "", kind="MigConfig"), config("FromClaim", "Long")], list[AllocatedConfig]
    )
    assert sharing_for(typed, DRIVER, "r", partition=True) == Mps()
    assert sharing_for(typed, DRIVER, "r", partition=False) == TimeSlicing(Interval.LONG)


def test_the_wrong_kind_for_a_named_request_is_refused_with_its_path() -> None:
    typed = msgspec.convert([config("FromClass", "Short"), config("FromClaim", "Long", "r")], list[AllocatedConfig])
    with pytest.raises(
        ConfigError, match=r"^status.allocation.devices.config\[1\].opaque.parameters.kind: .*MigConfig"
    ):
        sharing_for(typed, DRIVER, "r", partition=True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["apiVersion", "kind", "sharing", "x"]), JSON) | JSON)
def test_anything_else_is_an_error_with_a_path(document: object) -> None:
    try:
        decode(document, "p")
    except ConfigError as error:
        assert str(error).startswith("p") and ": " in str(error)
    else:
        assert isinstance(document, dict) and document["apiVersion"] == "gpunode.dev/v1alpha1"
