"""Driver libraries from the container toolkit, which is a script here."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kubelet_fakes import DRIVER, GPUS, FakeApi, cdi_files, claim, make_engine, ref

from gpunode.kubelet import tool as tool_module
from gpunode.kubelet.cdi import CdiStore, CommonEdits, Hook
from gpunode.kubelet.errors import ClaimError, ErrorKind
from gpunode.kubelet.guard import BlackHoleGuard
from gpunode.kubelet.seams import Notice
from gpunode.kubelet.tool import run_tool
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
    nodes=(DeviceNode("/host/uvm", "/dev/nvidia-uvm"), DeviceNode("/dev/nvidiactl", "/dev/nvidiactl")),
    mounts=(Mount(LIBRARY, LIBRARY, ("ro", "rbind")),),
    hooks=(Hook("createContainer", "/usr/bin/nvidia-cdi-hook", ("x", "update-ldcache")),),
)


def test_the_documents_own_edits_are_taken_and_its_devices_are_not() -> None:
    assert parse(msgspec.json.encode(DOCUMENT)) == COMMON


def test_the_same_in_another_order_is_the_same() -> None:
    """Or each answer of a tool that does not sort would have all files written again."""
    edits = DOCUMENT["containerEdits"]
    more = [*edits["mounts"], {"hostPath": "/usr/bin/nvidia-smi", "containerPath": "/usr/bin/nvidia-smi"}]
    one = edits | {"mounts": more}
    other = edits | {"mounts": more[::-1], "deviceNodes": edits["deviceNodes"][::-1]}
    first, second = (parse(msgspec.json.encode({"containerEdits": each})) for each in (one, other))
    assert first == second
    assert len(first.mounts) == 2


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


def fails() -> CommonEdits:
    raise HardwareError("the driver's libraries are not known: nvidia-ctk failed")


@pytest.mark.parametrize("common", [fails, CommonEdits], ids=["fails", "is away"])
async def test_a_claim_that_has_its_file_keeps_it_while_the_toolkit(
    tmp_path: Path, common: Callable[[], CommonEdits]
) -> None:
    """An agent that restarts meanwhile, and a kubelet that restarts and asks again."""
    claims = [claim(n, GPUS[n]) for n in range(3)]
    api = FakeApi(*claims)
    before = make_engine(tmp_path, api, cdi=CdiStore(tmp_path / "cdi", DRIVER, common=lambda: COMMON))
    answers = await before.prepare([ref(one) for one in claims])
    files = cdi_files(tmp_path)
    before.close()
    store = CdiStore(tmp_path / "cdi", DRIVER, common=common)
    told: list[Notice] = []
    engine = make_engine(tmp_path, api, cdi=store, notify=told.append)
    await engine.recover()
    assert await engine.prepare([ref(one) for one in claims]) == answers
    assert (cdi_files(tmp_path), told) == (files, [])
    # A file that gives something else is not this claim's.
    (tmp_path / "cdi" / store.path(claims[0].metadata.uid).name).write_bytes(
        store.path(claims[1].metadata.uid).read_bytes()
    )
    answer = (await engine.prepare([ref(claims[0])]))[claims[0].metadata.uid]
    assert isinstance(answer, ClaimError) is (common is fails)


async def test_one_file_that_cannot_be_written_keeps_no_other_from_being_put_right(tmp_path: Path) -> None:
    claims = [claim(n, GPUS[n]) for n in range(3)]
    store = CdiStore(tmp_path / "cdi", DRIVER)
    engine = make_engine(tmp_path, FakeApi(*claims), cdi=store)
    await engine.prepare([ref(one) for one in claims])
    paths = [store.path(one.metadata.uid) for one in claims]
    for path in paths:
        path.unlink()
    paths[0].mkdir()
    await engine.recover()
    assert [path.is_file() for path in paths] == [False, True, True]


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("exec sleep 60", "did not end within 0.3 s"),
        ("sleep 60 & exit 0", "did not end within 0.3 s"),
        ("trap '' TERM; while :; do echo no >&2; done", "did not end within 0.3 s"),
        ("while :; do echo yes; done", "printed more than 1000 bytes"),
        ("echo some; echo words >&2; exit 3", "status 3: words"),
        ("exec kill -SEGV $$", "status -11"),
    ],
)
def test_a_tool_is_bounded_in_time_and_words(tmp_path: Path, script: str, says: str) -> None:
    tool = tmp_path / "tool"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    began = time.monotonic()
    with pytest.raises(HardwareError, match=says):
        run_tool([str(tool)], 0.3, 1000)
    assert time.monotonic() - began < 3
    for broken in ("no-such-tool", "with\0nul"):
        with pytest.raises(HardwareError, match=r"tool|nul"):
            run_tool([broken], 0.3)


def test_a_tool_that_cannot_be_killed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that hangs in the driver."""
    monkeypatch.setattr(tool_module, "_KILLED_S", 0.1)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _: None)
    with pytest.raises(HardwareError, match="did not end"):
        run_tool(["sleep", "3"], 0.1)


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
