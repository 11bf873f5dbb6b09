"""Finding and installing what comes from the distribution, with stand-ins for its programs."""

import os
from pathlib import Path

import pytest

from gpunode.cluster import packages
from gpunode.cluster.errors import ClusterError

PROGRAMS = ("runc", "busybox", "iptables", "iptables-restore", "ip", "openssl", "nsenter", "unshare", "mount")
PLUGINS = ("bridge", "host-local")


def program(path: Path, text: str = "#!/bin/sh\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine that has everything."""
    for name in PROGRAMS:
        program(tmp_path / "bin" / name)
    for name in PLUGINS:
        program(tmp_path / "cni" / name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(packages, "_SEARCH", ())
    monkeypatch.setattr(packages, "_CNI_DIRECTORIES", (str(tmp_path / "cni"),))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path


def test_everything_is_found_where_it_is(machine):
    tools = packages.find()
    assert tools.runc == str(machine / "bin" / "runc")
    assert tools.busybox == machine / "bin" / "busybox"
    assert tools.cni_plugins == str(machine / "cni")
    assert packages.missing() == ()


@pytest.mark.parametrize(
    ("gone", "package"),
    [
        ("bin/runc", "runc"),
        ("bin/busybox", "busybox-static"),
        ("bin/iptables-restore", "iptables"),
        ("cni/host-local", "containernetworking-plugins"),
        ("bin/openssl", "openssl"),
    ],
)
def test_what_is_missing_is_named_by_its_package(machine, gone, package):
    (machine / gone).unlink()
    assert packages.missing() == (package,)
    with pytest.raises(ClusterError, match=f"not installed: {package}; run `gpunode cluster build`"):
        packages.find()


def test_a_busybox_that_needs_a_loader_does_not_do(machine):
    """An image of one file has no shared libraries."""
    (machine / "bin" / "busybox").write_text("ELF /lib64/ld-linux-x86-64.so.2")
    assert packages.missing() == ("busybox-static",)


def install(machine, apt):
    """Runs install with this apt-get and returns what was said and what apt-get was asked."""
    if apt is not None:
        program(machine / "bin" / "apt-get", f'#!/bin/sh\necho "$@" >> {machine}/asked\n{apt}')
    said = []
    packages.install(said.append)
    return said, (machine / "asked").read_text().splitlines()


def test_missing_packages_are_installed_at_once(machine):
    (machine / "bin" / "runc").unlink()
    (machine / "bin" / "iptables").unlink()
    made = "\n".join(f": > {machine}/bin/{name}; /bin/chmod +x {machine}/bin/{name}" for name in ("runc", "iptables"))
    said, asked = install(machine, made)
    assert said == ["Installing iptables runc"]
    assert asked == ["--quiet update", "--quiet install --yes --no-install-recommends iptables runc"]


def test_nothing_is_installed_when_nothing_is_missing(machine):
    said = []
    packages.install(said.append)
    assert said == []


def test_without_apt_root_or_network_the_sentence_says_so(machine, monkeypatch):
    (machine / "bin" / "runc").unlink()
    with pytest.raises(ClusterError, match="no apt-get: install the equivalents of runc"):
        install(machine, None)
    with pytest.raises(ClusterError, match="is there a network\\? E: cannot resolve"):
        install(machine, "echo 'E: cannot resolve' >&2; exit 100")
    with pytest.raises(ClusterError, match="runc is still not found"):
        install(machine, "exit 0")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="takes root"):
        install(machine, "exit 0")
