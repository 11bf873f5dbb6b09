"""Decisions of `up` and the command line, without starting anything."""

import json
import os
import socket

import pytest
from typer.testing import CliRunner

from gpunode.cli.cluster import app
from gpunode.cluster import lifecycle, network
from gpunode.cluster.cluster import load
from gpunode.cluster.errors import ClusterError
from gpunode.cluster.layout import layout
from gpunode.cluster.lifecycle import check_ports, decide, up
from gpunode.cluster.processes import Processes
from gpunode.cluster.spec import ClusterSpec, Plan


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUNODE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("GPUNODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(network, "routes", lambda _prefix: [])
    return tmp_path / "state"


def can_bind(port):
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@pytest.fixture
def port():
    """A port that is free together with the four after it."""
    return next(port for port in range(21000, 30000, 5) if all(can_bind(port + n) for n in range(5)))


def test_a_port_in_use_is_named_and_nothing_is_left(port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", port + 3))
        other.listen(1)
        with pytest.raises(ClusterError, match=f"port {port + 3} on 127.0.0.1 is in use, kube-controller-manager"):
            decide(ClusterSpec("x", port=port), layout("x"))
    assert not layout("x").state.exists()
    assert load("x") is None


def test_ports_of_our_own_running_processes_do_not_count(root, port):
    processes = Processes(root / "x")
    plan = Plan(ClusterSpec("x", port=port), 10)
    with socket.socket() as ours:
        ours.bind(("127.0.0.1", port))
        ours.listen(1)
        with pytest.raises(ClusterError, match="kube-apiserver"):
            check_ports(plan, processes)
        processes.start("kube-apiserver", ("sleep", "99"))
        try:
            check_ports(plan, processes)
        finally:
            processes.kill("kube-apiserver")


def test_clusters_get_different_slots_and_keep_them(port, monkeypatch):
    # A cluster that is up on this machine may hold the addresses of these slots.
    monkeypatch.setattr(lifecycle, "check_ports", lambda _plan, _processes: None)
    first = decide(ClusterSpec("a", port=port), layout("a"))
    second = decide(ClusterSpec("b", port=port), layout("b"))
    assert (first.slot, second.slot) == (0, 1)
    grown = decide(ClusterSpec("b", nodes=5, port=port), layout("b"))
    assert (grown.slot, len(grown.nodes)) == (1, 5)
    assert layout("b").read_plan() == grown


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nodes": 2}, "exists with 3 nodes, more than 2"),
        ({"kubernetes": "1.36.3"}, "exists with Kubernetes 1.37.2, not 1.36.3"),
        ({"port": 20001}, "exists with port 20000, not 20001"),
        ({"node_prefix": "n"}, "exists with node prefix gpu-node, not n"),
    ],
)
def test_other_settings_than_those_of_the_cluster_are_refused(change, says):
    fields = {"name": "x", "nodes": 3, "port": 20000}
    layout("x").write_plan(Plan(ClusterSpec(**fields), 0))
    with pytest.raises(ClusterError, match=f"{says}: run `gpunode cluster down --name x` first"):
        decide(ClusterSpec(**fields | change), layout("x"))


def test_processes_without_their_cluster_are_not_built_upon(root):
    processes = Processes(root / "x")
    processes.start("etcd", ("sleep", "99"))
    try:
        with pytest.raises(ClusterError, match="its state is lost: run `gpunode cluster down --name x` first"):
            decide(ClusterSpec("x"), layout("x"))
    finally:
        processes.kill("etcd")


def test_up_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="needs root"):
        up(ClusterSpec("x"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ClusterError, match=r"not built for 1\.37\.2: .*run `gpunode cluster build"):
        up(ClusterSpec("x"))
    monkeypatch.setattr(lifecycle.sys, "platform", "darwin")
    with pytest.raises(ClusterError, match="needs Linux"):
        up(ClusterSpec("x"))


def run(*args):
    return CliRunner().invoke(app, args)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("status", "--name", "x"), "there is no cluster x: run `gpunode cluster up --name x`"),
        (("kubeconfig",), "there is no cluster default: run `gpunode cluster up`"),
        (("status", "--name", "../x"), "cluster name '../x'"),
        (("up", "--nodes", "0"), "0 nodes"),
        (("build", "--kubernetes", "1.35.0"), "'1.35.0' is not supported"),
    ],
)
def test_errors_are_one_sentence_and_status_1(args, says, monkeypatch):
    monkeypatch.setattr("gpunode.cluster.packages.missing", lambda: ())
    result = run(*args)
    assert result.exit_code == 1
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_status_of_a_stopped_cluster_lists_its_parts_and_fails(port):
    layout("x").write_plan(Plan(ClusterSpec("x", nodes=1, port=port), 0))
    result = run("status", "--name", "x", "-o", "json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    parts = {row["component"]: row["running"] for row in document["components"]}
    assert parts["gpu-node-0.kubelet"] is False
    assert set(parts) >= {"etcd", "kube-apiserver", "kube-scheduler", "gpu-node-0.containerd"}
    table = run("status", "--name", "x")
    assert "gpu-node-0.kubelet" in table.stdout
    assert "not running" in table.stdout


def test_kubeconfig_prints_the_path_or_the_content():
    layout("x").write_plan(Plan(ClusterSpec("x"), 0))
    assert "cannot be read" in run("kubeconfig", "--name", "x").stderr
    file = layout("x").kubeconfig("admin")
    file.parent.mkdir()
    file.write_text("{}")
    assert run("kubeconfig", "--name", "x", "--path").stdout == f"{file}\n"
    assert run("kubeconfig", "--name", "x").stdout == "{}\n"
