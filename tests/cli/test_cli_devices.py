"""The commands that need no cluster, through the program's own entry."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from gpunode.cli import devices
from gpunode.hardware.board import board_names


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    devices.register(made)
    return made


def run(app: typer.Typer, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def test_devices_as_table_tree_and_json(app: typer.Typer) -> None:
    table = run(app, "devices", "--profile", "b200-dead-nvlink", "--node", "n7")
    assert "n7: driver 580.95.05, CUDA 13.0" in table
    assert ("gpu-0000-52-00-0" in table, "0/18" in table) == (True, True)
    tree = run(app, "devices", "--profile", "b200-dead-nvlink", "--tree")
    assert "GPU2 0000:52:00.0 NVIDIA B200  18 of 18 NVLinks down" in tree
    found = json.loads(run(app, "devices", "--profile", "l4", "-o", "json"))
    assert (found["gpus"][0]["name"], found["gpus"][0]["pci"]) == ("gpu-0000-21-00-0", "0000:21:00.0")
    assert yaml.safe_load(run(app, "devices", "--profile", "l4", "-o", "yaml"))["gpus"] == found["gpus"]


@pytest.mark.parametrize("mode", ["static", "dynamic", "shared"])
def test_slices_are_whole_api_objects(app: typer.Typer, mode: str) -> None:
    documents = list(yaml.safe_load_all(run(app, "slices", "--profile", "hgx-h100", "--mode", mode, "-o", "yaml")))
    assert {(d["apiVersion"], d["kind"]) for d in documents} == {("resource.k8s.io/v1", "ResourceSlice")}
    assert all(d["spec"]["pool"]["resourceSliceCount"] == len(documents) for d in documents)
    listed = json.loads(run(app, "slices", "--profile", "hgx-h100", "--mode", mode, "-o", "json"))
    assert listed["items"] == documents
    assert f"{documents[0]['metadata']['name']}" in run(app, "slices", "--profile", "hgx-h100", "--mode", mode)


@pytest.mark.parametrize("board", board_names())
def test_topology_in_the_terminal_and_as_svg(app: typer.Typer, board: str, tmp_path: Path) -> None:
    shown = run(app, "topology", "--profile", board)
    assert "NUMA node" in shown
    picture = tmp_path / "board.svg"
    run(app, "topology", "--profile", board, "--svg", str(picture))
    texts = [t.text or "" for t in ET.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}text")]
    assert sum(t.startswith("GPU") for t in texts) == len(re.findall(r"GPU\d+ [0-9a-f]{4}:", shown)) > 0


def test_distances_of_a_board_of_pairs(app: typer.Typer) -> None:
    rows = [line.split() for line in run(app, "topology", "--profile", "a100-nvlink-pairs").splitlines()]
    table = {row[0]: row[1:5] for row in rows if row and row[0].startswith("GPU") and len(row) == 7}
    assert table["GPU0"] == ["X", "NV12", "SYS", "SYS"]
    assert table["GPU3"] == ["SYS", "SYS", "NV12", "X"]


def test_validate_names_line_and_field(app: typer.Typer, tmp_path: Path) -> None:
    good = tmp_path / "good.yaml"
    good.write_text("extends: hgx-h100\nname: good\n")
    assert "8 GPUs, 8 network devices, all in order" in run(app, "fake", "validate", str(good))
    bad = tmp_path / "bad.yaml"
    bad.write_text("extends: hgx-h100\nname: bad\nmemoryMiB: lots\n")
    assert f"{bad}:3: memoryMiB: Expected `int`, got `str`" in run(app, "fake", "validate", str(bad), code=2)


def test_profiles_are_listed(app: typer.Typer) -> None:
    shown = run(app, "fake", "list")
    assert all(name in shown for name in board_names())


def test_a_machine_without_a_driver_says_what_to_do(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    told = run(app, "devices", code=1)
    assert "is the NVIDIA driver loaded?" in told
    assert "--profile" in told


def test_tables_have_headings_as_kubectl_has() -> None:
    for arguments in (("devices",), ("slices",), ("fake", "list")):
        profile = () if arguments[0] == "fake" else ("--profile", "l4")
        made = typer.Typer()
        devices.register(made)
        lines = run(made, *arguments, *profile).splitlines()
        heading = next(line for line in lines if re.match(r"(DEVICE|SLICE|PROFILE) ", line))
        assert heading == heading.upper()
