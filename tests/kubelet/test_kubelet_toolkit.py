"""Driver libraries from the container toolkit, which is a script here."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from kubelet_fakes import DRIVER, GPUS, FakeApi, cdi_files, claim, make_engine, ref

from gpunode.kubelet.cdi import CdiStore, CommonEdits, Hook
from gpunode.kubelet.errors import ClaimError, ErrorKind
from gpunode.kubelet.guard import BlackHoleGuard
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


@pytest.mark.parametrize(
    ("driver", "arguments"), [("/", ""), ("/run/nvidia/driver", " --driver-root /run/nvidia/driver")]
)
def test_the_tool_is_asked_and_its_failure_told(tmp_path: Path, driver: str, arguments: str) -> None:
    assert common_edits(None, driver) == CommonEdits()
    tool = tmp_path / "nvidia-ctk"
    (tmp_path / "document").write_bytes(msgspec.json.encode(DOCUMENT))
    asked = f"cdi generate --format=json{arguments}"
    tool.write_text(f'#!/bin/sh\n[ "$*" = "{asked}" ] && exec /bin/cat {tmp_path}/document\n')
    tool.chmod(0o755)
    assert common_edits([str(tool)], driver) == COMMON
    tool.write_text("#!/bin/sh\necho failed to load driver >&2\nexit 1\n")
    with pytest.raises(HardwareError, match="status 1: failed to load driver"):
        common_edits([str(tool)], driver)


async def test_while_the_libraries_are_not_known_nothing_new_is_prepared_and_nothing_is_taken(tmp_path: Path) -> None:
    one, two = claim(1, GPUS[0]), claim(2, GPUS[1])
    known = True

    def common() -> CommonEdits:
        if not known:
            raise HardwareError("the driver's libraries are not known: nvidia-ctk failed")
        return COMMON

    store = CdiStore(tmp_path / "cdi", DRIVER, common=common)
    guard = BlackHoleGuard(lambda *_: pytest.fail("no device is at fault"), lambda _: None, threshold=1)
    engine = make_engine(tmp_path, FakeApi(one, two), cdi=store, guard=guard)
    assert not isinstance((await engine.prepare([ref(one)]))[one.metadata.uid], ClaimError)
    before = cdi_files(tmp_path)
    known = False
    refused = (await engine.prepare([ref(two)]))[two.metadata.uid]
    assert isinstance(refused, ClaimError)
    assert (refused.kind, "nvidia-ctk failed" in refused.message) == (ErrorKind.HARDWARE, True)
    assert cdi_files(tmp_path) == before
    await engine.unprepare([ref(one)])
    assert cdi_files(tmp_path) == {}, "files of claims that are gone go all the same"
    known = True
    assert not isinstance((await engine.prepare([ref(two)]))[two.metadata.uid], ClaimError)
    assert len(cdi_files(tmp_path)) == 1


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
