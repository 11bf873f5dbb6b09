"""Malformed requests, claims and checkpoints: no crash, no leak, and an error that names what is wrong."""

import asyncio
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from kubelet_fakes import (
    DRIVER,
    GPUS,
    POOL,
    FakeApi,
    Machine,
    claim,
    dial,
    dra,
    gpu_config,
    make_engine,
    ref,
    result,
    uid,
    with_partitions,
)

from gpunode.kubelet.checkpoint import CheckpointFile
from gpunode.kubelet.errors import ClaimError, ErrorKind
from gpunode.kubelet.health import HealthFeed
from gpunode.kubelet.plugin import KubeletPlugin
from gpunode.kubelet.prepare import MAX_CLAIMS_PER_CALL
from gpunode.kubelet.proto import dra_v1_pb2, dra_v1beta1_pb2
from gpunode.kubelet.resolve import ClaimRef
from gpunode.model.resource import ResourceClaim

SLICE, SOAK = 250, 10_000
COUNTS = [pytest.param(SLICE, id="slice"), pytest.param(SOAK, id="soak", marks=pytest.mark.soak)]
Record = Callable[[str, object], None]


def chance_for(count: int, record: Record) -> random.Random:
    """The slice is the same every time, the soak follows the seed it was given."""
    record("malformed", count)
    return random.Random(5 if count == SLICE else int(os.environ.get("GPUNODE_SEED", "5")))


ODD: list[Any] = [
    None, True, -1, 2**63, 1e308, "", "x" * 300, "../../etc/passwd", "\x00", "ä\ud7ff", [], {}, [[]], {"": {}},
]  # fmt: skip
METHODS = [
    f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/Node{verb}Resources"
    for version in ("v1", "v1beta1")
    for verb in ("Prepare", "Unprepare")
]


@pytest.fixture
def base() -> Iterator[Path]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="kubelet-") as directory:
        yield Path(directory)


def damaged(chance: random.Random, raw: bytes) -> bytes:
    """Cut, flipped, repeated, stuffed, or all of that."""
    data = bytearray(raw)
    for _ in range(chance.choice([1, 1, 2, 5])):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0:
                del data[at:]
            case 1 if data:
                data[at % len(data)] ^= 1 << chance.randrange(8)
            case 2:
                data[at:at] = chance.randbytes(chance.choice([1, 4, 200]))
            case 3:
                data[at:at] = data[:at][-50:]
            case _:
                data = bytearray(chance.randbytes(chance.randrange(64)))
    return bytes(data)


