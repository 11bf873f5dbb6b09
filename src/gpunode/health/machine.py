"""The health state machine: signals in, state and transitions out. Pure; time comes as an argument.

Every fault stands on its own, keyed by device, dimension and code, so that the end of one never hides another.
A fault ends when an event it listens to has happened (Clear) and then for its hold-down nothing spoke against it.
"""

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from gpunode.health import decode, rules
from gpunode.health.catalogue import Catalogue, builtin_catalogue
from gpunode.health.devices import DeviceMap
from gpunode.health.policy import Policy
from gpunode.health.signals import (
    DriverReloaded,
    FallenOffBus,
    GpuLost,
    GpuReset,
    OperatorClear,
    PrepareResult,
    RecoveryActionChanged,
    Signal,
    SxidSignal,
    XidSignal,
)
from gpunode.health.state import HealthState, Instant, Step
from gpunode.health.work import Work
from gpunode.model.hardware import PARTITION_MARK
from gpunode.model.health import DeviceHealth, Dimension, Finding, GpuSample, NodeHealth, severity, urgency


def coalesce(signals: Iterable[Signal]) -> list[Signal]:
    """Equal XIDs and SXids in a row as one signal with a count; the order of first sightings is kept.

    Only in a row: a reset between two of them must stay between them.

    Texts differ in addresses and numbers, so only the first text of a code, instance and process is kept: a
    storm of one code costs one signal a batch (one a process for the codes whose rules count processes).
    """
    merged: dict[object, Signal] = {}
    run = 0
    for signal in signals:
        match signal:
            case XidSignal():
                pid = signal.pid if str(signal.code) in rules.REPEATABLE else None
                text = signal.text if str(signal.code) in rules.DETAILED else bool(signal.text)
                key: object = (run, signal.pci, signal.code, signal.gi, signal.ci, pid, text)
            case SxidSignal():
                key = (run, signal.pci, signal.code, signal.link, signal.fatal)
            case _:
                run += 1
                key = run
        known = merged.get(key)
        if isinstance(known, XidSignal | SxidSignal) and isinstance(signal, XidSignal | SxidSignal):
            merged[key] = replace(known, count=known.count + signal.count)
        else:
            merged[key] = signal
    return list(merged.values())


class HealthMachine:
    """The rules of health for one catalogue and one policy. Holds no state of its own."""

    def __init__(self, catalogue: Catalogue | None = None, policy: Policy = Policy()) -> None:  # noqa: B008 - frozen
        self._catalogue = catalogue or builtin_catalogue()
        self._policy = policy
        # Read now, so that the first link error does not have to wait for it.
        decode.link_tables()

    def step(self, state: HealthState, signals: Iterable[Signal], devices: DeviceMap, now: Instant) -> Step:
        """Take in a batch of signals (possibly none: time alone can end a fault). Signals are in order of time."""
        work = Work(state, devices, now, self._policy)
        batch = coalesce(signals)
        polled = [signal for signal in batch if isinstance(signal, GpuSample)]
        for signal in batch:
            self._take(work, signal, polled)
        work.missing()
        work.settle()
        return work.done()

    def rebooted(self, state: HealthState, boot_id: str, now: Instant) -> Step:
        """The state carried into a new boot: what a reboot ends is gone, the rest stands. Same boot: unchanged.

        "" is a boot that could not be read, which proves no reboot.
        """
        if boot_id in ("", state.boot_id):
            return Step(state)
        if not state.boot_id:
            return Step(msgspec.structs.replace(state, boot_id=boot_id, kernel_sequence=None))
        work = Work(state, DeviceMap(), now, self._policy)
        work.rebooted()
        step = work.done()
        return Step(msgspec.structs.replace(step.state, boot_id=boot_id, kernel_sequence=None), step.transitions)

    def project(self, state: HealthState, devices: DeviceMap) -> NodeHealth:
        """Health by device name: a partition has its own findings and those of its GPU."""
        own = {
            name: _worst(self._with_policy(entry.finding) for entry in device.entries.values())
            for name, device in state.devices.items()
        }
        # Also those that are not there (any more, or yet): they may still be held, and one may fail to be made.
        there = {partition for gpu in devices.gpus for partition in devices.partitions_of(gpu.name)}
        for partition in sorted(there | {name for name in own if PARTITION_MARK in name}):
            gpu_name = partition.partition(PARTITION_MARK)[0]
            own[partition] = _worst((*own.get(gpu_name, ()), *own.get(partition, ())))
        return NodeHealth({name: DeviceHealth(name, findings) for name, findings in own.items() if findings})

    def _with_policy(self, finding: Finding) -> Finding:
        """Taint effect and grace are not remembered but looked up, so that a changed policy holds at once."""
        entry = None
        if finding.dimension is Dimension.XID and finding.code.isdecimal():
            entry = self._catalogue.of(int(finding.code))
        about = (finding.dimension, finding.code, finding.level, entry.class_ if entry else "")
        return replace(finding, effect=self._policy.effect(*about), grace=self._policy.gang_grace(*about))

    def _take(self, work: Work, signal: Signal, polled: list[GpuSample]) -> None:
        match signal:
            case XidSignal():
                self._xid(work, signal)
            case FallenOffBus():
                self._xid(work, XidSignal(signal.pci, 79, text="the kernel log says so without an XID"))
            case SxidSignal():
                work.apply(*rules.sxid_effects(signal, work.map))
            case RecoveryActionChanged():
                work.verdict(work.map.gpu_at(signal.pci), signal.new)
            case GpuReset():
                work.reset(signal)
            case DriverReloaded():
                work.reloaded()
            case GpuLost():
                work.apply(rules.lost(work.map.gpu_at(signal.pci), signal.reason))
            case PrepareResult():
                work.prepared(signal)
            case OperatorClear():
                work.operator(signal)
            case GpuSample():
                work.sample(signal, polled)

    def _xid(self, work: Work, signal: XidSignal) -> None:
        effect = rules.xid_effect(signal, self._catalogue, work.map)
        if signal.code in rules.CANCELS:
            work.end_code(effect.device, Dimension.XID, rules.CANCELS[signal.code], f"XID {signal.code} ended it")
        work.apply(effect)


def _worst(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The worst finding of each dimension, and the one that its taint tells where a policy makes that another."""
    found = tuple(findings)
    kept: dict[Finding, None] = {}
    for dimension in Dimension:
        if alike := [finding for finding in found if finding.dimension is dimension]:
            kept |= dict.fromkeys((min(alike, key=severity), min(alike, key=urgency)))
    return tuple(kept)
