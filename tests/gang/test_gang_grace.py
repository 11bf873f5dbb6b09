"""A fault whose grace runs: the gang stays, is told until when, and goes on as any other."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scenario import CONFIG, NOW, allocated, devices, places, reasons, run, scenario

from gpunode.gang.decide import decide
from gpunode.gang.explain import explain
from gpunode.model.gang import Action, Evict, ReasonCode, Release, Report, Snapshot
from gpunode.model.grace import MAX_GRACE_S, NEVER, grace_end, grace_value, parse_grace
from gpunode.model.meta import Condition
from gpunode.model.names import PLACED_CONDITION
from gpunode.model.resource import DeviceToleration

BEGAN = "2026-11-29T12:00:00Z"
HIT = f"node n1\nnode n2\nnode n3\ngang g pods=8,8 bound=n1,n2 job=j\ntaint n1/gpu-3 xid=94 since={BEGAN}\n"
FAULT = "gpu.gpunode.dev/n1/gpu-3 is tainted gpunode.dev/xid=94 on n1"


def at(text: str, after_s: float) -> tuple[Action, ...]:
    return decide(scenario(text).snapshot(), NOW + timedelta(seconds=after_s), CONFIG)


def evicted(actions: tuple[Action, ...]) -> bool:
    return any(isinstance(action, Evict) for action in actions)


def test_the_gang_stays_until_the_grace_ends_and_is_then_evicted() -> None:
    text = HIT + "grace n1/gpu-3 xid=600s"
    told = {reasons(at(text, after))["g"] for after in (0, 1, 300, 599.9)}
    assert told == {f"DeviceFaultGrace: {FAULT}; the health policy lets the gang stay until 2026-11-29T12:10:00Z"}
    (evict,) = at(text, 600)
    assert isinstance(evict, Evict) and evict.reason.code is ReasonCode.DEVICE_FAULT
    assert evict.devices == ("gpu.gpunode.dev/n1/gpu-3",)


def test_a_grace_without_end() -> None:
    (report,) = at(HIT + "grace n1/gpu-3 xid=forever", 10**9)
    assert isinstance(report, Report) and report.reason.code is ReasonCode.FAULT_GRACE
    assert report.reason.text == f"{FAULT}; the health policy lets the gang stay as long as it likes"
    assert report.reason.facts == {"devices": 1, "pods": 2}


@pytest.mark.parametrize(
    "grace",
    [
        "grace n1/gpu-3 ecc=600s",  # of another dimension
        "grace n1/gpu-2 xid=600s",  # of another device
        "grace n1/gpu-3 xid=0s",
        "grace n1/gpu-3 xid=soon",  # not understood
        "grace n1/gpu-3 xid=-5s",
        "",
    ],
)
def test_no_grace_no_delay(grace: str) -> None:
    assert evicted(at(HIT + grace, 0))


def test_kubernetes_does_not_wait_so_nor_does_the_controller() -> None:
    assert evicted(at(HIT.replace("since=", "effect=NoExecute since=") + "grace n1/gpu-3 xid=forever", 0))


@pytest.mark.parametrize("since", ["", "soon"])
def test_a_fault_that_began_nobody_knows_when_waits(since: str) -> None:
    text = HIT.replace(f"since={BEGAN}", f"since={since}") + "grace n1/gpu-3 xid=5s"
    assert not evicted(at(text, 10**6))


def test_two_faults_of_one_device_the_earlier_end_counts() -> None:
    text = HIT + f"taint n1/gpu-3 link=down since={BEGAN}\ngrace n1/gpu-3 xid=forever\ngrace n1/gpu-3 link=60s"
    assert "gpunode.dev/link=down on n1; the health policy lets the gang stay until" in reasons(at(text, 0))["g"]
    assert not evicted(at(text, 59)) and evicted(at(text, 60))


def test_two_graces_of_one_fault_the_earlier_end_counts() -> None:
    """An administrator's DeviceTaintRule can shorten what the agent gives."""
    text = HIT + "grace n1/gpu-3 xid=forever\ngrace n1/gpu-3 xid=60s"
    assert not evicted(at(text, 59)) and evicted(at(text, 60))


def test_two_devices_the_earlier_end_counts() -> None:
    text = HIT + f"grace n1/gpu-3 xid=600s\ntaint n2/gpu-0 ecc=dbe since={BEGAN}\ngrace n2/gpu-0 ecc=30s"
    assert reasons(at(text, 0))["g"] == (
        "DeviceFaultGrace: gpu.gpunode.dev/n2/gpu-0 is tainted gpunode.dev/ecc=dbe on n2 and 1 more device is faulty; "
        "the health policy lets the gang stay until 2026-11-29T12:00:30Z"
    )
    (evict,) = [a for a in at(text + "\nnode n4", 30) if isinstance(a, Evict)]
    assert evict.devices == ("gpu.gpunode.dev/n2/gpu-0",), "only what is due"


