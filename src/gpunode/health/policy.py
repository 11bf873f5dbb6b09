"""What an administrator can set about health, with defaults that suit a shared training cluster."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import yaml
from msgspec import Meta

from gpunode.model.health import Dimension, Level

Effect = Literal["None", "NoSchedule", "NoExecute"]
_MAX_BYTES = 1 << 20
_CLASSES = ("application", "ignore", "reset", "workflow", "host")
_DEFAULT_EFFECTS: dict[Level, Effect] = {
    Level.HEALTHY: "None",
    Level.DEGRADED: "None",
    Level.UNHEALTHY: "NoSchedule",
}

Seconds = Annotated[float, Meta(ge=0, le=30 * 86400)]


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
    levels: dict[str, Level] = {}

    def effect(self, dimension: Dimension, code: str, level: Level, xid_class: str = "") -> Effect:
        """The taint effect of a fault. `xid_class` is "" for what is no XID."""
        for key in (f"{dimension}/{code}", xid_class, dimension, level):
            if key in self.effects:
                return self.effects[key]
        return _DEFAULT_EFFECTS[level]

    def level(self, dimension: Dimension, code: str, level: Level) -> Level:
        """The level of a fault whose own level is `level`."""
        return self.levels.get(f"{dimension}/{code}") or self.levels.get(dimension) or level


def parse_policy(text: str, where: str = "policy") -> Policy:
    """Policy from YAML text; an empty text is the default policy.

    Raises PolicyError for text that is not YAML, an unknown field, a value out of range, or a key of `effects` or
    `levels` that names nothing.
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
    _check_keys(policy.levels, tuple(Dimension), f"{where}: levels")
    return policy


def _check_keys(given: dict[str, Effect] | dict[str, Level], plain: tuple[str, ...], where: str) -> None:
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
        raise PolicyError(f"{path}: cannot be read: {error}") from error
