"""Sockets, registration and the gRPC services, seen from a kubelet."""

import asyncio
import logging
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from kubelet_fakes import DRIVER, GPUS, POOL, FakeApi, FakeKubelet, claim, dial, dra, make_engine, ref, result, until

from gpunode.kubelet.health import DeviceReport, HealthFeed
from gpunode.kubelet.plugin import KubeletPaths, KubeletPlugin, PluginError
from gpunode.kubelet.proto import dra_v1_pb2, dra_v1beta1_pb2, health_v1_pb2, health_v1alpha1_pb2


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Shorter than pytest's: a unix socket path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kubelet-") as directory:
        yield Path(directory)


@pytest.fixture
def paths(tmp_path: Path) -> KubeletPaths:
    paths = KubeletPaths(tmp_path / "kubelet", tmp_path / "cdi")
    paths.root.mkdir()
    return paths


@asynccontextmanager
async def running(tmp: Path, paths: KubeletPaths, api: FakeApi, **more: object) -> AsyncIterator[KubeletPlugin]:
    settings = {"health": HealthFeed(), "check_every_s": 0.02, "grace_s": 0.05, **more}
    plugin = KubeletPlugin(DRIVER, POOL, paths, make_engine(tmp, api), **settings)  # type: ignore[arg-type]
    await plugin.start()
    try:
        yield plugin
    finally:
        await plugin.stop()


async def test_registration_tells_the_kubelet_where_and_what(tmp_path: Path, paths: KubeletPaths) -> None:
    published = asyncio.Event()

    async def on_registered() -> None:
        published.set()

    async with running(tmp_path, paths, FakeApi(), on_registered=on_registered, instance="pod-uid") as plugin:
        kubelet = FakeKubelet(paths)
        assert [s.name for s in kubelet.sockets()] == [f"{DRIVER}_pod-uid-reg.sock"]
        assert not plugin.registered.is_set()
        info = await kubelet.register(kubelet.sockets()[0])
        assert (info.type, info.name) == ("DRAPlugin", DRIVER)
        assert info.endpoint == str(paths.plugin_dir(DRIVER) / "dra-pod-uid.sock")
        # The kubelet takes the first that it knows, so v1 has to stand before v1beta1.
        assert list(info.supported_versions) == [
            "v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth",
        ]  # fmt: skip
        await asyncio.wait_for(published.wait(), 5)
        assert plugin.registered.is_set()
    assert list(paths.registry.iterdir()) == []
    assert list(paths.plugin_dir(DRIVER).glob("*.sock")) == []


