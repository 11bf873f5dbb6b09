"""Preparing and releasing claims: what is given, refused, repeated and forgotten."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from kubelet_fakes import GPUS, FakeApi, all_devices, cdi_files, claim, make_engine, ref, result, uid

from gpunode.kubelet.errors import ClaimError, ErrorKind
from gpunode.kubelet.prepare import PreparedDevice
from gpunode.kubelet.resolve import ClaimRef

SHARES = [f"0f0f0f0f-000{n}-4000-8000-000000000000" for n in range(3)]


def refused(answer: Any) -> ErrorKind:
    assert isinstance(answer, ClaimError), answer
    return answer.kind


def given(answer: Any) -> list[str]:
    assert not isinstance(answer, ClaimError), answer
    return [d.device for d in answer]


async def test_prepare_answers_devices_and_writes_one_cdi_file(tmp_path: Path) -> None:
    one = claim(1, GPUS[0], GPUS[1])
    engine = make_engine(tmp_path, FakeApi(one))
    answer = await engine.prepare([ref(one)])
    assert answer[uid(1)] == tuple(
        PreparedDevice(("gpus",), "node-1", g, (f"gpunode.dev/gpu=00000001-0000-{g}",)) for g in GPUS[:2]
    )
    ((name, spec),) = cdi_files(tmp_path).items()
    assert name == f"gpunode.dev-gpu_gpu.gpunode.dev_{uid(1)}.json"
    assert spec["kind"] == "gpunode.dev/gpu"
    assert spec["devices"][1] == {
        "name": f"00000001-0000-{GPUS[1]}",
        "containerEdits": {
            "env": ["GPUNODE_GPU_1=GPU-1"],
            "deviceNodes": [{"path": "/dev/nvidia1", "hostPath": "/host/nvidia1", "permissions": "rw"}],
        },
    }
    assert spec["containerEdits"]["env"] == ["NVIDIA_VISIBLE_DEVICES=GPU-0,GPU-1", "GPUNODE_CLAIM=ns/claim-1"]
    assert [n["path"] for n in spec["containerEdits"]["deviceNodes"]] == ["/dev/nvidiactl"]


async def test_prepare_again_says_the_same_and_restores_a_lost_file(tmp_path: Path) -> None:
    one = claim(1, GPUS[0])
    engine = make_engine(tmp_path, FakeApi(one))
    first, files = await engine.prepare([ref(one)]), cdi_files(tmp_path)
    for path in (tmp_path / "cdi").iterdir():
        path.unlink()
    assert await engine.prepare([ref(one)]) == first
    assert cdi_files(tmp_path) == files


async def test_files_are_restored_by_any_prepare_and_by_a_restart(tmp_path: Path) -> None:
    one, two = claim(1, GPUS[0]), claim(2, GPUS[1])
    api = FakeApi(one, two)
    await make_engine(tmp_path, api).prepare([ref(one)])
    files = cdi_files(tmp_path)
    victim = tmp_path / "cdi" / next(iter(files))
    victim.write_text("{}")
    orphan = victim.with_name(victim.name.replace("00000001", "0000ffff"))
    orphan.write_text("{}")
    foreign = victim.with_name("vendor.example_x.json")
    foreign.write_text("{}")
    await make_engine(tmp_path, api).recover()
    assert cdi_files(tmp_path) == files | {foreign.name: {}}
    victim.unlink()
    await make_engine(tmp_path, api).prepare([ref(two)])
    assert victim.name in cdi_files(tmp_path)


async def test_unprepare_removes_everything_and_unknown_claims_are_released(tmp_path: Path) -> None:
    one = claim(1, GPUS[0])
    api = FakeApi(one)
    engine = make_engine(tmp_path, api)
    await engine.prepare([ref(one)])
    api.claims.clear()  # the claim object may be gone already
    for _ in range(2):
        assert await engine.unprepare([ref(one), ClaimRef("ns", "never", uid(9))]) == {uid(1): None, uid(9): None}
    assert cdi_files(tmp_path) == {}
    assert await engine.entries() == {}


async def test_unprepare_works_when_the_device_is_gone(tmp_path: Path) -> None:
    one = claim(1, GPUS[0])
    await make_engine(tmp_path, FakeApi(one)).prepare([ref(one)])
    engine = make_engine(tmp_path, FakeApi(), devices=dict)
    assert await engine.unprepare([ref(one)]) == {uid(1): None}
    assert cdi_files(tmp_path) == {}


@pytest.mark.parametrize(
    ("asked", "kind", "names"),
    [
        (ClaimRef("ns", "nobody", uid(1)), ErrorKind.NOT_FOUND, "ns/nobody"),
        (ClaimRef("ns", "claim-1", uid(7)), ErrorKind.UID, uid(7)),
        (ClaimRef("ns", "claim-2", uid(2)), ErrorKind.NOT_ALLOCATED, "status.allocation"),
        (ClaimRef("ns", "claim-3", uid(3)), ErrorKind.WRONG_NODE, "results[0].pool"),
        (ClaimRef("ns", "claim-4", uid(4)), ErrorKind.UNKNOWN_DEVICE, "results[1].device"),
        (ClaimRef("ns", "claim-1", "../../etc/x"), ErrorKind.REQUEST, "claims[].uid"),
        (ClaimRef("", "claim-1", uid(1)), ErrorKind.REQUEST, "claims[].namespace"),
        (ClaimRef("ns", "a/b", uid(1)), ErrorKind.REQUEST, "claims[].name"),
    ],
)
async def test_what_is_refused_and_what_the_refusal_names(
    tmp_path: Path, asked: ClaimRef, kind: ErrorKind, names: str
) -> None:
    good = claim(8, GPUS[7])
    api = FakeApi(
        claim(1, GPUS[0]), claim(2, allocation=None), claim(3, result(GPUS[0], pool="node-2")),
        claim(4, GPUS[0], "gpu-ffff-00-00-0"), good,
    )  # fmt: skip
    answer = await make_engine(tmp_path, api).prepare([asked, ref(good)])
    assert refused(answer[asked.uid]) is kind
    assert names in str(answer[asked.uid])
    assert given(answer[uid(8)]) == [GPUS[7]]  # claims of one call do not depend on each other
    assert list(cdi_files(tmp_path)) == [f"gpunode.dev-gpu_gpu.gpunode.dev_{uid(8)}.json"]


async def test_an_unreachable_api_server_is_an_error_of_the_claim(tmp_path: Path) -> None:
    api = FakeApi(claim(1, GPUS[0]))
    api.fail = ConnectionError("refused")
    answer = await make_engine(tmp_path, api).prepare([ClaimRef("ns", "claim-1", uid(1))])
    assert refused(answer[uid(1)]) is ErrorKind.API


async def test_only_our_results_of_a_claim_with_several_drivers(tmp_path: Path) -> None:
    mixed = claim(1, {**result("nic-0"), "driver": "nic.example.com", "pool": "elsewhere"}, GPUS[3])
    assert given((await make_engine(tmp_path, FakeApi(mixed)).prepare([ref(mixed)]))[uid(1)]) == [GPUS[3]]


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [
        (result(GPUS[0]), result(GPUS[0]), False),
        (result(GPUS[0]), result(GPUS[1]), True),
        (result(GPUS[0]), result(GPUS[0], adminAccess=True), True),
        (result(GPUS[0], adminAccess=True), result(GPUS[0]), True),
        (result(GPUS[0], shareID=SHARES[0]), result(GPUS[0], shareID=SHARES[1]), True),
        (result(GPUS[0], shareID=SHARES[0]), result(GPUS[0], shareID=SHARES[0]), False),
        (result(GPUS[0], shareID=SHARES[0]), result(GPUS[0]), False),
        (result(GPUS[0]), result(GPUS[0], shareID=SHARES[0]), False),
    ],
)
@pytest.mark.parametrize("together", [True, False])
async def test_a_device_held_by_another_claim(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], fits: bool, together: bool
) -> None:
    one, two = claim(1, first), claim(2, second)
    engine = make_engine(tmp_path, FakeApi(one, two))
    if together:
        answer = await engine.prepare([ref(one), ref(two)])
    else:
        answer = await engine.prepare([ref(one)]) | await engine.prepare([ref(two)])
    assert given(answer[uid(1)]) == [GPUS[0]]
    if fits:
        assert given(answer[uid(2)]) == [second["device"]]
        return
    assert refused(answer[uid(2)]) is ErrorKind.HELD
    assert "ns/claim-1" in str(answer[uid(2)])
    await engine.unprepare([ref(one)])
    assert given((await engine.prepare([ref(two)]))[uid(2)]) == [GPUS[0]]


async def test_two_instances_racing_for_one_device_have_one_winner(tmp_path: Path) -> None:
    claims = [claim(n, GPUS[0]) for n in range(1, 9)]
    engines = [make_engine(tmp_path, FakeApi(*claims)) for _ in range(2)]
    answers = await asyncio.gather(*(engines[i % 2].prepare([ref(c)]) for i, c in enumerate(claims)))
    winners = [a for answer in answers for a in answer.values() if not isinstance(a, ClaimError)]
    assert len(winners) == 1


async def test_thirty_two_parallel_prepares(tmp_path: Path) -> None:
    devices = {f"gpu-{n}": all_devices()[GPUS[n % 8]] for n in range(32)}
    claims = [claim(n, f"gpu-{n}") for n in range(32)]
    engines = [make_engine(tmp_path, FakeApi(*claims), devices=lambda: devices) for _ in range(2)]
    answers = await asyncio.gather(*(engines[n % 2].prepare([ref(c)]) for n, c in enumerate(claims)))
    assert [given(a[uid(n)]) for n, a in enumerate(answers)] == [[f"gpu-{n}"] for n in range(32)]
    assert len(cdi_files(tmp_path)) == 32
    assert len(await engines[0].entries()) == 32


async def test_a_device_of_two_requests_is_listed_once_with_both(tmp_path: Path) -> None:
    one = claim(1, result(GPUS[0], "a/x"), result(GPUS[0], "b", adminAccess=True))
    answer = (await make_engine(tmp_path, FakeApi(one)).prepare([ref(one)]))[uid(1)]
    assert not isinstance(answer, ClaimError)
    assert [(d.device, d.requests) for d in answer] == [(GPUS[0], ("a", "b"))]


async def test_an_earlier_boot_holds_nothing_and_its_claims_are_prepared_anew(tmp_path: Path) -> None:
    one, two = claim(1, GPUS[0]), claim(2, GPUS[0])
    await make_engine(tmp_path, FakeApi(one), boot="boot-1").prepare([ref(one)])
    moved = all_devices()
    moved[GPUS[0]] = moved[GPUS[5]]  # the same PCI address has another minor number after the reboot
    later = make_engine(tmp_path, FakeApi(one, two), boot="boot-2", devices=lambda: moved)
    await later.recover()
    assert cdi_files(tmp_path) == {}
    await later.prepare([ref(one)])
    ((_, spec),) = cdi_files(tmp_path).items()
    assert spec["devices"][0]["containerEdits"]["deviceNodes"][0]["path"] == "/dev/nvidia5"
    assert refused((await later.prepare([ref(two)]))[uid(2)]) is ErrorKind.HELD


async def test_a_prepared_device_that_fell_off_the_bus_keeps_its_answer(tmp_path: Path) -> None:
    one = claim(1, GPUS[0])
    first = await make_engine(tmp_path, FakeApi(one)).prepare([ref(one)])
    assert await make_engine(tmp_path, FakeApi(one), devices=dict).prepare([ref(one)]) == first


async def test_a_claim_deallocated_and_allocated_elsewhere_waits_for_release(tmp_path: Path) -> None:
    one = claim(1, GPUS[0])
    api = FakeApi(one)
    engine = make_engine(tmp_path, api)
    await engine.prepare([ref(one)])
    moved = api.put(claim(1, GPUS[1]))
    assert refused((await engine.prepare([ref(moved)]))[uid(1)]) is ErrorKind.HELD
    await engine.unprepare([ref(moved)])
    assert given((await engine.prepare([ref(moved)]))[uid(1)]) == [GPUS[1]]
