"""Details of NVLink and NVSwitch errors: from the words of a kernel log line to what has to be done."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gpunode.health.catalogue import shipped
from gpunode.model.health import Action

# The first driver branch whose IntrInfo has the newer layout.
_NEW_LAYOUT = 575
_NVLINK5 = re.compile(
    r"(?a)([A-Z][A-Z0-9_]{1,31}(?:/[A-Z0-9_]{1,32})?) (Fatal|Nonfatal) (?:XC([01]) )?(?:i\d{1,3} )?"
    r"Link (-?\d{1,3}) \(0x([0-9a-fA-F]{1,8}) 0x([0-9a-fA-F]{1,8})[ )]"
)
_NVLINK4 = re.compile(r"(?a)on link (\d{1,3}) ?\(((?:0x[0-9a-fA-F]{1,8}(?:, ?|\))){7})")
_CHOICE = {"none": Action.NONE, "reset-gpu": Action.RESET_GPU, "verdict": Action.RESTART_APP}
_ORDER = (Action.NONE, Action.RESTART_APP, Action.INSPECT, Action.RESET_GPU)

Bit = Annotated[int, Meta(ge=0, le=31)]
Word = Annotated[int, Meta(ge=0, lt=1 << 32)]
Choice = Literal["none", "reset-gpu", "verdict"]


class LinkRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row about XID 144 to 150; data/nvlink.yaml explains the fields."""

    xid: Annotated[int, Meta(ge=144, le=150)]
    unit: tuple[str, ...]
    v1: Bit
    v2: Annotated[int, Meta(ge=0, le=127)]
    cause: Annotated[int, Meta(ge=0, le=63)]
    status: tuple[Word, ...]
    action: Choice
    severity: Literal["fatal", "non-fatal", "link-fatal"]
    advice: str
    promoted: Choice | None = None


class LinkBits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What some bits of one of XID 74's words mean."""

    word: Annotated[int, Meta(ge=1, le=7)]
    kind: Literal["ecc", "hardware", "signal", "repeat", "diagnose", "follows", "fabric", "ignore", "threshold"]
    bits: tuple[Bit, ...]


