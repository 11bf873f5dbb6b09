"""Samples of how long the kubelet waits for a prepared claim. Run by the benchmark; nothing is asserted here.

Measured where the kubelet measures: over the unix socket, with the checkpoint on a real disk. The API server is not in
it (claims are answered at once), because its latency is not the agent's.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from gpunode.kubelet.health import HealthFeed
from gpunode.kubelet.plugin import KubeletPaths, KubeletPlugin
from gpunode.kubelet.proto import dra_v1_pb2

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kubelet"))

from kubelet_fakes import DRIVER, GPUS, POOL, FakeApi, all_devices, claim, dial, dra, make_engine, ref

_WARM_UP = 5


@asynccontextmanager
async def _plugin(base: Path, api: FakeApi, devices: int) -> AsyncIterator[grpc.aio.Channel]:
    paths = KubeletPaths(base / "kubelet", base / "cdi")
    offered = {f"gpu-{n}": nodes for n, nodes in zip(range(devices), list(all_devices().values()) * 5, strict=False)}
    engine = make_engine(base, api, devices=lambda: all_devices() | offered)
    await engine.recover()
    plugin = KubeletPlugin(DRIVER, POOL, paths, engine, HealthFeed(), grace_s=0.1)
    await plugin.start()
    try:
        async with dial(paths.dra_socket(DRIVER)) as channel:
            yield channel
    finally:
        await plugin.stop()
        engine.close()


async def _prepare8(samples: int) -> list[float]:
    times = []
    with tempfile.TemporaryDirectory(prefix="bench-") as base:
        api = FakeApi()
        async with _plugin(Path(base), api, 0) as channel:
            for number in range(samples + _WARM_UP):
                asked = api.put(claim(number, *GPUS))
                begin = time.perf_counter()
                answer = await dra(channel, dra_v1_pb2, "Prepare", [ref(asked)])
                times.append((time.perf_counter() - begin) * 1000)
                if len(answer.claims[asked.metadata.uid].devices) != len(GPUS):
                    raise RuntimeError(f"claim was not prepared: {answer}")
                await dra(channel, dra_v1_pb2, "Unprepare", [ref(asked)])
    return times[_WARM_UP:]


async def _parallel(claims: int) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="bench-") as base:
        api = FakeApi(*(claim(n, f"gpu-{n}") for n in range(claims)))

        async def one(channel: grpc.aio.Channel, number: int) -> float:
            asked = claim(number, f"gpu-{number}")
            begin = time.perf_counter()
            answer = await dra(channel, dra_v1_pb2, "Prepare", [ref(asked)])
            if answer.claims[asked.metadata.uid].error:
                raise RuntimeError(f"claim was not prepared: {answer}")
            return (time.perf_counter() - begin) * 1000

        async with _plugin(Path(base), api, claims) as channel:
            return await asyncio.gather(*(one(channel, n) for n in range(claims)))


def prepare8_ms(samples: int = 100) -> list[float]:
    """agent.prepare_p99_ms: one claim of eight GPUs, prepared on an otherwise empty node."""
    return asyncio.run(_prepare8(samples))


def prepare32_ms(claims: int = 32) -> list[float]:
    """How long each of 32 claims of one GPU waits when all are asked for at once. Raises RuntimeError if one fails."""
    return asyncio.run(_parallel(claims))


if __name__ == "__main__":
    for name, times in (("8 GPUs", sorted(prepare8_ms())), ("32 at once", sorted(prepare32_ms()))):
        print(f"{name}: median {times[len(times) // 2]:.1f} ms, p99 {times[len(times) * 99 // 100]:.1f} ms")
