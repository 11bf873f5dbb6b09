"""Board profiles: what comes with the package is sound, and a bad one is told by file, line and field."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.hardware.board import Board, BoardError, board_names, load_board

EXPECTED = {
    "dgx-a100-40", "dgx-a100-80", "hgx-h100", "hgx-h200", "hgx-b200", "gb200-nvl72", "gb200-nvl72-2-cliques",
    "l40s", "l4", "t4", "a100-nvlink-pairs", "b200-dead-nvlink",
}  # fmt: skip


def test_the_boards_of_the_field_are_there() -> None:
    assert set(board_names()) == EXPECTED


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_each_board_is_consistent(name: str) -> None:
    board = load_board(name)
    assert board.name == name
    assert [g.pci for g in board.gpus] == sorted(g.pci for g in board.gpus)
    for profile in board.mig_profiles:
        assert profile.multiprocessors <= board.multiprocessors
        assert profile.memory_mib <= board.memory_mib
    for index, gpu in enumerate(board.gpus):
        assert all(index in board.gpus[peer].peers for peer in gpu.peers), "links have two ends"


def test_extending_replaces_lists_and_merges_mappings() -> None:
    parent, child = load_board("gb200-nvl72"), load_board("gb200-nvl72-2-cliques")
    assert child.fabric.cliques == (4026, 4027)
    assert (child.fabric.cluster_uuid, child.gpus) == (parent.fabric.cluster_uuid, parent.gpus)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


BAD = {
    "unknown field": ("extends: l4\nname: mine\n\ncolour: red\n", 4, "colour", "unknown field `colour`"),
    "type": (
        "extends: l4\nname: mine\ngpus:\n  - {pci: '0000:21:00.0'}\n  - pci: 21\n",
        5,
        "gpus[1].pci",
        "Expected `str`",
    ),
    "address": ("extends: l4\nname: mine\ngpus:\n  - pci: '0000:21:00'\n", 4, "gpus[0].pci", "matching regex"),
    "twice": (
        "extends: l4\nname: mine\nnics: []\ngpus:\n  - {pci: '0000:21:00.0'}\n  - {pci: '0000:21:00.0'}\n",
        6,
        "gpus[1].pci",
        "used twice",
    ),
    "range": ("extends: l4\nname: mine\nnvlink:\n  links: 99\n", 4, "nvlink.links", "<= 36"),
    "not a list": ("extends: l4\nname: mine\ngpus: 4\n", 3, "gpus", "must be a list"),
    "peer": (
        "extends: l4\nname: mine\ngpus:\n  - {pci: '0000:21:00.0', peers: [0]}\n",
        4,
        "gpus[0].peers",
        "another GPU",
    ),
    "dead link": (
        "extends: hgx-h100\nname: mine\ngpus:\n  - pci: '0000:21:00.0'\n    deadLinks: [18]\n",
        5,
        "gpus[0].deadLinks",
        "0 to 17",
    ),
    "switch": (
        "extends: hgx-h100\nname: mine\nswitches:\n  - {pci: '0000:05:00.0', links: 18}\n  - {pci: '0000:06:00.0'}\n",
        5,
        "switches[1]",
        "missing required field `links`",
    ),
    "switch at a GPU's address": (
        "extends: hgx-h100\nname: mine\nswitches:\n  - {pci: '0000:1b:00.0', links: 18}\n",
        4,
        "switches[0].pci",
        "used twice",
    ),
    "links and switches": ("extends: hgx-h100\nname: mine\nnvlink:\n  links: 4\n", 4, "nvlink.links", "take 18 links"),
    "placement": (
        "extends: l4\nname: mine\nmigProfiles:\n  - {name: 3g.40gb, id: 9, number: 2, slices: 3, starts: [5],\n"
        "     size: 4, memoryMiB: 1, multiprocessors: 1}\n",
        4,
        "migProfiles[0].starts",
        "8 memory slices",
    ),
    "missing": ("name: mine\n", 1, "profile", "missing required field"),
    "parent's name": ("extends: ../../etc\nname: mine\n", 1, "extends", "not a profile name"),
    "not a mapping": ("- a\n", 1, "", "a profile is a mapping"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "line", "field", "reason"), BAD.values(), ids=BAD)
def test_a_bad_profile_is_told_by_line_and_field(tmp_path: Path, text: str, line: int, field: str, reason: str) -> None:
    path = write(tmp_path / "mine.yaml", text)
    with pytest.raises(BoardError) as caught:
        load_board(path)
    told = str(caught.value)
    assert told.startswith(f"{path}:{line}: {field}"), told
    assert reason in told


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "not YAML"),
        ("a: &x [1]\nb: *x\n", "no YAML aliases"),
        ("\x00", "not YAML"),
        ("extends: mine\nname: mine\n", "circle"),
        ("extends: nothing\n", "cannot be read"),
        ("[" * 1000, "nested too deeply"),
        ("a: '" + "x" * 2_000_000 + "'\n", "larger than"),
    ],
    ids=["syntax", "alias", "nul", "circle", "no parent", "deep", "large"],
)
def test_hostile_files_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(BoardError, match=reason):
        load_board(write(tmp_path / "mine.yaml", text))


def test_a_field_of_the_parent_is_told_where_it_stands(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "extends: hgx-h100\nname: base\ngpus:\n  - pci: '0000:21:00.0'\n    deadLinks: [9]\n")
    child = write(tmp_path / "mine.yaml", "extends: base\nname: mine\nswitches: []\nnvlink:\n  links: 4\n")
    with pytest.raises(BoardError, match=r"base\.yaml:5: gpus\[0\]\.deadLinks: this board's links are 0 to 3"):
        load_board(child)
    lacking = write(tmp_path / "lacking.yaml", "extends: base\nname: mine\ngpus:\n  - {}\n")
    with pytest.raises(BoardError, match=r"lacking\.yaml:4: gpus\[0\]: .*missing required field `pci`"):
        load_board(lacking)


def test_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(BoardError, match="no board profile 'dgx-a100'; there are: a100-nvlink-pairs, "):
        load_board("dgx-a100")


@given(st.text(alphabet=st.sampled_from("abgn:- {}[]'\"\n\t0129#&*!|>%@"), max_size=80))
def test_any_text_gives_a_board_or_a_board_error(text: str) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as base:
        try:
            assert isinstance(load_board(write(Path(base) / "x.yaml", text)), Board)
        except BoardError as error:
            assert re.match(r".*x\.yaml", str(error))