def test_a_fault_that_ends_within_its_grace_leaves_no_trace() -> None:
    world = scenario(HIT + "grace n1/gpu-3 xid=600s")
    (report,) = decide(world.snapshot(), NOW, CONFIG)
    assert isinstance(report, Report)
    shown = Condition(
        type=PLACED_CONDITION, status="False", reason=report.reason.code.value, message=report.reason.text
    )
    group = world.groups["default/g"]
    world.groups["default/g"] = replace(group, status=replace(group.status, conditions=(shown,)))
    assert decide(world.snapshot(), NOW + timedelta(seconds=1), CONFIG) == (report,)
    for name in [name for name in world.rules if name.startswith("taint-")]:
        del world.rules[name]
    (after,) = decide(world.snapshot(), NOW + timedelta(seconds=700), CONFIG)
    assert isinstance(after, Report) and after.reason.code is ReasonCode.PLACED


def test_a_fault_that_comes_back_has_its_grace_anew() -> None:
    later = "2026-11-29T12:20:00Z"
    text = HIT.replace(BEGAN, later) + "grace n1/gpu-3 xid=600s"
    assert not evicted(at(text, 1799)) and evicted(at(text, 1800))


@pytest.mark.parametrize(("tolerates", "grace", "ends"), [("60", "600s", 600), ("600", "60s", 600), ("", "5s", None)])
def test_the_claims_own_toleration_counts_besides(tolerates: str, grace: str, ends: int | None) -> None:
    world = scenario(HIT.replace("job=j", f"job=j tolerates=xid:{tolerates}") + f"grace n1/gpu-3 xid={grace}")
    for key, claim in list(world.claims.items()):
        (allocation,) = [claim.status.allocation]
        assert allocation is not None
        results = tuple(
            replace(r, tolerations=tuple(replace(t, effect="NoSchedule") for t in r.tolerations))
            for r in allocation.devices.results
        )
        made = replace(allocation, devices=replace(allocation.devices, results=results))
        world.claims[key] = replace(claim, status=replace(claim.status, allocation=made))
    for after in (0, 59, 60, 599, 600, 10**6):
        actions = decide(world.snapshot(), NOW + timedelta(seconds=after), CONFIG)
        assert evicted(actions) == (ends is not None and after >= ends)


def test_a_quarantine_ends_every_grace() -> None:
    assert evicted(at(HIT + "grace n1/gpu-3 xid=forever\ntaint n1/gpu-3 quarantine=true", 0))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("grace", ["forever", "600s"])
def test_of_two_claims_that_share_a_device_the_one_that_tolerates_less_counts(
    order: tuple[int, int], grace: str
) -> None:
    world = scenario(
        f"node n1\nnode n2\ngang g pods=1,1 bound=n1,n1 job=j\ntaint n1/gpu-0 xid=94 since={BEGAN}\n"
        f"taint n1/gpu-0 ecc=uncorrected since={BEGAN}\ngrace n1/gpu-0 ecc={grace}"
    )
    tolerates = DeviceToleration(key="gpunode.dev/xid", operator="Exists")
    for member, tolerations in zip(order, ((tolerates,), ()), strict=True):
        claim = world.claims[f"default/g-{member}-gpu"]
        status = replace(claim.status, allocation=allocated("n1", ["gpu-0"], tolerations))
        world.claims[f"default/g-{member}-gpu"] = replace(claim, status=status)
    assert evicted(decide(world.snapshot(), NOW, CONFIG))


def test_nobody_new_is_placed_there() -> None:
    text = f"node n1 gpus=2\ntaint n1/gpu-0 xid=94 since={BEGAN}\ngrace n1/gpu-0 xid=forever\n"
    assert devices(run(text + "gang w pods=1")) == ["n1/gpu-1"]
    assert reasons(run(text + "gang w pods=2"))["w"].startswith("WaitingForDevices")


def test_what_only_waiting_members_hold_has_no_grace() -> None:
    """The rest of an interrupted placement is taken back, and the running members stay where they are."""
    world = scenario(HIT + "grace n1/gpu-3 xid=forever\npod g-2 gpus=1 group=g")
    leftover = scenario("node n3\ngang g pods=1 bound=n3").claims["default/g-0-gpu"]
    claim = world.claims["default/g-2-gpu"]
    world.claims["default/g-2-gpu"] = replace(claim, status=replace(leftover.status, reserved_for=()))
    broken = scenario(f"taint n3/gpu-0 xid=94 since={BEGAN}\ngrace n3/gpu-0 xid=forever").rules
    world.rules.update(broken)
    actions = decide(world.snapshot(), NOW, CONFIG)
    assert actions == (Release("podgroup/default/g", ("default/g-2-gpu",)),)


