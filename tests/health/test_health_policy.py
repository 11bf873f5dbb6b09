"""The policy file, what it does to taints and levels, and the explanation of a code."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from health_node import GOOD_A, GPU_A, PART_1, PART_2, Node, xid

from gpunode.health.catalogue import builtin_catalogue
from gpunode.health.devices import DeviceMap
from gpunode.health.explain import explain_xid, gangs_stay
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


@pytest.mark.parametrize(
    ("graces", "expected"),
    [
        ("{}", 0),
        ("{unhealthy: 60}", 60),
        ("{unhealthy: 60, xid: forever}", None),
        ("{xid: forever, reset: 0}", 0),
        ("{reset: forever, xid/119: 7}", 7),
        ("{degraded: 60, host: 60, xid/120: 60, ecc: forever}", 0),
    ],
)
def test_the_most_exact_grace_counts(graces: str, expected: int | None) -> None:
    (finding,) = findings(parse_policy(f"gangGraceSeconds: {graces}"), XidSignal(A, 119))
    assert finding.grace == expected


@pytest.mark.parametrize("effect", ["None", "NoExecute"])
def test_only_no_schedule_leaves_a_grace(effect: str) -> None:
    """The class of a code stands in the catalogue, so not all of it is seen when the file is read."""
    policy = parse_policy(f"effects: {{xid/119: {effect}}}\ngangGraceSeconds: {{reset: 60}}")
    assert [f.grace for f in findings(policy, XidSignal(A, 119))] == [0]
    assert [f.grace for f in findings(policy, XidSignal(A, 120))] == [60]


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        # Both are unhealthy; 119 (reset) comes first, 79 (host) a second later.
        ("{}", "119"),
        ("gangGraceSeconds: {reset: 600}", "79"),
        ("gangGraceSeconds: {reset: forever}", "79"),
        ("gangGraceSeconds: {host: 600}", "119"),
        ("gangGraceSeconds: {reset: 600, host: 600}", "119"),
        ("gangGraceSeconds: {reset: 600, host: 598}", "79"),
        ("gangGraceSeconds: {reset: forever, host: forever}", "119"),
        ("effects: {reset: None}", "79"),
        ("effects: {host: NoExecute}\ngangGraceSeconds: {reset: forever}", "79"),
    ],
)
def test_a_mild_fault_hides_no_severe_one_of_its_dimension(policy: str, shown: str) -> None:
    machine = HealthMachine(policy=parse_policy(policy))
    state = HealthState()
    for second, code in enumerate((119, 79)):
        state = machine.step(state, [XidSignal(A, code)], DeviceMap(), Instant(1e9 + second, 1 + second)).state
    (finding,) = machine.project(state, DeviceMap()).of(device_name(A)).findings
    assert finding.code == shown


def test_a_partitions_grace_is_its_own_and_a_gpus_reaches_its_partitions() -> None:
    node = Node(parse_policy("gangGraceSeconds: {xid/119: 600, host: 60}"))
    node.feed(xid(119, gi=1))
    graces = {name: [f.grace for f in node.health.of(name).findings] for name in (GPU_A, PART_1, PART_2)}
    assert graces == {GPU_A: [], PART_1: [600], PART_2: []}
    node.feed(xid(79))
    graces = {name: [(f.code, f.grace) for f in node.health.of(name).findings] for name in (GPU_A, PART_1, PART_2)}
    assert graces == {GPU_A: [("79", 60)], PART_1: [("79", 60)], PART_2: [("79", 60)]}


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
        ("gangGraceSeconds: {xids: 5}", "gangGraceSeconds: 'xids' names nothing"),
        ("gangGraceSeconds: {xid: -1}", ">= 0"),
        ("gangGraceSeconds: {xid: 1.5}", "Expected `int | str`"),
        ("gangGraceSeconds: {xid: true}", "Expected `int | str`"),
        ("gangGraceSeconds: {xid: never}", "'never'"),
        ("gangGraceSeconds: {xid: 99999999}", "<= 2592000"),
        ("evictGangs: {xid: false}", "evictGangs"),
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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "effects: {unhealthy: NoExecute}\ngangGraceSeconds: {workflow: 60}",
            "policy.yaml: gangGraceSeconds: 'workflow' gives a grace to faults that 'unhealthy' of effects gives NoEx",
        ),
        ("effects: {host: NoExecute}\ngangGraceSeconds: {xid: forever}", "'xid' gives a grace .* 'host' of effects"),
        ("effects: {reset: NoExecute}\ngangGraceSeconds: {reset: 1}", "'reset' gives a grace .* 'reset' of effects"),
        ("effects: {ecc: NoExecute}\ngangGraceSeconds: {unhealthy: 1}", "'unhealthy' gives .* 'ecc' of effects"),
        ("effects: {xid/79: NoExecute}\ngangGraceSeconds: {xid/79: 1}", "'xid/79' gives .* 'xid/79' of effects"),
        ("effects: {xid/79: NoExecute}\ngangGraceSeconds: {xid: 1}", "'xid' gives .* 'xid/79' of effects"),
        ("effects: {unhealthy: NoExecute}\ngangGraceSeconds: {xid/79: 1}", "'xid/79' gives .* 'unhealthy' of effects"),
        ("effects: {degraded: NoExecute}\ngangGraceSeconds: {remap: 1}", "'remap' gives .* 'degraded' of effects"),
    ],
)
def test_a_grace_that_kubernetes_would_not_grant_is_refused(text: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        parse_policy(text, "policy.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "effects: {unhealthy: NoExecute, workflow: NoSchedule}\ngangGraceSeconds: {workflow: 60}",
        "effects: {host: NoExecute}\ngangGraceSeconds: {xid: forever, host: 0}",
        "effects: {xid/79: NoExecute}\ngangGraceSeconds: {reset: 60}",
        "effects: {degraded: NoExecute}\ngangGraceSeconds: {unhealthy: 60}",
        "effects: {ecc: NoExecute}\ngangGraceSeconds: {link: forever}",
        "effects: {unhealthy: NoExecute, xid/79: NoSchedule}\ngangGraceSeconds: {xid/79: 60}",
        "effects: {unhealthy: NoExecute}\ngangGraceSeconds: {unhealthy: 0}",
    ],
)
def test_a_grace_beside_an_eviction_of_others_is_fine(text: str) -> None:
    parse_policy(text)


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
    assert told["gangs"] == "are evicted at once, by Kubernetes too"
    assert "details" in explain_xid(145, builtin_catalogue(), policy)
    assert "3 different" in explain_xid(31, builtin_catalogue(), policy)["repetition"]


@pytest.mark.parametrize(
    ("code", "policy", "says"),
    [
        (79, "{}", "are moved at once"),
        (79, "gangGraceSeconds: {host: 600}", "may stay 600 s from its beginning, then are moved"),
        (79, "gangGraceSeconds: {host: forever}", "stay where they are; no new ones come"),
        (79, "effects: {host: None}", "stay where they are"),
        (43, "gangGraceSeconds: {application: 600}", "stay where they are"),
    ],
)
def test_the_explanation_says_what_becomes_of_gangs(code: int, policy: str, says: str) -> None:
    assert explain_xid(code, builtin_catalogue(), parse_policy(policy))["gangs"] == says


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("{}", "no"),
        ("effects: {xid: NoExecute}", "no"),
        ("effects: {xid: None}", "for ever"),
        ("gangGraceSeconds: {xid: forever}", "for ever"),
        ("gangGraceSeconds: {xid: 600}", "until 2001-09-09T01:56:40Z"),
    ],
)
def test_until_when_gangs_may_stay(policy: str, says: str) -> None:
    (finding,) = findings(parse_policy(policy), XidSignal(A, 79))
    assert gangs_stay(finding) == says


@pytest.mark.parametrize(
    ("before", "after", "level"),
    [
        ("", "levels: {xid/119: degraded}", Level.DEGRADED),
        ("", "levels: {xid/119: healthy}", Level.HEALTHY),
        ("levels: {xid/119: degraded}", "", Level.UNHEALTHY),
        ("levels: {xid/119: degraded}", "levels: {xid: degraded}", Level.DEGRADED),
    ],
)
def test_another_policys_level_holds_for_what_stands(before: str, after: str, level: Level) -> None:
    """Over a restart with the file in between; the fault began when it began."""
    node = Node(parse_policy(before))
    node.feed(xid(119))
    since = node.health.of(GPU_A).findings[0].since
    node.state = msgspec.json.decode(msgspec.json.encode(node.state), type=HealthState)
    node.machine = HealthMachine(policy=parse_policy(after))
    node.feed(after=60)
    assert node.level() is level
    assert [f.since for f in node.health.of(GPU_A).findings] == ([since] if level is not Level.HEALTHY else [])
    told = len(node.log)
    node.feed()
    assert len(node.log) == told


def test_a_level_that_the_policy_no_longer_raises_falls() -> None:
    node = Node(parse_policy("levels: {link/down: unhealthy}"))
    node.feed(replace(GOOD_A, links_total=18, links_active=18))
    down = replace(GOOD_A, links_total=18, links_active=17)
    node.feed(down)
    assert node.level() is Level.UNHEALTHY
    node.machine = HealthMachine(policy=Policy())
    node.feed(down)
    assert node.level() is Level.DEGRADED
