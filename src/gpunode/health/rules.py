"""What one signal means: pure rules from a signal to its effects on devices."""

import re
from dataclasses import dataclass, replace

from gpunode.health import decode
from gpunode.health.catalogue import LEVEL_OF_ACTION, Catalogue, XidClass, XidEntry
from gpunode.health.decode import SxidClass
from gpunode.health.devices import DeviceMap
from gpunode.health.signals import SxidSignal, XidSignal
from gpunode.model.health import Action, Clear, Dimension, Level, RecoveryAction

MAX_MESSAGE = 1024

WHAT_NOW = {
    Action.NONE: "nothing to do; the GPU stays in use",
    Action.RESTART_APP: "restart the application; the GPU stays in use",
    Action.INSPECT: "have the board checked and contact support if it repeats",
    Action.DRAIN: "let running work end; no new work is placed here",
    Action.RESET_GPU: "drain and reset the GPU; no new work is placed here",
    Action.RESTART_HOST: "restart the host, then check the board; no new work is placed here",
}

# The code that ends another: power smoothing engaged again ends its disengagement.
CANCELS = {162: "163"}

# Codes whose text decides what they mean, so that no two texts of them are merged.
DETAILED = frozenset({"74", "144", "145", "146", "147", "148", "149", "150"})
# Application codes that point at the board when different programs meet them in one place.
REPEATABLE = frozenset({"13", "31"})

# So many sightings on one link make some of XID 74's errors a matter for the hardware.
REPEATS = 3

# Source: nvml.h, nvmlDeviceGpuRecoveryAction_t, and the names in XID 154's text.
_VERDICTS = {
    RecoveryAction.GPU_RESET: (Action.RESET_GPU, "the driver asks for a GPU reset"),
    RecoveryAction.NODE_REBOOT: (Action.RESTART_HOST, "the driver asks for a reboot of the node"),
    RecoveryAction.DRAIN_P2P: (Action.DRAIN, "the driver asks to end peer-to-peer work"),
    RecoveryAction.DRAIN_AND_RESET: (Action.RESET_GPU, "the driver asks to drain and reset the GPU"),
    RecoveryAction.RECOVER_IMEX: (Action.INSPECT, "the driver asks to recover the IMEX domain"),
    RecoveryAction.BUS_RESET: (Action.RESTART_HOST, "the driver asks for a reset of the bus"),
    RecoveryAction.SYSTEM_REBOOT: (Action.RESTART_HOST, "the driver asks for a reboot of the system"),
}
_SXID_WORDS = {
    SxidClass.ALWAYS_FATAL: "fatal error",
    SxidClass.FATAL: "fatal error of one port",
    SxidClass.HOST: "error from the host or the cooling",
    SxidClass.NOTE: "harmless error",
}
_PLACE_13 = re.compile(r"(?a)\(?GPC (\d{1,4}), TPC (\d{1,4})")


@dataclass(frozen=True)
class Raise:
    """A fault of one device. `kernel`, `nvml`: sightings by source."""

    device: str
    dimension: Dimension
    code: str
    action: Action
    level: Level
    message: str
    clears: frozenset[Clear]
    kernel: int = 0
    nvml: int = 0
    detailed: bool = False


@dataclass(frozen=True)
class Seen:
    """Something harmless on one device; `worse` is what it becomes once it has been seen REPEATS times."""

    device: str
    code: str
    message: str
    kernel: int = 0
    nvml: int = 0
    pid: int | None = None
    place: str = ""
    dimension: Dimension | None = Dimension.XID
    worse: Raise | None = None


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def over(message: str, why: str) -> str:
    """The sentence that a fault is over, from the sentence that it began with."""
    head, end, _ = message.rpartition("): ")
    name = f"{head})" if end else message or "A fault"
    return f"{name[: MAX_MESSAGE // 2]} is over: {why}"[:MAX_MESSAGE]


def as_seen(effect: Raise) -> Seen:
    """A fault that the policy calls harmless."""
    return Seen(effect.device, effect.code, effect.message, effect.kernel, effect.nvml, dimension=effect.dimension)


def sentence(name: str, meaning: str, action: Action, extra: str = "", level: Level | None = None) -> str:
    """Code, meaning and what to do, in one sentence of at most 1024 characters.

    `name` is what ends in the end, in the singular: "<name> (<meaning>) is over" is said of it too.
    `extra` is text from outside (cut, and on one line); `level` where it is not the action's own.
    """
    detail = f": {_printable(extra)[:400]}" if extra else ""
    what_now = WHAT_NOW[action]
    if action is Action.RESET_GPU and level is Level.DEGRADED:
        what_now = "reset the GPU when it is free; until then it stays in use"
    if action is Action.INSPECT and level is Level.UNHEALTHY:
        what_now = "have the board checked or replaced; no new work is placed here"
    return f"{name} ({meaning}{detail}): {what_now}"[:MAX_MESSAGE]


def xid_effect(signal: XidSignal, catalogue: Catalogue, devices: DeviceMap) -> Raise | Seen:
    """What an XID does to the device that it names.

    A code that asks for the host concerns the whole GPU, whatever partition it was met in.
    """
    entry = catalogue.of(signal.code)
    device = devices.device_at(signal.pci, signal.gi, signal.ci)
    if entry.action is Action.RESTART_HOST:
        device = devices.gpu_at(signal.pci)
    details = _details(signal, devices) if entry.class_ is XidClass.WORKFLOW else None
    if details is None:
        return _effect(signal, entry, entry.action, device)
    effect = _effect(signal, entry, details.action, device, details.text)
    if isinstance(effect, Raise) or details.repeated is None:
        return effect
    worse = _effect(signal, entry, details.repeated, device, f"{details.text}; seen {REPEATS} times on this link")
    return replace(effect, code=f"{signal.code}-link-{details.link}", worse=worse if isinstance(worse, Raise) else None)