def test_a_gang_in_its_grace_still_gets_its_other_members_placed() -> None:
    """Say, one whose pod failed and was made anew: a grace without end must not keep it waiting for ever."""
    text = HIT.replace("pods=8,8", "pods=8,8 min=2") + "grace n1/gpu-3 xid=forever\npod g-2 gpus=8 group=g"
    actions = run(text)
    assert places(actions) == {"g": ["n3"]}
    assert reasons(actions)["g"].startswith("DeviceFaultGrace")


def test_a_gang_that_waits_for_members_says_that() -> None:
    text = HIT.replace("pods=8,8", "pods=8,8 min=3") + "grace n1/gpu-3 xid=forever\npod g-2 gpus=8 group=g\n"
    assert reasons(run(text + "pod other gpus=8 on=n3"))["g"].startswith("WaitingForDevices: only 2 of the 3 pods")


def test_explain_says_the_same() -> None:
    snapshot = scenario(HIT + "grace n1/gpu-3 xid=600s").snapshot()
    assert explain(snapshot, "podgroup/default/g", NOW, CONFIG).code is ReasonCode.FAULT_GRACE
    later = NOW + timedelta(seconds=600)
    assert explain(snapshot, "podgroup/default/g", later, CONFIG).code is ReasonCode.DEVICE_FAULT


_GRACES = st.sampled_from(["", "0s", "10s", "60s", "3600s", "forever", "never"])


@st.composite
def _faults(draw: st.DrawFn) -> list[tuple[str, str, str, int, str]]:
    """Device, dimension, effect, seconds since it began, grace; each dimension of a device once."""
    found = {}
    for _ in range(draw(st.integers(1, 6))):
        device, dimension = draw(st.sampled_from(["n1/gpu-0", "n1/gpu-1"])), draw(st.sampled_from(["xid", "ecc"]))
        effect = draw(st.sampled_from(["None", "NoSchedule", "NoSchedule", "NoExecute"]))
        found[device, dimension] = (effect, draw(st.sampled_from([0, 5, 10, 59, 60, 4000])), draw(_GRACES))
    return [(device, dimension, *rest) for (device, dimension), rest in found.items()]


def _world(faults: list[tuple[str, str, str, int, str]]) -> Snapshot:
    lines = ["node n1", "node n2", "gang g pods=2 bound=n1 job=j"]
    for device, dimension, effect, age, grace in faults:
        since = (NOW - timedelta(seconds=age)).strftime("%Y-%m-%dT%H:%M:%SZ")
        lines.append(f"taint {device} {dimension}=1 effect={effect} since={since}")
        lines += [f"grace {device} {dimension}={grace}"] if grace else []
    return scenario("\n".join(lines)).snapshot()


def _ends(effect: str, age: int, grace: str) -> float | None:
    """Seconds from now to the end of a fault's grace; None: it moves nobody ever."""
    if effect == "None" or (effect == "NoSchedule" and grace == "forever"):
        return None
    lasts = int(grace[:-1]) if effect == "NoSchedule" and grace.endswith("s") else 0
    return lasts - age


@given(_faults(), st.sampled_from([0, 1, 10, 55, 60, 3600, 10**7]))
@settings(max_examples=300, deadline=None)
def test_evicted_exactly_when_the_first_grace_has_ended(
    faults: list[tuple[str, str, str, int, str]], after: int
) -> None:
    ends = [end for _, _, *how in faults if (end := _ends(*how)) is not None]  # type: ignore[arg-type]
    actions = decide(_world(faults), NOW + timedelta(seconds=after), CONFIG)
    assert evicted(actions) == (bool(ends) and min(ends) <= after)
    harmful = any(effect != "None" for _, _, effect, _, _ in faults)
    assert bool(actions) == harmful, "a fault is either acted on or told"
    assert len(actions) <= 1


@pytest.mark.parametrize("seconds", [0, 1, 600, MAX_GRACE_S, None])
def test_values_are_read_as_they_were_written(seconds: int | None) -> None:
    assert parse_grace(grace_value(seconds)) == seconds


@pytest.mark.parametrize("value", ["", "s", "600", "6e2s", "٣s", "Forever", "1 s", "99999999s", "1.5s", "600s\n"])
def test_values_that_mean_nothing_give_no_grace(value: str) -> None:
    assert parse_grace(value) == 0


def test_what_is_beyond_the_calendar_never_ends() -> None:
    assert grace_end(NOW, 2**62) == grace_end(None, 5) == grace_end(NOW, None) == NEVER
    assert grace_end(datetime(9999, 12, 31, tzinfo=UTC), MAX_GRACE_S) == NEVER
    assert parse_grace("9999999s") == MAX_GRACE_S


def test_a_toleration_of_a_million_years_does_not_end_the_controller() -> None:
    text = HIT.replace("job=j", f"job=j tolerates=xid:{2**62}").replace("since=", "effect=NoExecute since=")
    assert at(text, 0) == ()