class LinkTables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Both NVLink tables."""

    nvlink5: tuple[LinkRow, ...]
    nvlink4: tuple[LinkBits, ...]


class SxidClass(StrEnum):
    """What an NVSwitch error means for the GPUs behind it; data/sxid.yaml explains each."""

    ALWAYS_FATAL = "always-fatal"
    FATAL = "fatal"
    HOST = "host"
    NOTE = "note"


@dataclass(frozen=True)
class Details:
    """What the words say. `text` is for people; `link` is -1 where the error is not of one link.

    repeated: the action once the same has been seen on the same link three times; None: repetition means nothing.
    """

    action: Action
    text: str
    link: int = -1
    repeated: Action | None = None


@cache
def link_tables() -> LinkTables:
    """The tables shipped with this package."""
    return msgspec.convert(shipped("nvlink.yaml"), LinkTables)


@cache
def sxid_classes() -> dict[int, SxidClass]:
    """Class by code, for the codes that are more than a note."""
    table = msgspec.convert(shipped("sxid.yaml"), dict[SxidClass, tuple[int, ...]])
    return {code: kind for kind, codes in table.items() for code in codes}


def sxid_class(code: int, *, fatal: bool) -> SxidClass:
    """Class of an NVSwitch error whose line says Fatal or not."""
    known = sxid_classes().get(code, SxidClass.NOTE)
    if known in (SxidClass.ALWAYS_FATAL, SxidClass.HOST) and (fatal or known is SxidClass.ALWAYS_FATAL):
        return SxidClass.ALWAYS_FATAL
    if fatal:
        return SxidClass.FATAL
    return SxidClass.HOST if known is SxidClass.HOST else SxidClass.NOTE


def nvlink5(xid: int, text: str, driver_branch: int | None) -> Details | None:
    """Details of an XID 144 to 150; None for text in another form.

    driver_branch: e.g. 580; None: unknown, so both layouts of IntrInfo are tried and the worse meaning is taken.
    An error that is in no row is judged by the line's own word: a fatal one needs a reset.
    """
    match = _NVLINK5.match(text[:512])
    if match is None:
        return None
    unit, severity, contained, link = match[1], match[2], match[3], int(match[4])
    info, status = int(match[5], 16), int(match[6], 16)
    rows = [row for row in link_tables().nvlink5 if row.xid == xid and _matches(row, unit, info, driver_branch)]
    said = _by_status(rows, status)
    actions = [_action(row, info, driver_branch) for row in said]
    where = f"{unit} on link {link}" if link >= 0 else unit
    if not actions:
        action = Action.RESET_GPU if severity == "Fatal" else Action.NONE
        return Details(action, f"{where}, {severity.lower()}, not in the tables", link)
    worst = max(said, key=lambda row: _ORDER.index(_action(row, info, driver_branch)))
    advice = "" if worst.advice == "none" else f", look into: {worst.advice}"
    kept = ", the link goes on" if contained == "1" else ""
    return Details(max(actions, key=_ORDER.index), f"{where}, {worst.severity}{kept}{advice}", link)


def _matches(row: LinkRow, unit: str, info: int, branch: int | None) -> bool:
    if row.cause != info >> 20 & 0x3F or not set(unit.split("/")) & set(row.unit):
        return False
    old, new = row.v1 == info >> 5 & 0x1F, row.v2 == info & 0x7F
    if branch is None:
        return old or new
    return new if branch >= _NEW_LAYOUT else old


def _by_status(rows: Iterable[LinkRow], status: int) -> list[LinkRow]:
    """Rows of exactly this status, or of any; else, as each bit is an error of its own, the rows of its bits."""
    rows = list(rows)
    exact = [row for row in rows if not row.status or status in row.status]
    return exact or [row for row in rows if any(s & status and s.bit_count() == 1 for s in row.status)]


def _action(row: LinkRow, info: int, branch: int | None) -> Action:
    bits = 1 << 7 | 1 << 10 if branch is None else 1 << (7 if branch >= _NEW_LAYOUT else 10)
    if row.promoted is not None and info & bits:
        return _CHOICE[row.promoted]
    return _CHOICE[row.action]


_KINDS: dict[str, tuple[Action, Action | None, str]] = {
    "ecc": (Action.NONE, Action.RESET_GPU, "memory error in the link"),
    "hardware": (Action.RESET_GPU, None, "the link's hardware or its connection"),
    "signal": (Action.INSPECT, None, "signal integrity"),
    "repeat": (Action.NONE, Action.INSPECT, "a single event that matters when it repeats"),
    "diagnose": (Action.INSPECT, None, "diagnostics are needed"),
    "follows": (Action.NONE, None, "comes from an error elsewhere"),
    "fabric": (Action.RESET_GPU, None, "comes from an error elsewhere and needs the fabric reset"),
    "ignore": (Action.NONE, None, "harmless"),
    "threshold": (Action.NONE, None, "an error count passed its threshold"),
    "unknown": (Action.RESET_GPU, None, "bits that are in no table"),
}


def nvlink4(text: str) -> Details | None:
    """Details of an XID 74; None for text in another form, or words that say nothing."""
    match = _NVLINK4.search(text[:512])
    if match is None:
        return None
    words = [int(word, 16) for word in re.findall(r"0x([0-9a-fA-F]+)", match[2])]
    kinds = {kind for index in (1, 3, 4, 5) for kind in _kinds(index, words[index - 1])}
    if not kinds:
        return None
    meanings = sorted((_KINDS[kind] for kind in kinds), key=lambda kind: -_ORDER.index(kind[0]))
    again = [meaning[1] for meaning in meanings if meaning[1] is not None]
    link = int(match[1])
    text = f"link {link}, " + ", ".join(meaning[2] for meaning in meanings)
    return Details(meanings[0][0], text, link, max(again, key=_ORDER.index, default=None))


def _kinds(index: int, word: int) -> set[str]:
    """Kinds of the bits that are set in one word; words 2, 6 and 7 carry no verdict."""
    named = {bit: row.kind for row in link_tables().nvlink4 if row.word == index for bit in row.bits}
    return {named.get(bit, "unknown") for bit in range(32) if word >> bit & 1}
