"""Dry runs: every form a recorded log may have gives the same story."""

import json

import pytest

from gpunode.health.machine import HealthMachine
from gpunode.health.replay import Replayed, read_records, replay
from gpunode.model.hardware import PciAddress, device_name

GPU = device_name(PciAddress(0, 7, 0))
VERDICT = "NVRM: Xid (PCI:0000:07:00): 154, GPU recovery action changed from 0x{} ({}) to 0x{} ({})"
STORY = [
    (100.0, "NVRM: Xid (PCI:0000:07:00): 95, pid=1, name=a, Uncontained: LTC TAG (0x2,0x0)"),
    (100.5, VERDICT.format(0, "None", 1, "GPU Reset Required")),
    (160.0, VERDICT.format(1, "GPU Reset Required", 0, "None")),
    (170.0, "eth0: link up"),
    (190.0, "eth0: link down"),
]
TOLD = [
    (0.0, "95", "raised"),
    (0.5, "154", "raised"),
    (90.0, "95", "cleared"),
    (90.0, "154", "cleared"),
]


def run(lines: list[str]) -> Replayed:
    return replay(read_records(lines), HealthMachine())


def told(replayed: Replayed) -> list[tuple[float | None, str, str]]:
    return [(after, t.code, t.change) for after, t in replayed.transitions]


def journal(usec: int, text: str, transport: str = "kernel") -> dict[str, str]:
    return {
        "__CURSOR": "s=1;i=2",
        "__REALTIME_TIMESTAMP": str(1_700_000_000_000_000 + usec),
        "__MONOTONIC_TIMESTAMP": str(usec),
        "_TRANSPORT": transport,
        "MESSAGE": text,
    }


def export(entry: dict[str, str]) -> list[str]:
    return [*(f"{k}={v}\n" for k, v in entry.items()), "\n"]


FORMS = {
    "kmsg": [f"3,{n},{int(at * 1e6)},-;{text}\n" for n, (at, text) in enumerate(STORY)],
    "dmesg": [f"[{at:13.6f}] {text}\n" for at, text in STORY],
    "json": [json.dumps(journal(int(at * 1e6), text)) + "\n" for at, text in STORY],
    "export": [line for at, text in STORY for line in export(journal(int(at * 1e6), text))],
    "export, last entry cut": [line for at, text in STORY for line in export(journal(int(at * 1e6), text))][:-1],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_tells_the_same(form: str) -> None:
    replayed = run(FORMS[form])
    assert told(replayed) == TOLD
    assert replayed.records == len(STORY)
    assert not replayed.state.devices[GPU].entries


def test_times_come_from_the_log() -> None:
    assert run(FORMS["json"]).transitions[0][1].at == "2023-11-14T22:15:00Z"


def test_syslog_with_full_times() -> None:
    stamps = ("14:00:00.000000", "14:00:00.500000", "14:01:00.000000", "14:01:10.000000", "14:01:30.000000")
    lines = [f"2026-11-29T{s}+00:00 n kernel: {text}\n" for s, (_, text) in zip(stamps, STORY, strict=True)]
    assert told(run(lines)) == TOLD


def test_a_log_without_times_is_one_moment() -> None:
    replayed = run([f"Nov 29 14:00:01 n kernel: {text}\n" for _, text in STORY])
    assert told(replayed) == [(None, "95", "raised"), (None, "154", "raised")]


def test_what_others_wrote_into_the_journal_does_not_count() -> None:
    entry = journal(1, STORY[0][1], transport="stdout")
    assert not run([json.dumps(entry) + "\n", *export(entry)]).transitions


@pytest.mark.parametrize(
    "line",
    ["{", "{}", '{"MESSAGE": 3}', '{"MESSAGE": [1]}', "__CURSOR=x", "[" * 9000, "", "\x00", "{" + "[" * 100_000],
)
def test_damaged_logs_are_survived(line: str) -> None:
    assert not run([line + "\n", "__MONOTONIC_TIMESTAMP=²\n", "\n"]).transitions
