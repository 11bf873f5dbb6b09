"""The blast-radius guard: many devices at once are a matter for a person, one of them never is."""

import dataclasses
from datetime import timedelta

import pytest
from msgspec.structs import replace
from scenario import CONFIG, NOW, reasons, scenario

from gpunode.gang.decide import decide
from gpunode.model.gang import Action, Evict, Snapshot
from gpunode.model.names import QUARANTINE_TAINT

# 48 GPUs; g runs on n1 and n2, and there is room for it elsewhere.
WORLD = "".join(f"node n{n}\n" for n in range(1, 7)) + "gang g pods=8,8 bound=n1,n2 job=j\n"


def world(failed: int, seconds_ago: float = 0, key: str = "", more: str = "") -> Snapshot:
    """The first `failed` GPUs, eight a node from n1 on, have failed so long ago."""
    taints = "".join(f"taint n{n // 8 + 1}/gpu-{n % 8} xid=79\n" for n in range(failed))
    snapshot = scenario(WORLD + taints + more).snapshot()
    at = (NOW - timedelta(seconds=seconds_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")
    for name, rule in list(snapshot.taint_rules.items()):
        if rule.spec.taint.key == "gpunode.dev/xid":
            taint = replace(rule.spec.taint, time_added=at, key=key or rule.spec.taint.key)
            snapshot.taint_rules[name] = replace(rule, spec=replace(rule.spec, taint=taint))
    return snapshot


def evicted(actions: tuple[Action, ...]) -> bool:
    return any(isinstance(action, Evict) for action in actions)


@pytest.mark.parametrize("failed", [1, 8, 15])
def test_a_broken_machine_is_dealt_with(failed: int) -> None:
    assert evicted(decide(world(failed), NOW, CONFIG))


@pytest.mark.parametrize("seconds_ago", [0, 30, 7200, -3600])
def test_a_burst_is_held_for_as_long_as_it_stands(seconds_ago: float) -> None:
    actions = decide(world(16, seconds_ago), NOW, CONFIG)
    assert not evicted(actions)
    assert reasons(actions)["g"].startswith("DeviceFaultHeld: gpu.gpunode.dev/n1/gpu-0 is tainted gpunode.dev/xid=79")
    assert "16 of 48 GPUs failed within 600 s of each other, more than 20%" in reasons(actions)["g"]


def test_the_limits_are_settings() -> None:
    assert evicted(decide(world(16), NOW, dataclasses.replace(CONFIG, blast_share=0.5)))
    assert evicted(decide(world(16), NOW, dataclasses.replace(CONFIG, blast_minimum=17)))
    assert not evicted(decide(world(4), NOW, dataclasses.replace(CONFIG, blast_minimum=2, blast_share=0.05)))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_of_all_never_holds_back_and_one_of_nothing_always_does(share: float) -> None:
    every = world(48, more="node spare1\nnode spare2")
    everyone = dataclasses.replace(CONFIG, blast_share=share)
    assert evicted(decide(every, NOW, everyone)) == (share == 1.0)
    (_, text) = reasons(decide(world(16), NOW, CONFIG))["g"].split("more than 20%")
    assert text.endswith("or the controller runs with --blast-share 1")


def test_a_device_in_its_grace_counts_as_failed() -> None:
    """The seventeenth failure is due at once, and is part of the burst that the sixteen in their grace make up."""
    graces = "".join(f"grace n{n // 8 + 3}/gpu-{n % 8} xid=600s\n" for n in range(16))
    far = "".join(f"taint n{n // 8 + 3}/gpu-{n % 8} xid=79 since=2026-11-29T12:00:00Z\n" for n in range(16))
    actions = decide(world(1, more=far + graces), NOW, CONFIG)
    assert not evicted(actions) and reasons(actions)["g"].startswith("DeviceFaultHeld: ")
    assert evicted(decide(world(1), NOW, CONFIG))


def test_what_failed_at_another_time_is_dealt_with() -> None:
    burst = world(16, seconds_ago=7200)
    later = scenario(WORLD.replace("bound=n1,n2", "bound=n5,n6") + "taint n5/gpu-0 xid=79").snapshot()
    later.taint_rules.update({name: rule for name, rule in burst.taint_rules.items() if name not in later.taint_rules})
    assert len(later.taint_rules) > 16
    assert evicted(decide(later, NOW, CONFIG))


@pytest.mark.parametrize("failed", [1, 16])
def test_a_quarantine_is_a_fault_and_a_decision(failed: int) -> None:
    """Quarantined devices end the gang's stay, and no number of them raises the alarm."""
    actions = decide(world(failed, key=QUARANTINE_TAINT), NOW, CONFIG)
    assert evicted(actions)


def test_a_quarantined_device_is_not_held_back_by_the_alarm() -> None:
    actions = decide(world(16, more="taint n1/gpu-2 quarantine=true"), NOW, CONFIG)
    assert evicted(actions)
