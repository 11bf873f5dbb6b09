"""One step of the state machine in the making."""

from dataclasses import replace
from typing import Literal

import msgspec

from gpunode.health import rules, samples
from gpunode.health.devices import DeviceMap
from gpunode.health.policy import Policy
from gpunode.health.signals import GpuReset, OperatorClear, PrepareResult
from gpunode.health.state import (
    MAX_HISTORY,
    MAX_NOTES,
    DeviceState,
    Entry,
    Flaps,
    HealthState,
    Instant,
    Note,
    Step,
    Transition,
    Waiting,
)
from gpunode.model.hardware import PARTITION_MARK
from gpunode.model.health import Clear, Dimension, Finding, GpuSample, Level, RecoveryAction

SEVERITY = {Level.HEALTHY: 0, Level.DEGRADED: 1, Level.UNHEALTHY: 2}
_MAX_PIDS = 16
# More than a node has, and more than NVIDIA has codes: a flood of nonsense must not fill the state.
_MAX_DEVICES = 2048
_MAX_ENTRIES = 256
_POLLED = frozenset({Clear.SAMPLE})
_BECAUSE = {
    Clear.RESET: "the GPU was reset",
    Clear.VERDICT: "the driver asks for nothing any more",
    Clear.SAMPLE: "the GPU no longer shows it",
}
# A reset, or more, that nobody has told of.
_MET = "what the driver asked for was done"
# NVML and the kernel log tell of one event within this time of each other.
_SAME_EVENT_S = 2.0


