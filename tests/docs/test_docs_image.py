"""The image: what its Dockerfile promises, and, where buildah is installed, the image itself."""

import asyncio
import itertools
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from gpunode.cli.main import app
from gpunode.cluster.cluster import Cluster
from gpunode.cluster.errors import ClusterError
from gpunode.kubelet.plugin import KubeletPaths
from gpunode.model.names import DEFAULT_DRIVER
from tests.docs.documents import ROOT
from tests.e2e import pods
from tests.e2e.rolling import slice_gaps, until
from tests.e2e.scene import scene
from tests.fixtures import bare_cluster

BASE, NAME, SECOND = "localhost/gpunode-test-base", "localhost/gpunode-test", "0.1.1"
TEXT = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
INSTRUCTIONS = re.findall(r"^([A-Z]+) (.*)", TEXT, re.MULTILINE)


def test_no_instruction_is_a_shell_string() -> None:
    for word, rest in INSTRUCTIONS:
        if word in ("RUN", "ENTRYPOINT", "CMD"):
            argv = re.sub(r"^(--\S+\s+)+", "", rest)
            assert isinstance(json.loads(argv), list), rest


def test_the_last_stage_is_not_root() -> None:
    last = TEXT.rpartition("\nFROM ")[2]
    (user,) = re.findall(r"^USER (\d+):\d+$", last, re.MULTILINE)
    assert int(user) > 0
    (deployment,) = yaml.safe_load_all((ROOT / "daemonset" / "base" / "deployment.yaml").read_text())
    assert deployment["spec"]["template"]["spec"]["containers"][0]["securityContext"]["runAsUser"] == int(user)


def test_the_agent_is_root_although_the_image_is_not() -> None:
    """Without this it could not write the kubelet's directories, whatever its privileges."""
    assert agent_container()["securityContext"]["runAsUser"] == 0


def test_a_rolling_update_waits_for_the_new_agent() -> None:
    """A surge without a readiness probe would stop the old agent before the new one serves."""
    assert agent_container()["readinessProbe"]["httpGet"]["path"] == "/readyz"


