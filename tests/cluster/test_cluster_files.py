"""Images, keys and stored plans: what a cluster keeps on disk."""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile

import pytest

from gpunode.cluster.errors import ClusterError
from gpunode.cluster.image import archive
from gpunode.cluster.layout import Layout, layout, locked, plans
from gpunode.cluster.pki import Pki, client_certificate, kubeconfig, write_secret
from gpunode.cluster.spec import ClusterSpec, Plan

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl program is not installed")


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUNODE_STATE", str(tmp_path))
    return tmp_path


def members(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {info.name: (info, tar.extractfile(info).read() if info.isfile() else b"") for info in tar}


def test_an_image_names_its_parts_by_their_digests():
    outer = members(archive("localhost/busybox:1", b"ELF", ["/bin/sh"], "amd64"))
    (manifest,) = json.loads(outer["manifest.json"][1])
    assert manifest["RepoTags"] == ["localhost/busybox:1"]
    config = json.loads(outer[manifest["Config"]][1])
    assert config["architecture"] == "amd64"
    assert config["config"]["Entrypoint"] == ["/bin/sh"]
    (layer_name,) = manifest["Layers"]
    layer = outer[layer_name][1]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    inner = members(layer)
    assert inner["bin/busybox"][1] == b"ELF"
    assert inner["bin/busybox"][0].mode == 0o755
    for name in (
        "sh",
        "sleep",
        "env",
        "cat",
        "ls",
        "echo",
        "true",
        "date",
        "nproc",
        "wget",
        "nc",
        "grep",
        "stat",
        "od",
    ):
        assert inner[f"bin/{name}"][0].linkname == "busybox"


def test_an_image_is_the_same_each_time():
    assert archive("a:1", b"x", ["/bin/sh"], "arm64") == archive("a:1", b"x", ["/bin/sh"], "arm64")


@needs_openssl
def test_leaf_certificates_verify_against_their_authority_and_are_kept(tmp_path):
    pki = Pki(tmp_path / "pki")
    pki.prepare()
    leaf = pki.leaf("node", "/O=system:nodes/CN=system:node:n0", ("DNS:n0", "IP:10.244.0.1"))
    subprocess.run(["openssl", "verify", "-CAfile", pki.ca.cert, leaf.cert], check=True, capture_output=True)
    shown = subprocess.run(
        ["openssl", "x509", "-in", leaf.cert, "-noout", "-text"], check=True, capture_output=True, text=True
    ).stdout
    assert "CA:FALSE" in shown
    assert shown.count("Basic Constraints") == 1
    assert "IP Address:10.244.0.1" in shown
    before = {file.name: file.read_bytes() for file in pki.directory.iterdir()}
    pki.prepare()
    pki.leaf("node", "/O=system:nodes/CN=system:node:n0")
    assert {file.name: file.read_bytes() for file in pki.directory.iterdir()} == before
    assert all(file.stat().st_mode & 0o077 == 0 for file in pki.directory.glob("*.key"))


@needs_openssl
def test_a_key_without_its_certificate_is_made_anew(tmp_path):
    pki = Pki(tmp_path / "pki")
    pki.prepare()
    leaf = pki.leaf("a", "/CN=a")
    leaf.cert.unlink()
    pki.leaf("a", "/CN=a")
    of_cert, of_key = (
        subprocess.run(["openssl", *args, "-noout", "-pubkey"], check=True, capture_output=True).stdout
        if args[0] == "x509"
        else subprocess.run(["openssl", *args, "-pubout"], check=True, capture_output=True).stdout
        for args in (["x509", "-in", leaf.cert], ["pkey", "-in", leaf.key])
    )
    assert of_cert == of_key


@needs_openssl
def test_openssl_failures_are_one_sentence(tmp_path):
    pki = Pki(tmp_path / "pki")
    pki.prepare()
    with pytest.raises(ClusterError, match="openssl req failed"):
        pki.leaf("a", "not a subject")


def test_a_kubeconfig_needs_no_other_file(tmp_path):
    for name in ("a.crt", "a.key"):
        (tmp_path / name).write_bytes(b"pem")
    user = client_certificate(Pki(tmp_path)._pair("a"))
    text = json.loads(kubeconfig("https://127.0.0.1:1", b"ca", user, "ctx"))
    assert text["current-context"] == text["contexts"][0]["name"] == "ctx"
    assert text["clusters"][0]["cluster"]["certificate-authority-data"] == "Y2E="
    assert text["users"][0]["user"] == {"client-certificate-data": "cGVt", "client-key-data": "cGVt"}
    write_secret(tmp_path / "d" / "k", "secret")
    assert (tmp_path / "d" / "k").stat().st_mode & 0o777 == 0o600


def test_a_plan_is_read_back_as_written(root):
    plan = Plan(ClusterSpec("x", 5, "1.36.3", 20000, "n"), 3)
    layout("x").write_plan(plan)
    assert layout("x").read_plan() == plan
    assert plans() == (plan,)
    assert layout("y").read_plan() is None


@pytest.mark.parametrize("text", ["", "{}", '{"spec": {"name": "x"}}', '{"spec": {"nope": 1}, "slot": 0}', "[]"])
def test_a_broken_plan_is_named_and_does_not_stop_other_clusters(root, text):
    layout("ok").write_plan(Plan(ClusterSpec("ok"), 0))
    (root / "bad").mkdir()
    (root / "bad" / "cluster.json").write_text(text)
    with pytest.raises(ClusterError, match="cluster down --name bad"):
        Layout(root / "bad").read_plan()
    assert [plan.spec.name for plan in plans()] == ["ok"]


def test_a_second_command_on_the_same_cluster_is_refused():
    with locked("x", wait=False):
        with pytest.raises(ClusterError, match="another gpunode command"), locked("x", wait=False):
            pass
        with locked("y", wait=False):
            pass
    with locked("x", wait=False):
        pass
