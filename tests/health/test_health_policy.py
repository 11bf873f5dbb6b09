"""The policy file, what it does to taints and levels, and the explanation of a code."""

from pathlib import Path

import pytest

from gpunode.health.catalogue import builtin_catalogue
from gpunode.health.devices import DeviceMap
from gpunode.health.explain import explain_xid
from gpunode.health.machine import HealthMachine
from gpunode.health.policy import Policy, PolicyError, load_policy, parse_policy
from gpunode.health.signals import Signal, XidSignal
from gpunode.health.state import HealthState, Instant
from gpunode.model.hardware import PciAddress, device_name
from gpunode.model.health import Dimension, Finding, GpuSample, Level

A = PciAddress(0, 7, 0)


def findings(policy: Policy, *signals: Signal) -> tuple[Finding, ...]:
    machine = HealthMachine(policy=policy)
    state = machine.step(HealthState(), signals, DeviceMap(), Instant(1e9, 1)).state
    return machine.project(state, DeviceMap()).of(device_name(A)).findings


@pytest.mark.parametrize(
    ("effects", "expected"),
    [
        ("{}", "NoSchedule"),
        ("{unhealthy: NoExecute}", "NoExecute"),
        ("{unhealthy: NoExecute, xid: None}", "None"),
        ("{xid: None, reset: NoExecute}", "NoExecute"),
        ("{reset: NoExecute, xid/119: None}", "None"),
        ("{degraded: NoExecute, host: NoExecute, xid/120: NoExecute, ecc: None}", "NoSchedule"),
    ],
)
def test_the_most_exact_effect_counts(effects: str, expected: str) -> None:
    (finding,) = findings(parse_policy(f"effects: {effects}"), XidSignal(A, 119))
    assert finding.effect == expected


def test_degraded_devices_are_only_told_about() -> None:
    pending = GpuSample("GPU-a", A, remap_pending=True)
    assert [(f.level, f.effect) for f in findings(Policy(), pending)] == [(Level.DEGRADED, "None")]
    policy = parse_policy("effects: {remap/pending: NoSchedule}")
    assert [f.effect for f in findings(policy, pending)] == ["NoSchedule"]


def test_levels_can_be_raised_lowered_and_switched_off() -> None:
    pending = GpuSample("GPU-a", A, remap_pending=True, ecc_uncorrected=1)
    policy = parse_policy("levels: {remap/pending: unhealthy, ecc: healthy}")
    assert [(f.dimension, f.level, f.effect) for f in findings(policy, pending)] == [
        (Dimension.REMAP, Level.UNHEALTHY, "NoSchedule")
    ]


def test_a_fault_that_a_new_policy_calls_harmless_ends() -> None:
    sample = GpuSample("GPU-a", A, remap_failed=True)
    before = HealthMachine().step(HealthState(), [sample], DeviceMap(), Instant(1e9, 1)).state
    machine = HealthMachine(policy=parse_policy("levels: {remap/failed: healthy}"))
    step = machine.step(before, [sample], DeviceMap(), Instant(1e9, 2))
    assert not machine.project(step.state, DeviceMap()).devices
    assert [t.change for t in step.transitions] == ["cleared", "noted"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("holdDown: 3", "holdDown"),
        ("holdDownSeconds: -1", ">= 0"),
        ("holdDownSeconds: soon", "Expected"),
        ("repeatCount: 1", ">= 2"),
        ("effects: {xid: PreferNoSchedule}", "PreferNoSchedule"),
        ("effects: {xids: None}", "'xids' names nothing"),
        ("effects: {xid/: None}", "'xid/' names nothing"),
        ("effects: {ecc2/a: None}", "names nothing"),
        ("levels: {host: healthy}", "'host' names nothing"),
        ("levels: {xid: fine}", "fine"),
        ("- a", "object"),
        ("{", "not YAML"),
        ("x" * (1 << 21), "larger"),
    ],
)
def test_a_wrong_policy_is_refused(text: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        parse_policy(text, "policy.yaml")


def test_files(tmp_path: Path) -> None:
    assert load_policy() == parse_policy("") == Policy()
    file = tmp_path / "policy.yaml"
    file.write_text("holdDownSeconds: 5\nflapWindowSeconds: 60\n")
    assert load_policy(file) == Policy(hold_down_s=5, flap_window_s=60)
    with pytest.raises(PolicyError, match="cannot be read"):
        load_policy(tmp_path / "absent")


@pytest.mark.parametrize("code", [*range(1, 178), 999])
def test_every_code_can_be_explained(code: int) -> None:
    told = explain_xid(code, builtin_catalogue(), Policy())
    assert told["XID"].startswith(f"{code} ")
    assert all(value and isinstance(value, str) for value in told.values())
    assert ("ends with" in told) == (told["level"] != "healthy") == (told["taint"] != "none")


def test_the_explanation_follows_the_policy() -> None:
    policy = parse_policy("effects: {host: NoExecute}\nlevels: {xid/54: unhealthy}")
    told = explain_xid(54, builtin_catalogue(), policy)
    assert (told["level"], told["taint"]) == ("unhealthy", "gpunode.dev/xid=54:NoExecute")
    assert "details" in explain_xid(145, builtin_catalogue(), policy)
    assert "3 different" in explain_xid(31, builtin_catalogue(), policy)["repetition"]
