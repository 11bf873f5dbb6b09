"""`gpunode claims` on checkpoints as an agent leaves them, and `gpunode claim lint` on manifests."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml
from tests.cli.answers import NODE, api_server, write_kubeconfig
from typer.testing import CliRunner

from gpunode.cli import claims
from gpunode.kubelet.checkpoint import CheckpointFile, Entry, HeldDevice, State
from gpunode.kubelet.config import TimeSlicing
from gpunode.kubelet.plugin import KubeletPaths
from gpunode.model.injection import DeviceNodes
from gpunode.model.names import DEFAULT_DRIVER


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    claims.register(made)
    return made


def run(app: typer.Typer, *arguments: str, code: int = 0, text: str | None = None) -> str:
    result = CliRunner().invoke(app, arguments, input=text, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def kubelet(tmp_path: Path) -> Path:
    paths = KubeletPaths(tmp_path)
    paths.prepare(DEFAULT_DRIVER)
    nodes = DeviceNodes(uuid="GPU-1")
    devices = (
        HeldDevice("gpu-1", "n", ("train",), nodes, sharing=TimeSlicing()),
        HeldDevice("gpu-2", "n", ("watch", "train"), nodes, admin=True),
    )
    entry = Entry("u1", "team-a", "two", "boot", State.COMPLETED, devices)
    CheckpointFile(paths.checkpoint(DEFAULT_DRIVER)).save({entry.uid: entry})
    return tmp_path


def test_held_claims_as_table_and_json(app: typer.Typer, kubelet: Path) -> None:
    lines = run(app, "claims", "--kubelet-dir", str(kubelet)).splitlines()
    assert lines[1].split() == ["team-a/two", "completed", "gpu-1", "train", "GPU-1", "TimeSlicing"]
    assert lines[2].split() == ["gpu-2", "watch,", "train", "GPU-1", "admin", "access"]
    (found,) = json.loads(run(app, "claims", "--kubelet-dir", str(kubelet), "-o", "json"))["claims"]
    assert (found["namespace"], found["name"], found["uid"], found["state"]) == ("team-a", "two", "u1", "completed")
    assert [d["device"] for d in found["devices"]] == ["gpu-1", "gpu-2"]
    assert found["devices"][1]["adminAccess"] is True
    assert yaml.safe_load(run(app, "claims", "--kubelet-dir", str(kubelet), "-o", "yaml"))["claims"] == [found]


def test_a_node_without_claims_or_agent_is_told_apart(app: typer.Typer, tmp_path: Path) -> None:
    assert "no agent of gpu.gpunode.dev" in run(app, "claims", "--kubelet-dir", str(tmp_path), code=1)
    KubeletPaths(tmp_path).prepare(DEFAULT_DRIVER)
    assert "holds no claims" in run(app, "claims", "--kubelet-dir", str(tmp_path))


def test_a_damaged_checkpoint_is_reported_and_left_alone(app: typer.Typer, kubelet: Path) -> None:
    file = KubeletPaths(kubelet).checkpoint(DEFAULT_DRIVER)
    file.write_bytes(damaged := file.read_bytes()[:-3])
    assert "is damaged" in run(app, "claims", "--kubelet-dir", str(kubelet), code=1)
    assert file.read_bytes() == damaged


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    with api_server() as address:
        write_kubeconfig(tmp_path / "config.json", f"{address}/allow")
        yield tmp_path / "config.json"


def test_claims_of_another_node_as_table_and_json(app: typer.Typer, kubeconfig: Path) -> None:
    asked = ("claims", "--node", NODE, "--kubeconfig", str(kubeconfig))
    header, *lines = run(app, *asked).splitlines()
    assert header.split() == ["CLAIM", "PODS", "DEVICE", "REQUEST", "UUID", "PREPARED", "HEALTHY"]
    assert [line.split() for line in lines] == [
        ["team-a/runs", "pod-runs", "gpu-0", "gpus", "GPU-0", "yes", "yes"],
        ["gpu-1", "gpus", "GPU-1", "yes", "no:", "XID", "79", "[lost]"],
        ["team-a/waits", "pod-waits", "gpu-0", "gpus", "-", "-", "-"],
        ["gpu-1", "gpus", "-", "-", "-"],
    ]
    found = json.loads(run(app, *asked, "-o", "json"))["claims"]
    assert [(c["name"], c["uid"], c["pods"]) for c in found] == [
        ("runs", "u-runs", ["pod-runs"]), ("waits", "u-waits", ["pod-waits"]),
    ]  # fmt: skip
    sick = found[0]["devices"][1]
    assert (sick["device"], sick["data"]["deviceNodes"]) == ("gpu-1", ["/dev/nvidia0"])
    assert sick["conditions"][1] == {"type": "Healthy", "status": "False", "reason": "Any", "message": "XID 79 [lost]"}
    assert found[1]["devices"] == [{"device": f"gpu-{n}", "request": "gpus"} for n in range(2)]
    assert yaml.safe_load(run(app, *asked, "-o", "yaml"))["claims"] == found


def test_claims_of_another_driver_on_a_node(app: typer.Typer, kubeconfig: Path) -> None:
    asked = ("claims", "--node", NODE, "--kubeconfig", str(kubeconfig))
    (found,) = json.loads(run(app, *asked, "--driver", "other.example.com", "-o", "json"))["claims"]
    assert found["name"] == "foreign"
    assert "no claims have devices of none.example.com on here" in run(app, *asked, "--driver", "none.example.com")


CLAIM = """
kind: ResourceClaim
metadata: {name: one}
spec:
  devices:
    config:
    - opaque:
        driver: gpu.gpunode.dev
        parameters: {apiVersion: gpunode.dev/v1alpha1, kind: GpuConfig, sharing: {strategy: %s}}
"""


def test_lint_names_the_object_and_the_field(app: typer.Typer, tmp_path: Path) -> None:
    file = tmp_path / "claim.yaml"
    file.write_text(CLAIM % "None")
    assert "1 object, all in order" in run(app, "claim", "lint", str(file))
    told = run(app, "claim", "lint", "-", text=CLAIM % "Mps", code=1)
    assert "ResourceClaim one: spec.devices.config[0].opaque.parameters.sharing.strategy: " in told
    assert "cannot be read" in run(app, "claim", "lint", str(tmp_path / "none.yaml"), code=2)
    assert "cannot be read" in run(app, "claim", "lint", "-", text="a: [", code=2)


def test_lint_that_checks_nothing_says_so(app: typer.Typer, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("kind: Job\n---\nkind: PodGroup\n---\n[]\n")
    assert "there is no claim, claim template or device class in it" in run(app, "claim", "lint", str(file), code=1)
    file.write_text("kind: Job\n---\n" + CLAIM % "MPS")
    assert "1 object, all in order" in run(app, "claim", "lint", str(file))