def agent_container() -> dict[str, Any]:
    (daemonset,) = yaml.safe_load_all((ROOT / "daemonset" / "base" / "daemonset.yaml").read_text())
    assert daemonset["spec"]["updateStrategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    return container


def test_the_mps_keeper_has_no_token_and_is_replaced_by_hand_only() -> None:
    (keeper,) = yaml.safe_load_all((ROOT / "daemonset" / "mps" / "daemonset.yaml").read_text())
    assert keeper["spec"]["updateStrategy"] == {"type": "OnDelete"}
    spec = keeper["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False and spec["hostPID"] is True
    assert "serviceAccountName" not in spec
    (container,) = spec["containers"]
    assert container["image"] == agent_container()["image"] and container["securityContext"]["runAsUser"] == 0
    command, *arguments = container["args"]
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    known = {name for parameter in commands[command].params for name in parameter.opts}
    assert {word for word in arguments if word.startswith("-")} <= known
    (mounted,) = [m for m in container["volumeMounts"] if m["mountPropagation"] == "Bidirectional"]
    assert mounted["mountPath"] == str(KubeletPaths().plugin_dir(DEFAULT_DRIVER) / "mps")


def test_what_is_copied_is_sent_to_the_builder() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        name for word, rest in INSTRUCTIONS if word == "COPY" and "--from" not in rest for name in rest.split()[:-1]
    }
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


@dataclass(frozen=True)
class Built:
    """How long it took, in seconds: the base (instead of a download) and the image itself."""

    base_s: float
    build_s: float


@pytest.fixture(scope="module")
def image() -> Iterator[Built]:
    """Built on a base of this machine's Debian, without a registry."""
    for tool in ("buildah", "debootstrap"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (apt-get install buildah debootstrap)")
    yield from _build()


def _build() -> Iterator[Built]:
    began = time.monotonic()
    root = Path("/var/tmp/gpunode-test-base")
    try:
        shutil.rmtree(root, ignore_errors=True)
        _run("debootstrap", "--variant=minbase", "--include=python3,ca-certificates", "bookworm", str(root))
        # Behind a proxy with an authority of its own the build needs it too.
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", root / "etc/ssl/certs/ca-certificates.crt")
        container = _run("buildah", "from", "scratch").strip()
        _run("buildah", "add", container, str(root), "/")
        _run("buildah", "commit", "--rm", container, BASE)
        based = time.monotonic()
        _run("buildah", "bud", "--isolation", "chroot", "--build-arg", f"BASE={BASE}", "-t", NAME, str(ROOT))
        yield Built(based - began, time.monotonic() - based)
    finally:
        shutil.rmtree(root, ignore_errors=True)
        for one in (NAME, BASE):
            subprocess.run(["buildah", "rmi", one], capture_output=True, check=False)


def _size(name: str) -> str:
    return _run("buildah", "images", "--format", "{{.Size}}", name).strip()


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.soak
def test_the_image_builds_and_runs(image: Built, record_property: Callable[[str, object], None]) -> None:
    record_property("size", _size(NAME))
    record_property("base_size", _size(BASE))
    record_property("base_s", round(image.base_s, 1))
    record_property("build_s", round(image.build_s, 1))
    container = _run("buildah", "from", NAME).strip()
    try:
        shown = _run("buildah", "run", "--isolation", "chroot", container, "--", "gpunode", "fake", "list")
        assert "dgx-a100-80" in shown
        assert _run("buildah", "run", "--isolation", "chroot", container, "--", "id", "-u").strip() == "65532"
    finally:
        _run("buildah", "rm", container)


@pytest.fixture
def archives(image: Built, tmp_path: Path) -> dict[str, Path]:
    """The image under two tags, as `docker save` writes it; the second differs by a label."""
    found = {}
    container = _run("buildah", "from", NAME).strip()
    try:
        for tag in (pods.FIRST, SECOND):
            _run("buildah", "config", "--label", f"tag={tag}", container)
            _run("buildah", "commit", container, f"{NAME}:{tag}")
            found[tag] = tmp_path / f"{tag}.tar"
            _run("buildah", "push", f"{NAME}:{tag}", f"docker-archive:{found[tag]}:{pods.REPOSITORY}:{tag}")
    finally:
        _run("buildah", "rm", container)
        for tag in (pods.FIRST, SECOND):
            subprocess.run(["buildah", "rmi", f"{NAME}:{tag}"], capture_output=True, check=False)
    return found


@pytest.mark.soak
@pytest.mark.e2e
async def test_the_image_is_installed_and_replaced_on_a_cluster(
    archives: dict[str, Path], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The manifests as they are, but for fake GPUs."""
    record_property("archive_mb", round(archives[pods.FIRST].stat().st_size / 1e6))
    with bare_cluster("image", 18643, nodes=2) as cluster:
        for node, archive in itertools.product(cluster.nodes, archives.values()):
            pods.load(cluster, node, archive)
        pods.apply(cluster, tmp_path, pods.FAKE_GPUS)
        await _rolled_out(cluster, pods.FIRST)
        async with scene(cluster, "image") as here, AsyncExitStack() as stack:
            gaps = [await stack.enter_async_context(slice_gaps(cluster, node)) for node in cluster.nodes]
            await here.template("two", count=2)
            await here.gang("train", 2, "two")
            await here.until("the gang runs", lambda: len(here.running("train-")) == 2)
            began = {pod.metadata.uid for pod in here.running("train-")}
            pods.apply(cluster, tmp_path, pods.FAKE_GPUS, tag=SECOND)
            await _rolled_out(cluster, SECOND)
            await here.gang("later", 2, "two")
            await here.until("another gang runs", lambda: len(here.running("later-")) == 2)
            assert {pod.metadata.uid for pod in here.running("train-")} == began
            record_property("gap_s", round(max(one.longest_s for one in gaps), 2))
            assert max(one.longest_s for one in gaps) < 2


async def _rolled_out(cluster: Cluster, tag: str) -> None:
    try:
        for workload in (f"daemonset/{pods.AGENT}", f"deployment/{pods.CONTROLLER}"):
            await asyncio.to_thread(pods.rolled_out, cluster, workload)
    except ClusterError as error:
        raise AssertionError(pods.explain(cluster)) from error
    for one in (pods.AGENT, pods.CONTROLLER):
        await until(lambda app=one: _images(cluster, app) == {f"gpunode:{tag}"}, f"{one} to run {tag}")  # type: ignore[misc]
        assert len(pods.pods_of(cluster, one)) == 2


def _images(cluster: Cluster, app: str) -> set[str]:
    return {pod["spec"]["containers"][0]["image"] for pod in pods.pods_of(cluster, app)}
