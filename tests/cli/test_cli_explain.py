"""`gpunode explain` decides as the controller does that was started with the same options."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.cli.answers import api_server, write_kubeconfig
from tests.gang.scenario import DRIVER, scenario
from typer.testing import CliRunner

from gpunode.cli.main import app
from gpunode.controller import world
from gpunode.model.gang import Snapshot

NODES = "".join(f"node n{n}\n" for n in range(1, 7)) + "gang g pods=8,8 bound=n1,n2 job=j\n"


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    with api_server() as server:
        write_kubeconfig(tmp_path / "kubeconfig", f"{server}/allow")
        yield tmp_path / "kubeconfig"


def explained(monkeypatch: pytest.MonkeyPatch, kubeconfig: Path, lines: str, gang: str, *options: str) -> str:
    async def read(*_: object) -> Snapshot:
        return scenario(lines).snapshot()

    monkeypatch.setattr(world, "read_snapshot", read)
    arguments = ["explain", gang, "--kubeconfig", str(kubeconfig), *options]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def reason(
    monkeypatch: pytest.MonkeyPatch, kubeconfig: Path, lines: str, *options: str, gang: str = "podgroup/g"
) -> str:
    return str(json.loads(explained(monkeypatch, kubeconfig, lines, gang, "-o", "json", *options))["reason"])


def test_a_fault_of_another_drivers_device(monkeypatch: pytest.MonkeyPatch, kubeconfig: Path) -> None:
    faulty = f"{NODES}taint n1/gpu-3 xid=79\n"
    assert reason(monkeypatch, kubeconfig, faulty) == "DeviceFault"
    assert reason(monkeypatch, kubeconfig, faulty, "--driver", "gpu.example.com") != "DeviceFault"
    both = ("--driver", "gpu.example.com", "--driver", DRIVER)
    assert reason(monkeypatch, kubeconfig, faulty, *both) == "DeviceFault"


def test_a_burst_that_the_controller_does_not_hold_back(monkeypatch: pytest.MonkeyPatch, kubeconfig: Path) -> None:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    burst = NODES + "".join(f"taint n{n // 8 + 1}/gpu-{n % 8} xid=79 since={now}\n" for n in range(16))
    assert reason(monkeypatch, kubeconfig, burst) == "DeviceFaultHeld"
    assert reason(monkeypatch, kubeconfig, burst, "--blast-share", "1") == "DeviceFault"


def test_a_pod_of_a_group_is_explained_as_its_gang(monkeypatch: pytest.MonkeyPatch, kubeconfig: Path) -> None:
    faulty = f"{NODES}taint n1/gpu-3 xid=79\n"
    assert reason(monkeypatch, kubeconfig, faulty, gang="pod/g-1") == "DeviceFault"
    done = explained(monkeypatch, kubeconfig, faulty, "pod/g-1")
    assert done.startswith("podgroup/g, the gang of pod/g-1, in default: DeviceFault\n")
    alone = f"{NODES}pod single gpus=9\n"
    assert explained(monkeypatch, kubeconfig, alone, "pod/single").startswith(
        "pod/single in default: NoMatchingDevices\n"
    )
