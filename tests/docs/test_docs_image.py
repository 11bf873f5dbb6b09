"""The image: what its Dockerfile promises, and, where buildah is installed, the image itself."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.documents import ROOT

BASE, NAME = "localhost/gpunode-test-base", "localhost/gpunode-test"
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


def test_what_is_copied_is_sent_to_the_builder() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        name for word, rest in INSTRUCTIONS if word == "COPY" and "--from" not in rest for name in rest.split()[:-1]
    }
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """Built on a base of this machine's Debian, without a registry."""
    for tool in ("buildah", "debootstrap"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (apt-get install buildah debootstrap)")
    yield from _build()


def _build() -> Iterator[str]:
    root = Path("/var/tmp/gpunode-test-base")
    try:
        shutil.rmtree(root, ignore_errors=True)
        _run("debootstrap", "--variant=minbase", "--include=python3,ca-certificates", "bookworm", str(root))
        # Behind a proxy with an authority of its own the build needs it too.
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", root / "etc/ssl/certs/ca-certificates.crt")
        container = _run("buildah", "from", "scratch").strip()
        _run("buildah", "add", container, str(root), "/")
        _run("buildah", "commit", "--rm", container, BASE)
        _run("buildah", "bud", "--isolation", "chroot", "--build-arg", f"BASE={BASE}", "-t", NAME, str(ROOT))
        yield NAME
    finally:
        shutil.rmtree(root, ignore_errors=True)
        for one in (NAME, BASE):
            subprocess.run(["buildah", "rmi", one], capture_output=True, check=False)


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.soak
def test_the_image_builds_and_runs(image: str, record_property: Callable[[str, object], None]) -> None:
    record_property("size", _run("buildah", "images", "--format", "{{.Size}}", image).strip())
    record_property("base_size", _run("buildah", "images", "--format", "{{.Size}}", BASE).strip())
    container = _run("buildah", "from", image).strip()
    try:
        shown = _run("buildah", "run", "--isolation", "chroot", container, "--", "gpunode", "fake", "list")
        assert "dgx-a100-80" in shown
        assert _run("buildah", "run", "--isolation", "chroot", container, "--", "id", "-u").strip() == "65532"
    finally:
        _run("buildah", "rm", container)
