"""Dry run: what the machine would have done with a recorded kernel log."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gpunode.health.devices import DeviceMap
from gpunode.health.machine import HealthMachine
from gpunode.health.parse import MAX_LINE, Pending, Record, parse, parse_record
from gpunode.health.state import HealthState, Instant, Transition


@dataclass(frozen=True)
class Replayed:
    """What happened, when (seconds after the first record, None where the log has no times), and what is left."""

    transitions: tuple[tuple[float | None, Transition], ...]
    state: HealthState
    records: int


def replay(records: Iterable[Record], machine: HealthMachine, devices: DeviceMap | None = None) -> Replayed:
    """Run a log through the machine with the log's own time.

    A log without times is taken as one moment: what needs time to end does not end.
    """
    state, pending, count = HealthState(), Pending(), 0
    devices = devices or DeviceMap()
    first: float | None = None
    uptime, wall = 0.0, 0.0
    told: list[tuple[float | None, Transition]] = []
    for record in records:
        count += 1
        at = record.uptime if record.uptime is not None else record.wall
        if at is not None:
            first = at if first is None else first
            uptime, wall = at, record.wall if record.wall is not None else wall
        signals, pending = parse(record.text, pending)
        if not signals and not _recovering(state):
            continue
        step = machine.step(state, signals, devices, Instant(wall or uptime, uptime))
        state = step.state
        told += [(None if first is None else uptime - first, transition) for transition in step.transitions]
    return Replayed(tuple(told), state, count)


def _recovering(state: HealthState) -> bool:
    return any(entry.recovering is not None for device in state.devices.values() for entry in device.entries.values())


def read_records(lines: Iterable[str]) -> Iterator[Record]:
    """Records of a kernel log as text (/dev/kmsg, dmesg, syslog) or as `journalctl -o export` or `-o json` writes it.

    Journal entries that did not come from the kernel are left out.
    """
    fields: dict[str, str] = {}
    for line in lines:
        if line.startswith("{"):
            yield from _journal(_json(line))
        elif fields or line.startswith("__CURSOR="):
            name, _, value = line.rstrip("\n").partition("=")
            if name:
                fields[name] = value[:MAX_LINE]
            else:
                yield from _journal(fields)
                fields = {}
        else:
            yield parse_record(line)
    yield from _journal(fields)


def _json(line: str) -> dict[str, str]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return {key: value for key, value in entry.items() if isinstance(value, str)}


def _journal(fields: dict[str, str]) -> Iterator[Record]:
    if "MESSAGE" not in fields or fields.get("_TRANSPORT", "kernel") != "kernel":
        return
    record = parse_record(fields["MESSAGE"])
    yield replace(
        record,
        uptime=_microseconds(fields.get("__MONOTONIC_TIMESTAMP")),
        wall=_microseconds(fields.get("__REALTIME_TIMESTAMP")),
    )


def _microseconds(text: str | None) -> float | None:
    return int(text) / 1e6 if text and text.isascii() and text.isdecimal() and len(text) < 20 else None
