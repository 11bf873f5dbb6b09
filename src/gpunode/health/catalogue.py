"""The XID catalogue: what each code of the NVIDIA driver means and asks for, as data."""

from enum import StrEnum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from gpunode.model.health import Action, Clear, Level
from gpunode.model.wording import why

_MAX_BYTES = 1 << 20
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

LEVEL_OF_ACTION: dict[Action, Level] = {
    Action.NONE: Level.HEALTHY,
    Action.RESTART_APP: Level.HEALTHY,
    Action.INSPECT: Level.DEGRADED,
    Action.DRAIN: Level.UNHEALTHY,
    Action.RESET_GPU: Level.UNHEALTHY,
    Action.RESTART_HOST: Level.UNHEALTHY,
}


class CatalogueError(ValueError):
    """A catalogue file is wrong; the text says where and what to change."""


class XidClass(StrEnum):
    """Who has to act on a code; data/xid.yaml explains each."""

    APPLICATION = "application"
    IGNORE = "ignore"
    RESET = "reset"
    WORKFLOW = "workflow"
    HOST = "host"


class XidEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"class_": "class"}):
    """One code. `follows_154`: driver branch from which an XID 154 follows it (0 always, None never)."""

    code: int
    mnemonic: str
    class_: XidClass
    action: Action
    meaning: str
    source: Literal["catalogue", "driver", "judgement", "override"] = "override"
    architectures: tuple[Literal["ampere", "hopper", "blackwell", "grace-blackwell"], ...] = ()
    follows_154: int | None = None

    @property
    def level(self) -> Level:
        """How bad the code is when nothing but its number is known."""
        return LEVEL_OF_ACTION[self.action]

    @property
    def clears(self) -> frozenset[Clear]:
        """A reboot and a successful reset end every XID; the driver's verdict only those it speaks about."""
        verdict = {Clear.VERDICT} if self.follows_154 is not None else set()
        return frozenset({Clear.REBOOT, Clear.RESET} | verdict)


class Override(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"class_": "class"}):
    """A user's change of one code: only the given fields change."""

    code: int
    class_: XidClass | None = None
    action: Action | None = None
    meaning: str | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    xids: tuple[XidEntry, ...]


class _OverrideFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    xids: tuple[Override, ...]


class Catalogue(msgspec.Struct, frozen=True):
    """All codes, keyed by number, without gaps from 1 on."""

    xids: dict[int, XidEntry]

    def of(self, code: int) -> XidEntry:
        """The entry of a code; a number that no catalogue knows asks for inspection, never for silence."""
        return self.xids.get(code) or XidEntry(
            code=code,
            mnemonic=f"UNKNOWN_{code}",
            class_=XidClass.HOST,
            action=Action.INSPECT,
            meaning="code unknown to this version",
            source="judgement",
        )


def shipped(name: str) -> object:
    """Content of one of this package's own data files."""
    text = resources.files("gpunode.health").joinpath("data", name).read_text("utf-8")
    return yaml.load(text, Loader=_LOADER)  # noqa: S506 - the C form of the safe loader


def _parse(text: str, where: str) -> Any:
    if len(text) > _MAX_BYTES:
        raise CatalogueError(f"{where}: larger than {_MAX_BYTES} bytes; a catalogue is a few tens of kilobytes")
    try:
        return yaml.load(text, Loader=_LOADER)  # noqa: S506 - the C form of the safe loader
    except (yaml.YAMLError, RecursionError) as error:
        raise CatalogueError(f"{where}: not YAML: {error}") from error


def _unique(codes: list[int], where: str) -> None:
    twice = sorted({code for code in codes if codes.count(code) > 1})
    if twice:
        raise CatalogueError(f"{where}: code {twice[0]} is listed more than once; keep one entry a code")


def parse_catalogue(text: str, where: str = "catalogue") -> Catalogue:
    """Catalogue from YAML text.

    Raises CatalogueError for text that is not YAML, an unknown field, class or action, a code listed twice, or
    a gap in the numbering (a gap is how a forgotten code would look).
    """
    try:
        entries = msgspec.convert(_parse(text, where), _File).xids
    except msgspec.ValidationError as error:
        raise CatalogueError(f"{where}: {error}") from error
    codes = [entry.code for entry in entries]
    _unique(codes, where)
    missing = sorted(set(range(1, max(codes, default=0) + 1)) - set(codes))
    if missing or not codes or min(codes) < 1:
        raise CatalogueError(f"{where}: codes must run from 1 without gaps; missing: {missing[:10] or 'all'}")
    return Catalogue({entry.code: entry for entry in entries})


def parse_overrides(text: str, base: Catalogue, where: str = "overrides") -> Catalogue:
    """`base` with a user's changes applied; codes beyond the catalogue may be added if class, action and meaning
    are all given.

    Raises CatalogueError as parse_catalogue does, gaps excepted.
    """
    try:
        changes = msgspec.convert(_parse(text, where), _OverrideFile).xids
    except msgspec.ValidationError as error:
        raise CatalogueError(f"{where}: {error}") from error
    _unique([change.code for change in changes], where)
    return Catalogue({**base.xids, **{c.code: _overridden(c, base, where) for c in changes}})


def _overridden(change: Override, base: Catalogue, where: str) -> XidEntry:
    known = base.xids.get(change.code)
    if known is None:
        if change.class_ is None or change.action is None or change.meaning is None:
            raise CatalogueError(f"{where}: code {change.code} is new, so give its class, action and meaning")
        known = base.of(change.code)
    return msgspec.structs.replace(
        known,
        class_=change.class_ or known.class_,
        action=change.action or known.action,
        meaning=change.meaning or known.meaning,
        source="override",
    )


@cache
def builtin_catalogue() -> Catalogue:
    """The catalogue shipped with this package."""
    return parse_catalogue(resources.files("gpunode.health").joinpath("data/xid.yaml").read_text("utf-8"), "xid.yaml")


def load_catalogue(overrides: Path | None = None) -> Catalogue:
    """The shipped catalogue, with the user's override file applied where one is given.

    Raises CatalogueError (also for a file that cannot be read).
    """
    if overrides is None:
        return builtin_catalogue()
    try:
        text = overrides.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogueError(f"{overrides}: cannot be read: {why(error)}") from error
    return parse_overrides(text, builtin_catalogue(), str(overrides))
