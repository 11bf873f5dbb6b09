"""What an administrator can set about health, with defaults that suit a shared training cluster."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import yaml
from msgspec import Meta

from gpunode.model.grace import AT_ONCE, FOREVER, MAX_GRACE_S
from gpunode.model.health import Dimension, Level
from gpunode.model.wording import why

Effect = Literal["None", "NoSchedule", "NoExecute"]
_MAX_BYTES = 1 << 20
_CLASSES = ("application", "ignore", "reset", "workflow", "host")
_DEFAULT_EFFECTS: dict[Level, Effect] = {
    Level.HEALTHY: "None",
    Level.DEGRADED: "None",
    Level.UNHEALTHY: "NoSchedule",
}

Seconds = Annotated[float, Meta(ge=0, le=30 * 86400)]
Grace = Annotated[int, Meta(ge=0, le=MAX_GRACE_S)] | Literal["forever"]
T = TypeVar("T")


class PolicyError(ValueError):
    """A policy file is wrong; the text says where and what to change."""


def _rename(field: str) -> str:
    head, *rest = field.removesuffix("_s").split("_")
    return head + "".join(part.capitalize() for part in rest) + ("Seconds" if field.endswith("_s") else "")


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename=_rename):
    """Times in seconds; in the file `hold_down_s` is written holdDownSeconds.

    hold_down_s: how long a fault's end must last before the device returns; doubled for each return to fault
    within flap_window_s, at most hold_down_max_s.
    repeat_count: so many different processes on one GPU make XID 13 or 31 a matter for the board (for 13 in the
    same GPC and TPC), not the program.
    prepare_failures: so many failed preparations in a row take a device out, for prepare_retry_s.
    remind_s: a harmless code that goes on is told about again after this time.
    effects: taint effect by "<dimension>/<code>", XID class, dimension or level, the first of these that is given.
    gang_grace_s: for how long after its beginning a fault moves no gang, by the same keys; "forever": it never does.
    levels: level of a fault by "<dimension>/<code>" or dimension. An XID that the catalogue calls harmless is
    made a fault in the catalogue, by giving it another action, not here.
    """

    hold_down_s: Seconds = 30.0
    hold_down_max_s: Seconds = 3600.0
    flap_window_s: Seconds = 86400.0
    repeat_count: Annotated[int, Meta(ge=2, le=16)] = 3
    prepare_failures: Annotated[int, Meta(ge=1, le=1000)] = 3
    prepare_retry_s: Seconds = 600.0
    remind_s: Seconds = 3600.0
    effects: dict[str, Effect] = {}
    gang_grace_s: dict[str, Grace] = {}
    levels: dict[str, Level] = {}

    def effect(self, dimension: Dimension, code: str, level: Level, xid_class: str = "") -> Effect:
        """The taint effect of a fault. `xid_class` is "" for what is no XID."""
        return _first(self.effects, _keys(dimension, code, level, xid_class)) or _DEFAULT_EFFECTS[level]

    def gang_grace(self, dimension: Dimension, code: str, level: Level, xid_class: str = "") -> int | None:
        """Seconds for which gangs may stay; None for ever. With another effect than NoSchedule there is no grace:
        None moves nobody anyway, and for NoExecute Kubernetes itself evicts the pods."""
        if self.effect(dimension, code, level, xid_class) != "NoSchedule":
            return AT_ONCE
        given = _first(self.gang_grace_s, _keys(dimension, code, level, xid_class)) or AT_ONCE
        return FOREVER if given == "forever" else given

    def level(self, dimension: Dimension, code: str, level: Level) -> Level:
        """The level of a fault whose own level is `level`."""
        return self.levels.get(f"{dimension}/{code}") or self.levels.get(dimension) or level


def _keys(dimension: str, code: str, level: str, xid_class: str) -> tuple[str, str, str, str]:
    """The keys of a fault, the most exact first."""
    return f"{dimension}/{code}", xid_class, dimension, level


def _first(given: Mapping[str, T], keys: Iterable[str]) -> T | None:
    return next((given[key] for key in keys if key in given), None)


def parse_policy(text: str, where: str = "policy") -> Policy:
    """Policy from YAML text; an empty text is the default policy.

    Raises PolicyError for text that is not YAML, an unknown field, a value out of range, a key of `effects`,
    `gangGraceSeconds` or `levels` that names nothing, or a grace for faults that get NoExecute.
    """
    if len(text) > _MAX_BYTES:
        raise PolicyError(f"{where}: larger than {_MAX_BYTES} bytes")
    try:
        policy = msgspec.convert(yaml.safe_load(text) or {}, Policy)
    except (yaml.YAMLError, RecursionError) as error:
        raise PolicyError(f"{where}: not YAML: {error}") from error
    except msgspec.ValidationError as error:
        raise PolicyError(f"{where}: {error}") from error
    _check_keys(policy.effects, (*_CLASSES, *Dimension, *Level), f"{where}: effects")
    _check_keys(policy.gang_grace_s, (*_CLASSES, *Dimension, *Level), f"{where}: gangGraceSeconds")
    _check_keys(policy.levels, tuple(Dimension), f"{where}: levels")
    _check_grace(policy, f"{where}: gangGraceSeconds")
    return policy


def _check_grace(policy: Policy, where: str) -> None:
    """Refuse a grace for what is evicted at once, as far as the file alone shows it: of which class a code is stands
    in the catalogue, so a code that some class exempts is let pass (and gets no grace)."""
    codes = [key.partition("/") for key in (*policy.effects, *policy.gang_grace_s) if "/" in key]
    for dimension in Dimension:
        classes = ("", *_CLASSES) if dimension is Dimension.XID else ("",)
        for level in (Level.UNHEALTHY, Level.DEGRADED):
            found = [_clash(policy, dimension, "", level, class_) for class_ in classes]
            for code in (code for head, _, code in codes if head == dimension):
                exact = [_clash(policy, dimension, code, level, class_) for class_ in classes]
                found.append(exact[0] if all(exact) else "")
            if clash := next(filter(None, found), ""):
                raise PolicyError(f"{where}: {clash}")


def _clash(policy: Policy, dimension: Dimension, code: str, level: Level, xid_class: str) -> str:
    """What is wrong with a fault's grace, or ""."""
    keys = _keys(dimension, code, level, xid_class)
    if policy.effect(dimension, code, level, xid_class) != "NoExecute" or not _first(policy.gang_grace_s, keys):
        return ""
    grace = next(key for key in keys if key in policy.gang_grace_s)
    effect = next(key for key in keys if key in policy.effects)
    return (
        f"'{grace}' gives a grace to faults that '{effect}' of effects gives NoExecute, so that Kubernetes evicts "
        "their pods at once; give them NoSchedule, or the grace 0, by a more exact key"
    )


def _check_keys(given: Mapping[str, object], plain: tuple[str, ...], where: str) -> None:
    dimensions = [str(dimension) for dimension in Dimension]
    for key in given:
        dimension, slash, code = key.partition("/")
        if key not in plain and not (slash and code and dimension in dimensions):
            known = ", ".join(str(name) for name in plain)
            raise PolicyError(f"{where}: {key!r} names nothing; use <dimension>/<code> or one of: {known}")


def load_policy(path: Path | None = None) -> Policy:
    """The policy of a file, or the default one. Raises PolicyError (also for a file that cannot be read)."""
    if path is None:
        return Policy()
    try:
        return parse_policy(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path}: cannot be read: {why(error)}") from error