class Work:
    """One step in the making: a copy of the devices that changes, and the transitions so far."""

    def __init__(self, state: HealthState, devices: DeviceMap, now: Instant, policy: Policy) -> None:
        self.map = devices
        self.devices = dict(state.devices)
        self._lifetime_ecc = state.lifetime_ecc
        self._state, self._now, self._policy = state, now, policy
        self._transitions: list[Transition] = []

    def done(self) -> Step:
        happened = tuple(self._transitions)
        history = (*self._state.history, *happened)[-MAX_HISTORY:] if happened else self._state.history
        state = msgspec.structs.replace(
            self._state, devices=self.devices, history=history, lifetime_ecc=self._lifetime_ecc
        )
        return Step(state, happened)

    def apply(self, *effects: rules.Raise | rules.Seen) -> None:
        for effect in effects:
            code = effect.code.partition("-")[0]
            if code in rules.DETAILED and effect.kernel:
                self._waiting_no_more(effect.device, code)
            if isinstance(effect, rules.Seen):
                self._seen(effect)
            elif code not in rules.DETAILED or effect.kernel or not self._wait(effect):
                self._raise(effect)

    def rebooted(self) -> None:
        """End what a reboot ends, and forget the uptimes of the boot before: they mean nothing in this one."""
        for device in list(self.devices):
            for key, entry in self._get(device).entries.items():
                if Clear.REBOOT in entry.finding.clears:
                    self._lift(device, key, "the host was rebooted", count_flap=False)
            state, now = self.devices[device], self._now.uptime
            entries = {k: msgspec.structs.replace(e, last=now, recovering=None) for k, e in state.entries.items()}
            if entries:
                self.devices[device] = DeviceState(uuid=state.uuid, entries=entries, links_seen=state.links_seen)
            else:
                del self.devices[device]

    def reloaded(self) -> None:
        """A driver that was loaded anew has initialised every GPU."""
        for gpu in {device.partition(PARTITION_MARK)[0] for device in self.devices}:
            self.end(gpu, Clear.RESET)

    def reset(self, signal: GpuReset) -> None:
        device = self.map.by_uuid(signal.uuid) or self._remembered(signal.uuid)
        if device is None:
            return
        if not signal.success:
            self._raise(rules.reset_failed(device))
            return
        self.end(device, Clear.RESET)

    def _remembered(self, uuid: str) -> str | None:
        """A GPU that was lost before this agent started is in no inventory until it is back; its reset comes first."""
        return next((name for name, state in self.devices.items() if uuid and state.uuid == uuid), None)

    def verdict(self, device: str, verdict: RecoveryAction) -> None:
        """The driver's word on a GPU: a demand is a fault, "none" is the beginning of the end of several.

        A demand that turned into none means that what was asked for, a reset or more, has been done.
        """
        before = self._get(device).verdict
        self._update(device, verdict=verdict)
        effect = rules.verdict_effect(device, verdict)
        if effect is not None:
            self._raise(effect)
            self._relapse(device)
        elif verdict is RecoveryAction.NONE:
            self.end(device, Clear.VERDICT)
            if before not in (RecoveryAction.NONE, RecoveryAction.UNKNOWN):
                self.end(device, Clear.RESET, because=_MET)

    def sample(self, sample: GpuSample, polled: list[GpuSample]) -> None:
        """Compare a poll with what stands: raise what it shows, begin to end what it no longer shows."""
        device = self.map.gpu_at(sample.pci)
        state = self._get(device)
        if state.uuid and sample.uuid and state.uuid != sample.uuid:
            self._drop_all(device, f"the board was replaced: {sample.uuid} is new")
            state = self._get(device)
        raised = samples.effects(device, self._without_mig_links(sample), state, self._switched(polled))
        self.apply(*raised)
        if not sample.present:
            self._update(device, sampled=self._now.uptime, valid=False, absent=state.absent + 1)
            return
        self._update(
            device,
            uuid=sample.uuid or state.uuid,
            sampled=self._now.uptime,
            valid=not sample.error,
            absent=0,
            links_seen=max(state.links_seen, sample.links_active or 0),
            ecc=state.ecc if sample.ecc_uncorrected is None else sample.ecc_uncorrected,
        )
        if sample.leftover_pids == ():
            self._end_note(device, samples.LEFTOVERS, "nothing has the GPU open any more that should not")
        if state.ecc and sample.ecc_uncorrected == 0:
            self.end(device, Clear.RESET)
        self._lifetime(device, sample)
        if sample.recovery is not RecoveryAction.UNKNOWN:
            self.verdict(device, sample.recovery)
        shown = frozenset(f"{e.dimension}/{e.code}" for e in raised if isinstance(e, rules.Raise))
        self.end(device, Clear.SAMPLE, spared=shown | samples.unknown(sample))

    def _lifetime(self, device: str, sample: GpuSample) -> None:
        """Errors that only the board's own count knows of: the agent was away, and a reset has cleared the rest."""
        count, known = sample.ecc_uncorrected_aggregate, self._lifetime_ecc.get(sample.uuid)
        if count is None or count == known or (known is None and len(self._lifetime_ecc) >= _MAX_DEVICES):
            return
        self._lifetime_ecc = {**self._lifetime_ecc, sample.uuid: count}
        if known is not None and count > known and sample.ecc_uncorrected == 0:
            self.apply(samples.missed_ecc(device, count - known, count))

    def _without_mig_links(self, sample: GpuSample) -> GpuSample:
        """MIG mode switches NVLinks off, which is no fault."""
        mig = any(gpu.mig for gpu in self.map.gpus if gpu.uuid == sample.uuid)
        return replace(sample, links_active=None) if mig else sample

    def _switched(self, polled: list[GpuSample]) -> list[GpuSample]:
        """GPUs behind switches must all have the same links; bridges may join just some of a node's GPUs."""
        switched = {gpu.uuid for gpu in self.map.gpus if gpu.switched}
        return [sample for sample in polled if sample.uuid in switched]

    def prepared(self, result: PrepareResult) -> None:
        failures = self._get(result.device).prepare_failures + 1 if result.error else 0
        self._update(result.device, prepare_failures=failures)
        if failures >= self._policy.prepare_failures:
            self._raise(rules.prepare_failed(result.device, failures, result.error))
        elif not failures:
            self.end_code(result.device, Dimension.PREPARE, "failed", "the device was prepared again")

    def operator(self, signal: OperatorClear) -> None:
        for key, entry in list(self._get(signal.device).entries.items()):
            if signal.dimension in (None, entry.finding.dimension):
                self._lift(signal.device, key, f"cleared by {signal.by}", count_flap=False)
        if signal.dimension is None:
            self.devices.pop(signal.device, None)

    def end(self, device: str, event: Clear, spared: frozenset[str] = frozenset(), because: str = "") -> None:
        """Begin the hold-down of every fault that the event may end, of a device and of its partitions.

        spared: keys that stay as they are. because: how the event is known, where it was not told.
        """
        for name, key, entry in self._standing(device):
            may_end = event in entry.finding.clears and key not in spared
            if may_end and entry.recovering is None and self._old_enough(entry):
                begun = msgspec.structs.replace(entry, recovering=self._now.uptime, because=because or _BECAUSE[event])
                self._put(name, key, begun)

    def _relapse(self, device: str) -> None:
        """A demand speaks against the end of what verdicts end, and against any end that was only concluded from a
        verdict: a poll may be of the moment before the demand, and then nothing has been done."""
        for name, key, entry in self._standing(device):
            concluded = Clear.VERDICT in entry.finding.clears or entry.because == _MET
            if concluded and entry.recovering is not None:
                self._put(name, key, msgspec.structs.replace(entry, recovering=None))

    def _standing(self, device: str) -> list[tuple[str, str, Entry]]:
        """Every fault of a device and of its partitions, also of those that do not exist any more."""
        return [
            (name, key, entry)
            for name, state in self.devices.items()
            if name == device or name.startswith(device + PARTITION_MARK)
            for key, entry in state.entries.items()
        ]

    def end_code(self, device: str, dimension: Dimension, code: str, why: str) -> None:
        key = f"{dimension}/{code}"
        if key in self._get(device).entries:
            self._lift(device, key, why)

    def missing(self) -> None:
        """A GPU that was polled in this boot and that discovery no longer finds is lost; its claims must hear of it.

        No GPU at all means that the driver is gone, which says nothing about any of them.
        """
        known = {gpu.name for gpu in self.map.gpus}
        for device, state in list(self.devices.items()) if known else ():
            if state.uuid and device not in known and f"{Dimension.PRESENCE}/lost" not in state.entries:
                self._raise(rules.lost(device, "discovery does not find it any more"))

    def settle(self) -> None:
        """Raise what has waited for details in vain; lift what recovered for its hold-down, if the GPU answers."""
        for device in list(self.devices):
            state = self.devices[device]
            for code, held in state.waiting.items():
                if not 0 <= self._now.uptime - held.since < _SAME_EVENT_S:
                    self._waiting_no_more(device, code)
                    self._raise(held.effect)
            for key in list(self.devices[device].entries):
                self._under_policy(device, key)
            for key, entry in list(self.devices[device].entries.items()):
                since = entry.recovering
                if since is None:
                    continue
                if since > self._now.uptime:
                    self._put(device, key, msgspec.structs.replace(entry, recovering=self._now.uptime))
                elif self._validated(device, since) and self._now.uptime - since >= self._hold_down(device, entry):
                    held_down = f"{entry.because}, and nothing spoke against it for {self._now.uptime - since:.0f} s"
                    self._lift(device, key, held_down)

    def _under_policy(self, device: str, key: str) -> None:
        """A fault has the level that the policy of now gives it, also when it began under another one."""
        entry = self.devices[device].entries[key]
        finding = entry.finding
        level = self._policy.level(finding.dimension, finding.code, entry.level or finding.level)
        if level is Level.HEALTHY:
            self._lift(device, key, "the policy calls it harmless", count_flap=False)
        elif level is not finding.level:
            finding = replace(finding, level=level)
            self._put(device, key, msgspec.structs.replace(entry, finding=finding))
            self._tell(device, finding, "changed")

    def _validated(self, device: str, since: float) -> bool:
        """A GPU that is polled at all must have answered well after the end began."""
        state = self._get(device.partition(PARTITION_MARK)[0])
        content = state.valid and state.verdict in (RecoveryAction.NONE, RecoveryAction.UNKNOWN)
        return state.sampled is None or (content and state.sampled >= since)

    def _old_enough(self, entry: Entry) -> bool:
        """A device that cannot be prepared shows nothing in polls: it is tried again after a while."""
        if entry.finding.dimension is not Dimension.PREPARE:
            return True
        return self._now.uptime - entry.last >= self._policy.prepare_retry_s

    def _hold_down(self, device: str, entry: Entry) -> float:
        flaps = self.devices[device].flaps.get(entry.finding.dimension, Flaps()).count
        return min(self._policy.hold_down_s * float(2 ** min(flaps, 16)), self._policy.hold_down_max_s)

    def _raise(self, effect: rules.Raise) -> None:
        level = self._policy.level(effect.dimension, effect.code, effect.level)
        state, key, now = self._get(effect.device), f"{effect.dimension}/{effect.code}", self._now.uptime
        known = state.entries.get(key)
        if level is Level.HEALTHY:
            if known is not None:
                self._under_policy(effect.device, key)
            self._seen(rules.as_seen(effect))
            return
        if known is None:
            if _full(state, effect.dimension, level):
                return
            self._count_flap(effect.device, effect.dimension)
            finding = _finding(effect, level, self._now.text)
            entry = Entry(finding, now, effect.kernel, effect.nvml, effect.detailed, level=effect.level)
            self._put(effect.device, key, entry)
            self._tell(effect.device, finding, "raised")
            return
        finding, own = known.finding, known.level
        if _supersedes(effect, known):
            finding, own = _finding(effect, level, known.finding.since), effect.level
        kernel, nvml = known.kernel + effect.kernel, known.nvml + effect.nvml
        self._put(effect.device, key, Entry(finding, now, kernel, nvml, known.detailed or effect.detailed, level=own))
        if (finding.level, finding.action) != (known.finding.level, known.finding.action):
            self._tell(effect.device, finding, "changed")

    def _seen(self, seen: rules.Seen) -> None:
        state = self._get(seen.device)
        known = state.notes.get(seen.code)
        now, at = self._now.uptime, self._now.text
        if known is None:
            known = Note(seen.message, first=at, last=at, told=now - 2 * self._policy.remind_s, place=seen.place)
        due = not 0 <= now - known.told < self._policy.remind_s
        note = msgspec.structs.replace(
            known,
            text=seen.message,
            last=at,
            seen=now,
            told=now if due else known.told,
            kernel=known.kernel + seen.kernel,
            nvml=known.nvml + seen.nvml,
            place=seen.place,
            pids=_pids(known, seen),
        )
        notes = {code: kept for code, kept in state.notes.items() if code != seen.code}
        self._update(seen.device, notes={**dict(list(notes.items())[-MAX_NOTES + 1 :]), seen.code: note})
        if due:
            self._transitions.append(
                Transition(at, seen.device, seen.dimension, seen.code, "noted", Level.HEALTHY, seen.message)
            )
        if seen.worse is not None and note.count >= rules.REPEATS:
            self._raise(seen.worse)
        if seen.code in rules.REPEATABLE and len(note.pids) >= self._policy.repeat_count:
            self._raise(rules.repeated(seen, len(note.pids)))

    def _end_note(self, device: str, code: str, why: str) -> None:
        """For what is harmless but lasts, so that its end is worth a word and its return another one."""
        notes = self._get(device).notes
        if code not in notes:
            return
        self._update(device, notes={kept: note for kept, note in notes.items() if kept != code})
        self._transitions.append(Transition(self._now.text, device, None, code, "cleared", Level.HEALTHY, why))

    def _wait(self, effect: rules.Raise) -> bool:
        """Hold back a bare code from NVML while the kernel log line with its details may be on its way.

        True when it is held back, or when its line came first and showed it to be harmless.
        """
        state, now = self._get(effect.device), self._now.uptime
        if f"{effect.dimension}/{effect.code}" in state.entries:
            return False
        for code, note in state.notes.items():
            if code.partition("-")[0] == effect.code and note.kernel and 0 <= now - note.seen <= _SAME_EVENT_S:
                return True
        if effect.code not in state.waiting:
            self._update(effect.device, waiting={**state.waiting, effect.code: Waiting(effect, now)})
        return True

    def _waiting_no_more(self, device: str, code: str) -> None:
        waiting = self._get(device).waiting
        if code in waiting:
            self._update(device, waiting={kept: held for kept, held in waiting.items() if kept != code})

    def _count_flap(self, device: str, dimension: Dimension) -> None:
        flaps = self._get(device).flaps
        known = flaps.get(dimension)
        if known is None or known.lifted == 0.0:
            return
        recent = 0 <= self._now.uptime - known.lifted <= self._policy.flap_window_s
        self._update(device, flaps={**flaps, dimension: Flaps(known.count + 1) if recent else Flaps()})

    def _lift(self, device: str, key: str, why: str, *, count_flap: bool = True) -> None:
        state = self._get(device)
        entry = state.entries[key]
        dimension = entry.finding.dimension
        flaps = {**state.flaps}
        if count_flap:
            flaps[dimension] = Flaps(flaps.get(dimension, Flaps()).count, self._now.uptime)
        else:
            flaps.pop(dimension, None)
        self._update(device, entries={k: e for k, e in state.entries.items() if k != key}, flaps=flaps)
        message = rules.over(entry.finding.message, why)
        at, code = self._now.text, entry.finding.code
        self._transitions.append(Transition(at, device, dimension, code, "cleared", Level.HEALTHY, message))

    def _drop_all(self, device: str, why: str) -> None:
        """Forget a GPU and its partitions."""
        for name, key, _ in self._standing(device):
            self._lift(name, key, why, count_flap=False)
        for name in [name for name in self.devices if name.startswith(device + PARTITION_MARK)]:
            del self.devices[name]
        self.devices[device] = DeviceState()

    def _tell(self, device: str, finding: Finding, change: Literal["raised", "changed"]) -> None:
        at, message = self._now.text, finding.message
        self._transitions.append(
            Transition(at, device, finding.dimension, finding.code, change, finding.level, message)
        )

    def _get(self, device: str) -> DeviceState:
        return self.devices.get(device) or DeviceState()

    def _put(self, device: str, key: str, entry: Entry) -> None:
        self._update(device, entries={**self._get(device).entries, key: entry})

    def _update(self, device: str, **changes: object) -> None:
        if device not in self.devices and len(self.devices) >= _MAX_DEVICES:
            return
        self.devices[device] = msgspec.structs.replace(self._get(device), **changes)


