"""Fault scenarios: timed scripts of what goes wrong with a fake machine's GPUs, as YAML.

`expand` turns one into plain fault values in the form that fake hardware takes ({"kind": "xid", "device": "0", ...}),
each of which changes NVML, kernel log and sysfs together, so that a scenario cannot contradict itself.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from gpunode.model.health import Level, RecoveryAction
from gpunode.model.wording import why

_MAX_BYTES = 1 << 20
_FAULT = dict[str, str | int]

Time = Annotated[float, Meta(ge=0, le=7 * 86400)]
Gpu = Annotated[int, Meta(ge=0, le=63)] | Literal["all"]
Instance = Annotated[int, Meta(ge=0, le=99)]
Code = Annotated[int, Meta(ge=1, le=9999)]
Address = Annotated[str, Meta(pattern=r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.0$")]

# nvml.h, NVML_GPU_FABRIC_HEALTH_MASK_*: two bits each, 1 means true.
_FABRIC_SHIFT = {"degraded-bandwidth": 0, "route-recovery": 2, "route-unhealthy": 4, "access-timeout-recovery": 6}
_FABRIC_STATE = {"unsupported": 0, "notStarted": 1, "inProgress": 2, "completed": 3}
# Order of nvmlDeviceGpuRecoveryAction_t.
_RECOVERY = tuple(action for action in RecoveryAction if action is not RecoveryAction.UNKNOWN)


class ScenarioError(ValueError):
    """A scenario file is wrong; the text says where and what to change."""


def _kebab(name: str) -> str:
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in name).lstrip("-")


class _Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do", tag=_kebab):
    """Carries the codec settings only. at: seconds from the start."""

    at: Time


class Xid(_Step, frozen=True, kw_only=True):
    """One XID. text: the part after the code, by default the driver's usual words."""

    gpu: Gpu
    code: Code
    text: Annotated[str, Meta(max_length=512)] = ""
    gi: Instance | None = None
    ci: Instance | None = None
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None


class DoubleBitError(_Step, frozen=True, kw_only=True):
    """An uncorrectable memory error: 48, then 63 (or 64 where no spare row is left), then 94 or 95."""

    gpu: Gpu
    contained: bool = True
    remapped: bool = True


class RemapPending(_Step, frozen=True, kw_only=True):
    """A row waits for the next reset to be replaced."""

    gpu: Gpu


class RemapFailed(_Step, frozen=True, kw_only=True):
    """No spare row is left."""

    gpu: Gpu


class OffTheBus(_Step, frozen=True, kw_only=True):
    """XID 79, and the GPU does not answer any more."""

    gpu: Gpu


class Lost(_Step, frozen=True, kw_only=True):
    """The GPU does not answer any more, and nothing is logged."""

    gpu: Gpu


class LinkDown(_Step, frozen=True, kw_only=True):
    """NVLinks go down."""

    gpu: Gpu
    links: Annotated[tuple[Annotated[int, Meta(ge=0, le=35)], ...], Meta(min_length=1)]


class SwitchError(_Step, frozen=True, kw_only=True):
    """An NVSwitch reports an error (SXid). switch: its number or PCI address. port: the number of its link; without
    it the error is one of the whole switch. A fatal one takes links down, and their GPUs report XID 74."""

    switch: Annotated[int, Meta(ge=0, le=63)] | Address
    code: Annotated[int, Meta(ge=10000, le=99999)]
    fatal: bool = True
    port: Annotated[int, Meta(ge=0, le=999)] | None = None
    text: Annotated[str, Meta(max_length=512)] = ""


class Fabric(_Step, frozen=True, kw_only=True):
    """The fabric registration or its health changes."""

    gpu: Gpu
    state: Literal["unsupported", "notStarted", "inProgress", "completed"] = "completed"
    faults: tuple[
        Literal["degraded-bandwidth", "route-recovery", "route-unhealthy", "access-timeout-recovery"], ...
    ] = ()


class Verdict(_Step, frozen=True, kw_only=True):
    """The driver's recovery action changes (XID 154). action: any but unknown, which no driver says."""

    gpu: Gpu
    action: RecoveryAction

    def __post_init__(self) -> None:
        if self.action is RecoveryAction.UNKNOWN:
            raise ValueError(f"no driver says {self.action}; an action is one of {', '.join(_RECOVERY)}")


class Storm(_Step, frozen=True, kw_only=True):
    """The same XID `count` times, spread evenly over so many seconds."""

    gpu: Gpu
    code: Code
    count: Annotated[int, Meta(ge=1, le=1_000_000)]
    seconds: Time


class DriverReload(_Step, frozen=True, kw_only=True):
    """The driver is unloaded and loaded again, perhaps in another version."""

    version: Annotated[str, Meta(pattern=r"^$|^[0-9]{3}(\.[0-9]{1,3}){1,2}$")] = ""


class DriverGone(_Step, frozen=True, kw_only=True):
    """The driver is unloaded."""


class Recover(_Step, frozen=True, kw_only=True):
    """A successful reset: the GPU answers, its counters and links are as new."""

    gpu: Gpu


