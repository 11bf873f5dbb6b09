"""Driver libraries from the container toolkit, which is a script here."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kubelet_fakes import DRIVER, GPUS, FakeApi, cdi_files, claim, make_engine, ref

from gpunode.kubelet.cdi import CdiStore, CommonEdits, Hook
from gpunode.kubelet.toolkit import common_edits, parse
from gpunode.model.errors import HardwareError
from gpunode.model.injection import DeviceNode, Mount

LIBRARY = "/usr/lib/x86_64-linux-gnu/libcuda.so.570.1"
DOCUMENT: dict[str, Any] = {
    "cdiVersion": "0.5.0",
    "kind": "nvidia.com/gpu",
    "devices": [{"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}],
    "containerEdits": {
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "deviceNodes": [{"path": "/dev/nvidiactl"}, {"path": "/dev/nvidia-uvm", "hostPath": "/host/uvm"}],
        "hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["x", "update-ldcache"]}],
        "mounts": [{"hostPath": LIBRARY, "containerPath": LIBRARY, "options": ["ro", "rbind"]}],
    },
}
COMMON = CommonEdits(
    env=(("NVIDIA_VISIBLE_DEVICES", "void"),),
    nodes=(DeviceNode("/dev/nvidiactl", "/dev/nvidiactl"), DeviceNode("/host/uvm", "/dev/nvidia-uvm")),
    mounts=(Mount(LIBRARY, LIBRARY, ("ro", "rbind")),),
    hooks=(Hook("createContainer", "/usr/bin/nvidia-cdi-hook", ("x", "update-ldcache")),),
)


def test_the_documents_own_edits_are_taken_and_its_devices_are_not() -> None:
    assert parse(msgspec.json.encode(DOCUMENT)) == COMMON


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (b"", "no CDI document"),
        (b"[]", "no CDI document"),
        (b'{"containerEdits":{"mounts":[{"hostPath":"/x"}]}}', "containerPath"),
        (b"{}", "no driver libraries"),
        (b'{"containerEdits":{"env":["A=b"]}}', "no driver libraries"),
        (b" " * (5 * 2**20), "more than"),
    ],
)
def test_a_document_that_would_leave_containers_without_libraries_is_an_error(document: bytes, says: str) -> None:
    with pytest.raises(HardwareError, match=says):
        parse(document)


def test_the_tool_is_asked_and_its_failure_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert common_edits() == CommonEdits()
    tool = tmp_path / "nvidia-ctk"
    (tmp_path / "document").write_bytes(msgspec.json.encode(DOCUMENT))
    tool.write_text(f'#!/bin/sh\n[ "$*" = "cdi generate --format=json" ] && exec /bin/cat {tmp_path}/document\n')
    tool.chmod(0o755)
    assert common_edits() == COMMON
    tool.write_text("#!/bin/sh\necho failed to load driver >&2\nexit 1\n")
    with pytest.raises(HardwareError, match="status 1: failed to load driver"):
        common_edits()
    assert os.environ["PATH"] == str(tmp_path)


async def test_a_new_drivers_libraries_reach_files_already_written(tmp_path: Path) -> None:
    one = claim(1, GPUS[0])
    now = [CommonEdits()]
    engine = make_engine(tmp_path, FakeApi(one), cdi=CdiStore(tmp_path / "cdi", DRIVER, common=lambda: now[0]))
    await engine.prepare([ref(one)])
    now[0] = COMMON
    assert (await engine.recover()).files_written == 1
    ((_, document),) = cdi_files(tmp_path).items()
    edits = document["containerEdits"]
    assert edits["env"][0] == "NVIDIA_VISIBLE_DEVICES=void"  # no second injection by a runtime in legacy mode
    assert edits["hooks"] == DOCUMENT["containerEdits"]["hooks"]
    assert edits["mounts"] == DOCUMENT["containerEdits"]["mounts"]
    paths = [node["path"] for node in edits["deviceNodes"]]
    assert sorted(paths) == ["/dev/nvidia-uvm", "/dev/nvidiactl"]  # the control node of both sources once
