"""Board profiles: YAML descriptions of GPU machines that the fake turns into an NVML and a sysfs tree.

A profile may build on another one (`extends:`): mappings merge, everything else is replaced.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from gpunode.datafiles import data_dir
from gpunode.model.wording import why

_MAX_FILE = 64 * 1024
_MAX_PARENTS = 8
# Deeper brackets than any profile has; the YAML scanner's time grows with the square of their depth.
_MAX_BRACKETS = 16
_LIST_FIELDS = ("gpus", "nics", "switches", "migProfiles")

PciText = Annotated[str, Meta(pattern=r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")]
RootText = Annotated[str, Meta(pattern=r"^pci[0-9a-f]{4,8}:[0-9a-f]{2}$")]
Numa = Annotated[int, Meta(ge=-1, le=1023)]


class BoardStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base that only carries the codec settings: camelCase, and a field nobody knows is an error."""


class BoardGpu(BoardStruct, frozen=True, kw_only=True):
    """One GPU. deadLinks: indices of NVLinks that are down. peers: indices of GPUs its links go to directly."""

    pci: PciText
    numa: Numa = -1
    root: RootText | None = None
    dead_links: tuple[int, ...] = ()
    peers: tuple[int, ...] = ()


class BoardNic(BoardStruct, frozen=True, kw_only=True):
    """One network function; rdma: name of its RDMA device."""

    pci: PciText
    numa: Numa = -1
    root: RootText | None = None
    rdma: Annotated[str, Meta(pattern=r"^[a-z0-9_-]{0,32}$")] = ""


class NvLinks(BoardStruct, frozen=True, kw_only=True):
    """NVLinks of each GPU. to: what they end at; peer links are spread evenly over a GPU's `peers`."""

    links: Annotated[int, Meta(ge=0, le=36)] = 0
    version: Annotated[int, Meta(ge=0, le=7)] = 0
    to: Literal["switch", "peer"] = "switch"


class BoardSwitch(BoardStruct, frozen=True, kw_only=True):
    """An NVSwitch that is a PCI function of the host. links: how many each GPU has to it.

    A GPU's links go to the switches in their order; a switch's ports are the GPUs' links in the order of the GPUs.
    """

    pci: PciText
    links: Annotated[int, Meta(ge=1, le=36)]


class BoardFabric(BoardStruct, frozen=True, kw_only=True):
    """Fabric registration. clusterUuid: "" for all zeros. cliques: clique ids, given out to trays in equal runs.

    trays: how many nodes make up the NVLink domain; a node's tray is the number at the end of its name.
    """

    state: Literal["unsupported", "notStarted", "inProgress", "completed"] = "unsupported"
    cluster_uuid: Annotated[str, Meta(pattern=r"^$|^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")] = ""
    cliques: Annotated[tuple[int, ...], Meta(min_length=1)] = (0,)
    trays: Annotated[int, Meta(ge=1, le=1024)] = 1


class BoardMigProfile(BoardStruct, frozen=True, kw_only=True):
    """A GPU instance profile. id: the driver's profile id; number: NVML's; starts: legal first memory slices."""

    name: Annotated[str, Meta(pattern=r"^[1-8]g\.[0-9]{1,3}gb(\+[a-z.]{1,8})?$")]
    id: Annotated[int, Meta(ge=0, le=255)]
    number: Annotated[int, Meta(ge=0, le=17)]
    slices: Annotated[int, Meta(ge=1, le=8)]
    starts: Annotated[tuple[int, ...], Meta(min_length=1)]
    size: Annotated[int, Meta(ge=1, le=8)]
    memory_mib: Annotated[int, Meta(ge=1)] = msgspec.field(name="memoryMiB")
    multiprocessors: Annotated[int, Meta(ge=1)]
    copy_engines: Annotated[int, Meta(ge=0)] = 0
    decoders: Annotated[int, Meta(ge=0)] = 0
    encoders: Annotated[int, Meta(ge=0)] = 0
    jpeg_engines: Annotated[int, Meta(ge=0)] = 0
    ofa_engines: Annotated[int, Meta(ge=0)] = 0