def _details(signal: XidSignal, devices: DeviceMap) -> decode.Details | None:
    """A user who gave a code another class has decided; then details are not asked."""
    if signal.code == 74:
        return decode.nvlink4(signal.text)
    if str(signal.code) in DETAILED:
        return decode.nvlink5(signal.code, signal.text, devices.driver_branch)
    return None


def _effect(signal: XidSignal, entry: XidEntry, action: Action, device: str, extra: str = "") -> Raise | Seen:
    """The effect of an XID once its action is decided."""
    level = LEVEL_OF_ACTION[action]
    about = ", ".join(part for part in (extra, _circumstances(signal)) if part)
    message = sentence(f"XID {signal.code}", entry.meaning, action, about)
    kernel, nvml = (signal.count, 0) if signal.text else (0, signal.count)
    if level is Level.HEALTHY:
        place = _PLACE_13.search(signal.text[:256]) if signal.code == 13 else None
        where = f"GPC {place[1]}, TPC {place[2]}" if place else ""
        return Seen(device, str(signal.code), message, kernel, nvml, signal.pid, where)
    return Raise(
        device,
        Dimension.XID,
        str(signal.code),
        action,
        level,
        message,
        entry.clears,
        kernel,
        nvml,
        detailed=bool(signal.text),
    )


def _circumstances(signal: XidSignal) -> str:
    """What a person asks next: after which error, in which program."""
    after = "" if signal.previous is None else f"after XID {signal.previous}"
    name = signal.process[:64]
    program = "" if signal.pid is None else f"in {name} (pid {signal.pid})" if name else f"in pid {signal.pid}"
    return ", ".join(part for part in (after, program) if part)


def verdict_effect(device: str, verdict: RecoveryAction) -> Raise | None:
    """The driver's own verdict as a fault; None when it asks for nothing or is unknown."""
    if verdict not in _VERDICTS:
        return None
    action, meaning = _VERDICTS[verdict]
    message = sentence("XID 154", meaning, action)
    return Raise(
        device,
        Dimension.XID,
        "154",
        action,
        LEVEL_OF_ACTION[action],
        message,
        frozenset({Clear.REBOOT, Clear.RESET, Clear.VERDICT}),
        detailed=True,
    )


def sxid_effects(signal: SxidSignal, devices: DeviceMap) -> tuple[Raise | Seen, ...]:
    """A fatal switch error reaches the GPU behind the switch's port, or all behind the switch; others are notes."""
    kind = decode.sxid_class(signal.code, fatal=signal.fatal)
    link = None if kind is SxidClass.ALWAYS_FATAL else signal.link
    where = f"NVSwitch {signal.switch}" + ("" if signal.link is None else f" link {signal.link}")
    meaning = f"{_SXID_WORDS[kind]} of {where}"
    code, reached = f"sxid-{signal.code}", devices.behind_switch(signal.pci, link)
    if kind is SxidClass.NOTE:
        note = sentence(f"SXid {signal.code}", meaning, Action.NONE, signal.text)
        return tuple(Seen(name, code, note, signal.count, dimension=Dimension.FABRIC) for name in reached)
    action = Action.INSPECT if kind is SxidClass.HOST else Action.RESET_GPU
    message = sentence(f"SXid {signal.code}", meaning, action, signal.text)
    clears, level = frozenset({Clear.REBOOT, Clear.RESET}), LEVEL_OF_ACTION[action]
    return tuple(Raise(name, Dimension.FABRIC, code, action, level, message, clears, signal.count) for name in reached)


def reset_failed(device: str) -> Raise:
    """A reset that did not succeed."""
    action = Action.RESTART_HOST
    return Raise(
        device,
        Dimension.XID,
        "reset-failed",
        action,
        Level.UNHEALTHY,
        sentence("Reset failure", "the GPU could not be reset", action),
        frozenset({Clear.REBOOT, Clear.RESET}),
    )


def lost(device: str, reason: str) -> Raise:
    """A GPU that NVML cannot reach."""
    return Raise(
        device,
        Dimension.PRESENCE,
        "lost",
        Action.RESTART_HOST,
        Level.UNHEALTHY,
        sentence("GPU loss", "the driver cannot reach it", Action.RESTART_HOST, reason),
        frozenset({Clear.REBOOT, Clear.RESET, Clear.SAMPLE}),
    )


def prepare_failed(device: str, failures: int, error: str) -> Raise:
    """A device that swallows pods: it fails to be prepared again and again."""
    return Raise(
        device,
        Dimension.PREPARE,
        "failed",
        Action.INSPECT,
        Level.UNHEALTHY,
        sentence("Prepare failure", f"{failures} times in a row", Action.INSPECT, error, Level.UNHEALTHY),
        frozenset({Clear.REBOOT, Clear.RESET, Clear.SAMPLE}),
    )


def repeated(seen: Seen, processes: int) -> Raise:
    """An application error that so many different programs met in the same place is the board's."""
    at = f" at {seen.place}" if seen.place else ""
    meaning = f"met by {processes} different processes{at}, so probably not their fault"
    return Raise(
        seen.device,
        Dimension.XID,
        f"{seen.code}-repeated",
        Action.INSPECT,
        Level.DEGRADED,
        sentence(f"XID {seen.code}", meaning, Action.INSPECT),
        frozenset({Clear.REBOOT, Clear.RESET}),
    )