Step = (
    Xid
    | DoubleBitError
    | RemapPending
    | RemapFailed
    | OffTheBus
    | Lost
    | LinkDown
    | SwitchError
    | Fabric
    | Verdict
    | Storm
    | DriverReload
    | DriverGone
    | Recover
)


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A script. expect: level of GPUs (by index) once hold-downs are over; those not named are healthy."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    description: Annotated[str, Meta(min_length=1, max_length=1024)]
    steps: Annotated[tuple[Step, ...], Meta(min_length=1, max_length=1000)]
    expect: dict[Annotated[int, Meta(ge=0, le=63)], Level] = {}

    @property
    def seconds(self) -> float:
        """From the start to the last fault."""
        return max(step.at + (step.seconds if isinstance(step, Storm) else 0) for step in self.steps)


@dataclass(frozen=True, order=True)
class TimedFault:
    """One fault for fake hardware, so many seconds from the start. `number` keeps the order of equal times."""

    at: float
    number: int
    fault: _FAULT


def parse_scenario(text: str, where: str = "scenario") -> Scenario:
    """A scenario from YAML text. Raises ScenarioError."""
    if len(text) > _MAX_BYTES:
        raise ScenarioError(f"{where}: larger than {_MAX_BYTES} bytes")
    try:
        return msgspec.convert(yaml.safe_load(text), Scenario, str_keys=True, strict=True)
    except (yaml.YAMLError, RecursionError) as error:
        raise ScenarioError(f"{where}: not YAML: {error}") from error
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{where}: {error}") from error


def load_scenario(name_or_path: str | Path) -> Scenario:
    """A scenario by name, or from a file (anything with a slash or ending in .yaml). Raises ScenarioError."""
    text = str(name_or_path)
    path = Path(name_or_path)
    if not ("/" in text or text.endswith((".yaml", ".yml"))):
        if text not in scenario_names():
            raise ScenarioError(f"no scenario is called {text[:64]!r}; there are: {', '.join(scenario_names())}")
        path = _directory() / f"{text}.yaml"
    try:
        return parse_scenario(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: cannot be read: {why(error)}") from error


def scenario_names() -> tuple[str, ...]:
    """Names of the scenarios that come with this package."""
    return tuple(sorted(path.stem for path in _directory().glob("*.yaml")))


def expand(scenario: Scenario, gpus: int) -> Iterator[TimedFault]:
    """The faults of a scenario for a machine with so many GPUs, in order of time. Lazy: storms can be large.

    Devices are NVML indices. Raises ScenarioError for a GPU that the machine does not have.
    """
    streams = []
    for number, step in enumerate(scenario.steps):
        index = getattr(step, "gpu", None)
        if isinstance(index, int) and index >= gpus:
            raise ScenarioError(f"{scenario.name}: step {number + 1} is about GPU {index}, the machine has {gpus}")
        for gpu in range(gpus) if index == "all" else (index,):
            streams.append(_timed(step, number, "" if gpu is None else str(gpu)))
    return heapq.merge(*streams, key=lambda timed: (timed.at, timed.number))


def _timed(step: Step, number: int, gpu: str) -> Iterator[TimedFault]:
    if isinstance(step, Storm):
        for count in range(step.count):
            at = step.at + step.seconds * count / step.count
            yield TimedFault(at, number, {"kind": "xid", "device": gpu, "code": step.code})
        return
    for fault in _faults(step):
        device: _FAULT = {"device": gpu} if gpu else {}
        yield TimedFault(step.at, number, {**fault, **device})


def _faults(step: Step) -> list[_FAULT]:
    """A step, the storm excepted, as faults of fake hardware, without their device."""
    match step:
        case Xid():
            given: dict[str, Any] = {"text": step.text or None, "gi": step.gi, "ci": step.ci, "pid": step.pid}
            return [{"kind": "xid", "code": step.code, **{k: v for k, v in given.items() if v is not None}}]
        case DoubleBitError():
            codes = (48, 63 if step.remapped else 64, 94 if step.contained else 95)
            return [{"kind": "xid", "code": code} for code in codes]
        case RemapFailed():
            return [{"kind": "xid", "code": 64}]
        case OffTheBus():
            return [{"kind": "xid", "code": 79}]
        case LinkDown():
            return [{"kind": "linkdown", "link": link} for link in step.links]
        case SwitchError():
            given = {"switch": str(step.switch), "fatal": step.fatal, "port": step.port, "text": step.text or None}
            return [{"kind": "switcherror", "code": step.code, **{k: v for k, v in given.items() if v is not None}}]
        case Fabric():
            mask = sum(1 << _FABRIC_SHIFT[fault] for fault in step.faults)
            summary = 2 if step.faults else 1
            return [{"kind": "fabricchange", "state": _FABRIC_STATE[step.state], "summary": summary, "mask": mask}]
        case Verdict():
            return [{"kind": "recoverychange", "action": _RECOVERY.index(step.action)}]
        case DriverReload():
            return [{"kind": "driverreload", "version": step.version}]
        case _:
            return [{"kind": type(step).__name__.lower()}]


def _directory() -> Path:
    """In the installed package, or in the checkout this (editable) package is imported from."""
    installed = Path(str(resources.files("gpunode"))) / "data" / "fake_gpus" / "faults"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "fake_gpus" / "faults"