def mutated(chance: random.Random, value: Any) -> Any:
    """A JSON value with one place in it replaced, dropped or made too long."""
    if isinstance(value, dict) and value and chance.random() < 0.95:
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: mutated(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.95:
        at = chance.randrange(len(value))
        if chance.random() < 0.1:
            return value * chance.choice([0, 3, 40])
        return [*value[:at], mutated(chance, value[at]), *value[at + 1 :]]
    return chance.choice(ODD)


def plain(value: Any) -> Any:
    """As JSON has it: dictionaries and lists."""
    return msgspec.json.decode(msgspec.json.encode(value))


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("count", COUNTS)
async def test_malformed_requests(base: Path, count: int, record_property: Record) -> None:
    chance = chance_for(count, record_property)
    good = claim(1, GPUS[0])
    machine = Machine(base)
    engine = make_engine(base, FakeApi(good))
    plugin = KubeletPlugin(DRIVER, POOL, machine.paths, engine, HealthFeed(), grace_s=0.1)
    await plugin.start()
    request = dra_v1_pb2.NodePrepareResourcesRequest(
        claims=[dra_v1_pb2.Claim(namespace="ns", uid=uid(n), name=f"claim-{n}") for n in range(3)]
    ).SerializeToString()
    async with dial(machine.paths.dra_socket(DRIVER)) as channel:
        await dra(channel, dra_v1_pb2, "Prepare", [ref(good)])
        before = open_files()

        async def send(method: str, raw: bytes) -> None:
            try:
                await channel.unary_unary(method)(raw, timeout=30)
            except grpc.aio.AioRpcError as error:  # what cannot be parsed is refused by gRPC itself
                assert error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), error

        for _ in range(count // 25):
            batch = [(chance.choice(METHODS), damaged(chance, request)) for _ in range(25)]
            await asyncio.gather(*(send(*one) for one in batch))
        for pb in (dra_v1_pb2, dra_v1beta1_pb2):
            answer = await dra(channel, pb, "Prepare", [ref(good)])
            assert answer.claims[uid(1)].error == "" and len(answer.claims[uid(1)].devices) == 1
        assert open_files() <= before + 2
    await plugin.stop()
    engine.close()
    assert set(machine.check()) <= {uid(1)}


async def test_a_request_with_too_many_claims_is_refused(base: Path) -> None:
    engine = make_engine(base, FakeApi())
    answer = await engine.prepare([ClaimRef("ns", "x", uid(n)) for n in range(MAX_CLAIMS_PER_CALL + 1)])
    assert len(answer) == MAX_CLAIMS_PER_CALL + 1
    first = answer[uid(0)]
    assert isinstance(first, ClaimError) and first.kind is ErrorKind.REQUEST and "claims" in first.message


@pytest.mark.parametrize("count", COUNTS)
async def test_malformed_claims(base: Path, count: int, record_property: Record) -> None:
    """The API server checks little of an allocation, and whoever may write status can write anything."""
    chance = chance_for(count, record_property)
    share = "0f0f0f0f-0000-4000-8000-000000000000"
    template = plain(
        claim(
            1,
            result(GPUS[0]),
            result(GPUS[1], "r/sub", shareID=share, consumedCapacity={"memory": "1Gi"}),
            result(GPUS[2], adminAccess=True),
            config=[gpu_config(source="FromClass"), gpu_config("MPS", mps={"activeThreadPercentage": 5})],
        )
    )
    machine = Machine(base)
    other = claim(2, GPUS[5])
    raw: list[Any] = [template]

    class Reader:
        """Decodes as the API client does, so that a claim of the wrong shape is an error of the reader."""

        async def get(self, namespace: str, name: str) -> ResourceClaim:
            if name == "claim-2":
                return other
            return msgspec.json.decode(msgspec.json.encode(raw[0]), type=ResourceClaim)

    engine = make_engine(
        base, Reader(), devices=with_partitions, partitioner=machine.partitioner, sharing=machine.sharing
    )  # type: ignore[arg-type]
    asked = ClaimRef("ns", "claim-1", uid(1))
    kinds: set[str] = set()
    await engine.prepare([ref(other)])
    before = open_files()
    for _ in range(count):
        raw[0] = template
        for _ in range(chance.choice([1, 1, 2, 4])):
            raw[0] = mutated(chance, raw[0])
        answer = await engine.prepare([asked, ref(other)])
        assert not isinstance(answer[uid(2)], ClaimError)
        error = answer[uid(1)]
        if isinstance(error, ClaimError):
            assert error.kind is not ErrorKind.INTERNAL, error.message
            assert "ns/claim-1" in error.message and len(error.message) <= 1024
            kinds.add(error.kind)
            if error.kind in (ErrorKind.CONFIG, ErrorKind.WRONG_NODE):
                assert re.search(r"status\.allocation\.devices\.(results|config)\[\d+\]|cannot", error.message)
        else:
            kinds.add("prepared")
        assert (await engine.unprepare([asked]))[uid(1)] is None
    assert {"prepared", ErrorKind.API, ErrorKind.CONFIG, ErrorKind.UID} <= kinds
    assert open_files() <= before + 2
    assert set(machine.check()) == {uid(2)}


@pytest.mark.parametrize("count", COUNTS)
async def test_malformed_checkpoints(base: Path, count: int, record_property: Record) -> None:
    """Bytes and, under a right checksum, structure; whatever remains is a checkpoint that can be used."""
    chance = chance_for(count, record_property)
    machine = Machine(base)
    api = FakeApi(claim(1, GPUS[0]), claim(2, GPUS[1], config=[gpu_config()]))
    engine = make_engine(base, api, sharing=machine.sharing, partitioner=machine.partitioner)
    await engine.prepare([ref(c) for c in api.claims.values()])
    path = machine.paths.checkpoint(DRIVER)
    good = path.read_bytes()
    body = msgspec.json.decode(good.split(b"\n", 1)[1])
    before = open_files()
    for _ in range(count):
        if chance.random() < 0.5:
            path.write_bytes(damaged(chance, good))
        else:
            path.write_bytes(_checksummed(mutated(chance, body)))
        loaded = CheckpointFile(path).load()
        assert bool(loaded.problems) <= loaded.lost
        assert all(str(path) in problem for problem in loaded.problems)
        assert all(entry.uid == key for key, entry in loaded.entries.items())
        again = CheckpointFile(path).load()
        assert (again.entries, again.problems) == (loaded.entries, ())
    assert open_files() <= before + 2
    assert len(list(path.parent.glob("*.damaged-*"))) <= 8


def _checksummed(body: Any) -> bytes:
    raw = msgspec.json.encode(body)
    return msgspec.json.encode({"version": 1, "checksum": sha256(raw).hexdigest()}) + b"\n" + raw