class Board(BoardStruct, frozen=True, kw_only=True):
    """A machine model. unknown: names of fields whose figures are estimates, not seen on hardware."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$")]
    product: Annotated[str, Meta(min_length=1, max_length=96)]
    brand: Literal["Nvidia", "Tesla", "Quadro", "NvidiaRTX", "GeForce"] = "Nvidia"
    architecture: Literal["Volta", "Turing", "Ampere", "Ada Lovelace", "Hopper", "Blackwell"]
    compute_capability: Annotated[str, Meta(pattern=r"^[0-9]{1,2}\.[0-9]$")]
    multiprocessors: Annotated[int, Meta(ge=1, le=1024)]
    memory_mib: Annotated[int, Meta(ge=0, le=1 << 24)] = msgspec.field(name="memoryMiB")
    pci_device_id: Annotated[str, Meta(pattern=r"^0x[0-9A-Fa-f]{8}$")]
    driver_version: Annotated[str, Meta(pattern=r"^[0-9]{3}(\.[0-9]{1,3}){1,2}$")]
    cuda_version: Annotated[str, Meta(pattern=r"^[0-9]{1,2}\.[0-9]$")]
    nvlink: NvLinks = NvLinks()
    fabric: BoardFabric = BoardFabric()
    mig_profiles: tuple[BoardMigProfile, ...] = ()
    gpus: tuple[BoardGpu, ...] = ()
    nics: tuple[BoardNic, ...] = ()
    switches: tuple[BoardSwitch, ...] = ()
    unknown: tuple[str, ...] = ()


class BoardError(ValueError):
    """A profile that cannot be used; the text names file, line and field."""


def board_names() -> tuple[str, ...]:
    """Names of the profiles that come with this package."""
    return tuple(sorted(p.stem for p in boards_directory().glob("*.yaml")))


def load_board(name_or_path: str | Path) -> Board:
    """A profile by name, or from a file (anything with a slash or ending in .yaml). Raises BoardError."""
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith((".yaml", ".yml")):
        return _load(Path(name_or_path))
    if text not in board_names():
        raise BoardError(f"no board profile {text!r}; there are: {', '.join(board_names())}")
    return _load(boards_directory() / f"{text}.yaml")


def boards_directory() -> Path:
    """Where the profiles lie that come with this package."""
    return data_dir("fake_gpus") / "boards"


def _load(path: Path) -> Board:
    merged: dict[str, Any] = {}
    files = list(_chain(path))
    for _, root in reversed(files):
        merged = _merge(merged, {k: v for k, v in _plain(root).items() if k != "extends"})
    try:
        board = _convert(merged)
        _check(board)
    except _FieldError as error:
        where, line = _locate(files, error.path)
        raise BoardError(f"{where}:{line}: {_dotted(error.path)}: {error.reason}") from None
    return board


class _FieldError(Exception):
    def __init__(self, path: tuple[str | int, ...], reason: str) -> None:
        self.path = path
        self.reason = reason


def _chain(path: Path) -> Iterator[tuple[Path, yaml.MappingNode]]:
    """The file and those it extends, child first."""
    seen: set[Path] = set()
    while True:
        if path.resolve() in seen or len(seen) >= _MAX_PARENTS:
            raise BoardError(f"{path}: extends goes in a circle or deeper than {_MAX_PARENTS}")
        seen.add(path.resolve())
        root = _compose(path)
        yield path, root
        parent = _plain(root).get("extends")
        if parent is None:
            return
        if not isinstance(parent, str) or not re.fullmatch(r"[a-z0-9-]{1,40}", parent):
            raise BoardError(f"{path}:{_locate([(path, root)], ('extends',))[1]}: extends: not a profile name")
        beside = path.parent / f"{parent}.yaml"
        path = beside if beside.exists() else boards_directory() / f"{parent}.yaml"


def _compose(path: Path) -> yaml.MappingNode:
    try:
        if path.stat().st_size > _MAX_FILE:
            raise BoardError(f"{path}: larger than {_MAX_FILE} bytes")
        text = path.read_text(encoding="utf-8")
        if _bracket_depth(text) > _MAX_BRACKETS:
            raise BoardError(f"{path}: nested too deeply")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise BoardError(f"{path}: profiles use no YAML aliases (*name); write the values out")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise BoardError(f"{path}: cannot be read: {why(error)}") from error
    except yaml.YAMLError as error:
        raise BoardError(f"{path}: not YAML: {error}") from error
    if not isinstance(root, yaml.MappingNode):
        raise BoardError(f"{path}:1: a profile is a mapping of fields")
    return root


def _bracket_depth(text: str) -> int:
    """Also counts brackets in quoted text, where a profile has none."""
    depths = itertools.accumulate((c in "[{") - (c in "]}") for c in text)
    return max(depths, default=0)


def _plain(node: yaml.MappingNode) -> dict[str, Any]:
    constructor = yaml.SafeLoader("")
    value: dict[str, Any] = constructor.construct_document(node)
    return value


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _convert(raw: dict[str, Any]) -> Board:
    """List items one by one, since msgspec names the field of a bad item but not its position."""
    items: dict[str, Any] = {}
    types: dict[str, type[Any]] = {
        "gpus": BoardGpu,
        "nics": BoardNic,
        "switches": BoardSwitch,
        "migProfiles": BoardMigProfile,
    }
    for field in _LIST_FIELDS:
        values = raw.get(field) or []
        if not isinstance(values, list):
            raise _FieldError((field,), "must be a list")
        items[field] = [_one(value, types[field], (field, i)) for i, value in enumerate(values)]
    board: Board = _one({k: v for k, v in raw.items() if k not in _LIST_FIELDS}, Board, ())
    return msgspec.structs.replace(
        board,
        gpus=tuple(items["gpus"]),
        nics=tuple(items["nics"]),
        switches=tuple(items["switches"]),
        mig_profiles=tuple(items["migProfiles"]),
    )


def _one(value: Any, type_: type[Any], prefix: tuple[str | int, ...]) -> Any:
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$")
        path = tuple(p for p in where.rstrip("`").strip(".").split(".") if p and p != "[...]")
        named = re.search(r"unknown field `(\w+)`", reason)
        raise _FieldError((*prefix, *path, *([named[1]] if named else [])), reason) from None


def _check(board: Board) -> None:
    """What the types cannot say: addresses are unique, links and peers exist, links are as many as switches take."""
    seen: set[str] = set()
    addresses = [("gpus", i, g.pci) for i, g in enumerate(board.gpus)]
    addresses += [("nics", i, n.pci) for i, n in enumerate(board.nics)]
    addresses += [("switches", i, s.pci) for i, s in enumerate(board.switches)]
    for field, i, pci in addresses:
        if pci in seen:
            raise _FieldError((field, i, "pci"), f"{pci} is used twice")
        seen.add(pci)
    taken = sum(s.links for s in board.switches)
    if board.switches and (board.nvlink.to, board.nvlink.links) != ("switch", taken):
        reason = f"the board's switches take {taken} links of each GPU, all of them (a board without has switches: [])"
        raise _FieldError(("nvlink", "links"), reason)
    for i, gpu in enumerate(board.gpus):
        if any(not 0 <= link < board.nvlink.links for link in gpu.dead_links):
            raise _FieldError(("gpus", i, "deadLinks"), f"this board's links are 0 to {board.nvlink.links - 1}")
        if any(not 0 <= peer < len(board.gpus) or peer == i for peer in gpu.peers):
            raise _FieldError(("gpus", i, "peers"), "each must be the index of another GPU of this board")
    for i, profile in enumerate(board.mig_profiles):
        if any(start < 0 or start + profile.size > 8 for start in profile.starts):
            raise _FieldError(("migProfiles", i, "starts"), "a placement must lie within the 8 memory slices")


def _locate(files: list[tuple[Path, yaml.MappingNode]], path: tuple[str | int, ...]) -> tuple[Path, int]:
    """File and line of a field, in the file nearest to the child that has it; the first line where none has."""
    for file, root in files:
        node: yaml.Node = root
        line = root.start_mark.line + 1
        for part in path:
            found = _step(node, part)
            if found is None:
                break
            node, line = found
        else:
            return file, line
    return files[0][0], 1


def _step(node: yaml.Node, part: str | int) -> tuple[yaml.Node, int] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == part:
                return value, key.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part].start_mark.line + 1
    return None


def _dotted(path: tuple[str | int, ...]) -> str:
    text = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
    return text or "profile"