async def test_the_dra_socket_answers_before_the_registration_socket_exists(
    tmp_path: Path, paths: KubeletPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    original = KubeletPlugin._register

    async def spy(self: KubeletPlugin) -> object:
        async with dial(paths.dra_socket(DRIVER)) as channel:
            await dra(channel, dra_v1_pb2, "Unprepare", [])
        seen.append(FakeKubelet(paths).sockets() == [])
        return await original(self)

    monkeypatch.setattr(KubeletPlugin, "_register", spy)
    async with running(tmp_path, paths, FakeApi()):
        assert seen == [True]


async def test_refused_registration_is_logged_and_not_registered(
    tmp_path: Path, paths: KubeletPaths, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, paths, FakeApi()) as plugin:
        kubelet = FakeKubelet(paths)
        await kubelet.register(kubelet.sockets()[0])
        await kubelet.register(kubelet.sockets()[0], accept=False, error="name in use")
        assert not plugin.registered.is_set()
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "name in use" in record.getMessage() and str(paths.registry) in record.getMessage()


async def test_a_failing_callback_does_not_end_the_plugin(tmp_path: Path, paths: KubeletPaths) -> None:
    calls = []

    async def on_registered() -> None:
        calls.append(1)
        raise RuntimeError("API server away")

    async with running(tmp_path, paths, FakeApi(), on_registered=on_registered) as plugin:
        kubelet = FakeKubelet(paths)
        await kubelet.register(kubelet.sockets()[0])
        await until(lambda: len(calls) == 1)
        await kubelet.register(kubelet.sockets()[0])
        await until(lambda: len(calls) == 2)
        assert plugin.registered.is_set()


@pytest.mark.parametrize("pb", [dra_v1_pb2, dra_v1beta1_pb2], ids=["v1", "v1beta1"])
async def test_prepare_and_unprepare_over_the_socket(tmp_path: Path, paths: KubeletPaths, pb: object) -> None:
    good = claim(1, GPUS[0], result(GPUS[1], request="more/big"))
    gone = claim(2, GPUS[2])
    async with running(tmp_path, paths, FakeApi(good)), dial(paths.dra_socket(DRIVER)) as channel:
        answer = await dra(channel, pb, "Prepare", [ref(good), ref(gone)])  # type: ignore[arg-type]
        devices = answer.claims[good.metadata.uid].devices
        assert [(list(d.request_names), d.pool_name, d.device_name) for d in devices] == [
            (["gpus"], POOL, GPUS[0]),
            (["more"], POOL, GPUS[1]),
        ]
        assert devices[0].cdi_device_ids[0] == f"gpunode.dev/gpu=00000001-0000-{GPUS[0]}"
        assert answer.claims[good.metadata.uid].error == ""
        assert "ns/claim-2 does not exist" in answer.claims[gone.metadata.uid].error
        released = await dra(channel, pb, "Unprepare", [ref(good), ref(gone)])  # type: ignore[arg-type]
        assert {u: c.error for u, c in released.claims.items()} == {good.metadata.uid: "", gone.metadata.uid: ""}


async def test_a_claim_without_our_devices_is_answered_with_no_devices(tmp_path: Path, paths: KubeletPaths) -> None:
    foreign = claim(1, {**result("nic-0"), "driver": "nic.example.com"})
    async with running(tmp_path, paths, FakeApi(foreign)), dial(paths.dra_socket(DRIVER)) as channel:
        answer = await dra(channel, dra_v1_pb2, "Prepare", [ref(foreign)])
        assert list(answer.claims) == [foreign.metadata.uid]
        assert answer.claims[foreign.metadata.uid].error == ""
        assert list(answer.claims[foreign.metadata.uid].devices) == []


async def test_a_share_id_reaches_the_kubelet_in_v1(tmp_path: Path, paths: KubeletPaths) -> None:
    share = "0f0f0f0f-0000-4000-8000-000000000001"
    shared = claim(1, result(GPUS[0], shareID=share))
    async with running(tmp_path, paths, FakeApi(shared)), dial(paths.dra_socket(DRIVER)) as channel:
        answer = await dra(channel, dra_v1_pb2, "Prepare", [ref(shared)])
        assert answer.claims[shared.metadata.uid].devices[0].share_id == share


async def test_a_wiped_registry_gets_its_socket_back(tmp_path: Path, paths: KubeletPaths) -> None:
    async with running(tmp_path, paths, FakeApi()) as plugin:
        kubelet = FakeKubelet(paths)
        await kubelet.register(kubelet.sockets()[0])
        shutil.rmtree(paths.registry)
        await until(lambda: paths.registry.is_dir() and kubelet.sockets() != [])
        assert not plugin.registered.is_set()
        await kubelet.register(kubelet.sockets()[0])
        assert plugin.registered.is_set()


async def test_a_removed_dra_socket_comes_back(tmp_path: Path, paths: KubeletPaths) -> None:
    async with running(tmp_path, paths, FakeApi()):
        paths.dra_socket(DRIVER).unlink()
        await until(paths.dra_socket(DRIVER).exists)
        async with dial(paths.dra_socket(DRIVER)) as channel:
            await dra(channel, dra_v1_pb2, "Unprepare", [])


async def test_two_instances_side_by_side_and_the_old_one_leaves(tmp_path: Path, paths: KubeletPaths) -> None:
    one = claim(1, GPUS[0])
    api = FakeApi(one)
    kubelet = FakeKubelet(paths)
    async with running(tmp_path, paths, api, instance="new"):
        async with running(tmp_path, paths, api, instance="old"):
            assert len(kubelet.sockets()) == 2
            async with dial(paths.dra_socket(DRIVER, "old")) as channel:
                await dra(channel, dra_v1_pb2, "Prepare", [ref(one)])
        assert [s.name for s in kubelet.sockets()] == [f"{DRIVER}_new-reg.sock"]
        clash = api.put(claim(2, GPUS[0]))
        async with dial(paths.dra_socket(DRIVER, "new")) as channel:
            answer = await dra(channel, dra_v1_pb2, "Prepare", [ref(clash)])
            assert "held by claim ns/claim-1" in answer.claims[clash.metadata.uid].error


async def test_a_stale_socket_of_a_killed_plugin_is_replaced(tmp_path: Path, paths: KubeletPaths) -> None:
    paths.plugin_dir(DRIVER).mkdir(parents=True)
    paths.dra_socket(DRIVER).touch()
    async with running(tmp_path, paths, FakeApi()), dial(paths.dra_socket(DRIVER)) as channel:
        await dra(channel, dra_v1_pb2, "Unprepare", [])


async def test_sockets_of_killed_instances_are_removed_and_live_ones_kept(tmp_path: Path, paths: KubeletPaths) -> None:
    async with running(tmp_path, paths, FakeApi(), instance="alive"):
        for path in (paths.registration_socket(DRIVER, "dead"), paths.dra_socket(DRIVER, "dead")):
            with socket.socket(socket.AF_UNIX) as killed:
                killed.bind(str(path))
        async with running(tmp_path, paths, FakeApi(), instance="new"):
            assert [s.name for s in FakeKubelet(paths).sockets()] == [
                f"{DRIVER}_alive-reg.sock", f"{DRIVER}_new-reg.sock",
            ]  # fmt: skip
            assert sorted(s.name for s in paths.plugin_dir(DRIVER).glob("*.sock")) == ["dra-alive.sock", "dra-new.sock"]


async def test_a_kubelet_that_does_not_come_is_complained_about_once(
    tmp_path: Path, paths: KubeletPaths, caplog: pytest.LogCaptureFixture
) -> None:
    def complaints() -> int:
        return sum("has not registered" in r.getMessage() for r in caplog.records)

    async with running(tmp_path, paths, FakeApi(), late_after_s=0.1):
        await until(lambda: complaints() == 1)
        await asyncio.sleep(0.3)
        assert complaints() == 1
        kubelet = FakeKubelet(paths)
        await kubelet.register(kubelet.sockets()[0])
        await asyncio.sleep(0.3)
        assert complaints() == 1
        await kubelet.register(kubelet.sockets()[0], accept=False)
        await until(lambda: complaints() == 2)


async def test_a_socket_that_cannot_be_bound_is_said_and_nothing_is_left(tmp_path: Path, paths: KubeletPaths) -> None:
    paths.prepare(DRIVER)
    paths.registration_socket(DRIVER).mkdir()
    plugin = KubeletPlugin(DRIVER, POOL, paths, make_engine(tmp_path, FakeApi()), HealthFeed())
    with pytest.raises(PluginError, match=r"cannot serve .*reg\.sock"):
        await plugin.start()
    assert list(paths.plugin_dir(DRIVER).glob("*.sock")) == []


async def test_a_registry_that_cannot_be_used_for_a_while_is_used_again(
    tmp_path: Path, paths: KubeletPaths, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, paths, FakeApi()):
        shutil.rmtree(paths.registry)
        paths.registry.touch()
        await until(lambda: any("trying again" in r.getMessage() for r in caplog.records))
        paths.registry.unlink()
        await until(lambda: paths.registry.is_dir() and FakeKubelet(paths).sockets() != [])
        await FakeKubelet(paths).register(FakeKubelet(paths).sockets()[0])


async def test_no_kubelet_and_long_paths_are_said_plainly(tmp_path: Path) -> None:
    absent = KubeletPaths(tmp_path / "nowhere", tmp_path / "cdi")
    plugin = KubeletPlugin(DRIVER, POOL, absent, make_engine(tmp_path, FakeApi()), HealthFeed())
    with pytest.raises(PluginError, match=r"kubelet absent: .*nowhere does not exist"):
        await plugin.start()
    long = KubeletPlugin(DRIVER, POOL, absent, make_engine(tmp_path, FakeApi()), HealthFeed(), instance="x" * 100)
    with pytest.raises(PluginError, match="longer than 107"):
        await long.start()


@pytest.mark.parametrize("pb", [health_v1_pb2, health_v1alpha1_pb2], ids=["v1", "v1alpha1"])
async def test_health_reaches_every_stream_and_is_repeated(tmp_path: Path, paths: KubeletPaths, pb: object) -> None:
    feed = HealthFeed(timeout_s=0.3)
    feed.update({GPUS[0]: DeviceReport(True), GPUS[1]: DeviceReport(None)})
    service = pb.DESCRIPTOR.services_by_name["DRAResourceHealth"].full_name  # type: ignore[attr-defined]
    async with running(tmp_path, paths, FakeApi(), health=feed), dial(paths.dra_socket(DRIVER)) as channel:
        watch = channel.unary_stream(
            f"/{service}/NodeWatchResources",
            request_serializer=pb.NodeWatchResourcesRequest.SerializeToString,  # type: ignore[attr-defined]
            response_deserializer=pb.NodeWatchResourcesResponse.FromString,  # type: ignore[attr-defined]
        )
        streams = [watch(pb.NodeWatchResourcesRequest(), timeout=20) for _ in range(2)]  # type: ignore[attr-defined]
        for stream in streams:
            first = await stream.read()
            assert [(d.device.pool_name, d.device.device_name, d.health) for d in first.devices] == [
                (POOL, GPUS[0], pb.HEALTHY),  # type: ignore[attr-defined]
                (POOL, GPUS[1], pb.UNKNOWN),  # type: ignore[attr-defined]
            ]
        feed.update({GPUS[0]: DeviceReport(False, "XID 79 " + "x" * 2000)})
        for stream in streams:
            message = await stream.read()
            while message.devices[0].health != pb.UNHEALTHY:  # type: ignore[attr-defined]
                message = await stream.read()  # a heartbeat may come first
            assert message.devices[0].message.startswith("XID 79") and len(message.devices[0].message) == 1024
            again = await stream.read()
            assert again == message  # nothing changed: this is the heartbeat
            stream.cancel()


async def test_an_unknown_method_is_unimplemented(tmp_path: Path, paths: KubeletPaths) -> None:
    async with running(tmp_path, paths, FakeApi()), dial(paths.dra_socket(DRIVER)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary("/v2.DRAPlugin/NodePrepareResources")(b"", timeout=5)
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_closed_feed_ends_its_readers() -> None:
    feed = HealthFeed(timeout_s=3600)
    reader = feed.watch()
    await anext(reader)
    waiting = asyncio.create_task(anext(reader, None))
    await asyncio.sleep(0)
    feed.close()
    async with asyncio.timeout(5):
        assert await waiting is None
    assert [report async for report in feed.watch()] == [], "one that comes late"