def _full(state: DeviceState, dimension: Dimension, level: Level) -> bool:
    """Whether a device has so many faults that one more says nothing. What is harmless beside it keeps none out."""
    if len(state.entries) < _MAX_ENTRIES:
        return False
    found = (entry.finding for entry in state.entries.values())
    alike = sum((one.dimension, one.level) == (dimension, level) for one in found)
    return level is Level.DEGRADED or alike >= _MAX_ENTRIES


def _finding(effect: rules.Raise, level: Level, since: str) -> Finding:
    return Finding(effect.dimension, level, effect.code, effect.action, effect.message, since, effect.clears)


def _supersedes(effect: rules.Raise, known: Entry) -> bool:
    """The driver's verdict is its latest word; details beat a bare code; otherwise the worse one stays. Of polls that
    are equally bad the latest has the right numbers."""
    if effect.code == "154" or effect.detailed != known.detailed:
        return effect.detailed
    was = SEVERITY[known.level or known.finding.level]
    return SEVERITY[effect.level] > was or (SEVERITY[effect.level] == was and effect.clears == _POLLED)


def _pids(known: Note, seen: rules.Seen) -> tuple[int, ...]:
    """Different processes that met the same code in the same place, in a row."""
    if seen.pid is None:
        return known.pids
    before = known.pids if known.place == seen.place else ()
    return before if seen.pid in before else (*before, seen.pid)[-_MAX_PIDS:]
