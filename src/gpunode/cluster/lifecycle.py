"""Bringing a cluster up. Everything is "make it so": a second `up` finds all in place, one after a crash repairs."""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from gpunode.cluster import build, config, host, image, network, packages
from gpunode.cluster.build import Binaries, Report
from gpunode.cluster.cluster import ADMIN, CONTROL_PLANE, Cluster, load
from gpunode.cluster.errors import ClusterError
from gpunode.cluster.layout import Layout, layout, locked, plans, saved_settings
from gpunode.cluster.nodes import NodeRunner, check
from gpunode.cluster.packages import HostTools
from gpunode.cluster.pki import KeyPair, Pki, client_certificate, kubeconfig, write_secret
from gpunode.cluster.processes import Processes
from gpunode.cluster.spec import KUBELET_HEALTH_PORT, KUBELET_PORT, ClusterSpec, Plan, bridge_prefix, free_slot

__all__ = ["load", "up"]

# How many nodes start at the same time: more only makes them wait for each other's disk and processor.
_PARALLEL_NODES: Final = 4
_APISERVER_SECONDS: Final = 60.0
_READY_SECONDS: Final = 120.0
_IP_FREEBIND: Final = 15


def quiet(_step: str, _done: float) -> None:
    """A Report that says nothing."""


def require_root() -> None:
    """Raises ClusterError unless this is root on Linux."""
    if sys.platform != "linux":
        raise ClusterError("a local cluster needs Linux: kubelet and containerd run as processes of this machine")
    if os.geteuid() != 0:
        raise ClusterError("a local cluster needs root for mounts, bridges and containers: run this command with sudo")


def up(spec: ClusterSpec, report: Report = quiet) -> Cluster:
    """Brings the cluster up, or repairs or extends the one of that name, and waits until every node is Ready.

    Raises ClusterError if it cannot: not root, not built, a port in use, other settings than the running cluster's.
    """
    require_root()
    binaries, tools = build.find(spec.kubernetes), packages.find()
    with locked(spec.name, wait=False):
        where = layout(spec.name)
        plan = decide(spec, where)
        report("Preparing keys, configuration and network", 0.0)
        image.write_images(tools.busybox, where.images)
        pki = _write_identities(plan, where)
        host.raise_settings(saved_settings())
        network.ensure(plan)
        _start(plan, where, pki, binaries, tools, report)
    return Cluster(plan, where)


def _start(plan: Plan, where: Layout, pki: Pki, binaries: Binaries, tools: HostTools, report: Report) -> None:
    processes = Processes(where.state)
    runners = [NodeRunner(plan, node, where, processes, binaries, tools) for node in plan.nodes]
    report("Starting the control plane", 0.05)

    def run(argv: tuple[str, ...]) -> None:
        processes.start(argv[0], (binaries[argv[0]], *argv[1:]))

    with ThreadPoolExecutor(_PARALLEL_NODES) as pool:
        run(config.etcd(plan, where, pki))
        run(config.apiserver(plan, pki))
        # containerd and the images take as long as the API server does, so they start beside it.
        runtimes = [pool.submit(_start_runtime, runner) for runner in runners]
        cluster = Cluster(plan, where)
        _wait_for(cluster.api.ready, processes, ("etcd", "kube-apiserver"), "API server", _APISERVER_SECONDS)
        run(config.controller_manager(plan, where, pki))
        run(config.scheduler(plan, where))
        for number, (runner, runtime) in enumerate(zip(runners, runtimes, strict=True)):
            report(f"Starting {runner.node.name}", 0.2 + 0.5 * number / len(runners))
            runtime.result()
            runner.start_kubelet()
    _wait_ready(cluster, runners, report)


def _start_runtime(runner: NodeRunner) -> None:
    runner.prepare()
    runner.start_runtime()


def decide(spec: ClusterSpec, where: Layout) -> Plan:
    """The plan to carry out; stored before anything is started.

    Raises ClusterError if it cannot be.
    """
    stored, processes = where.read_plan(), Processes(where.state)
    if stored is None:
        if processes.marked():
            raise ClusterError(
                f"processes of an earlier cluster {spec.name} are running, but its state is lost: "
                f"run `gpunode cluster down --name {spec.name}` first"
            )
        with locked("slots", wait=True):
            taken = {plan.slot for plan in plans() if plan.spec.name != spec.name}
            plan = Plan(spec, free_slot(taken, network.routes(bridge_prefix(spec.name))))
            check_ports(plan, processes)
            where.write_plan(plan)
        return plan
    old = stored.spec
    down = f"run `gpunode cluster down --name {spec.name}` first"
    for what, before, wished in (
        ("Kubernetes", old.kubernetes, spec.kubernetes),
        ("port", old.port, spec.port),
        ("node prefix", old.node_prefix, spec.node_prefix),
    ):
        if before != wished:
            raise ClusterError(f"cluster {spec.name} exists with {what} {before}, not {wished}: {down}")
    if spec.nodes < old.nodes:
        raise ClusterError(f"cluster {spec.name} exists with {old.nodes} nodes, more than {spec.nodes}: {down}")
    plan = Plan(spec, stored.slot)
    processes.adopt()
    check_ports(plan, processes)
    where.write_plan(plan)
    return plan


def check_ports(plan: Plan, processes: Processes) -> None:
    """Raises ClusterError naming the first port that a process of ours is to listen on and somebody else does."""
    wanted: list[tuple[str, str, int]] = [
        ("etcd", "127.0.0.1", plan.etcd_port),
        ("etcd", "127.0.0.1", plan.etcd_peer_port),
        ("kube-apiserver", "127.0.0.1", plan.spec.port),
        ("kube-controller-manager", "127.0.0.1", plan.controller_manager_port),
        ("kube-scheduler", "127.0.0.1", plan.scheduler_port),
    ]
    for node in plan.nodes:
        wanted += [(f"{node.name}.kubelet", str(node.address), port) for port in (KUBELET_PORT, KUBELET_HEALTH_PORT)]
    for name, address, port in wanted:
        if not processes.alive(name) and not _is_free(address, port):
            raise ClusterError(f"port {port} on {address} is in use, {name} needs it: free it or choose another --port")


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a connection that lingers in TIME_WAIT is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # The bridge that is to have the address may not exist yet.
        probe.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError:
            return False
        return True


def _write_identities(plan: Plan, where: Layout) -> Pki:
    pki = Pki(where.pki)
    pki.prepare()
    names = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
    addresses = ("127.0.0.1", str(plan.service_address))
    alternative = (*(f"DNS:{name}" for name in names), *(f"IP:{address}" for address in addresses))
    pki.leaf("apiserver", "/CN=kube-apiserver", alternative)
    pki.leaf("apiserver-kubelet", "/O=system:masters/CN=kube-apiserver-kubelet-client")
    pki.leaf("etcd", "/CN=etcd", ("IP:127.0.0.1",), ca="etcd-ca")
    pki.leaf("etcd-client", "/CN=kube-apiserver", ca="etcd-ca")
    pki.leaf("front-proxy-client", "/CN=front-proxy-client", ca="front-proxy-ca")
    users = {ADMIN: pki.leaf(ADMIN, "/O=system:masters/CN=admin")}
    for name in ("kube-controller-manager", "kube-scheduler"):
        users[name] = pki.leaf(name, f"/CN=system:{name}")
    _write_kubeconfigs(plan, where, pki, users)
    return pki


def _write_kubeconfigs(plan: Plan, where: Layout, pki: Pki, users: dict[str, KeyPair]) -> None:
    ca = pki.ca.cert.read_bytes()
    for name, pair in users.items():
        text = kubeconfig(plan.server, ca, client_certificate(pair), f"gpunode-{plan.spec.name}")
        write_secret(where.kubeconfig(name), text)


def _wait_for(
    condition: Callable[[], bool], processes: Processes, names: Iterable[str], what: str, seconds: float
) -> None:
    """Raises ClusterError at once if one of the processes stops, or after `seconds`."""
    deadline = time.monotonic() + seconds
    watched = tuple(names)
    while not condition():
        for name in watched:
            check(processes, name)
        if time.monotonic() > deadline:
            raise ClusterError(f"the {what} was not ready in {seconds:.0f} s: see {processes.state / 'logs'}")
        time.sleep(0.1)


def _wait_ready(cluster: Cluster, runners: list[NodeRunner], report: Report) -> None:
    """A Node may still say Ready from before its kubelet was killed, so the kubelet itself is asked as well."""
    total = len(runners)

    def all_ready() -> bool:
        status = cluster.node_status()
        ready = sum(1 for runner in runners if runner.kubelet_healthy() and status.get(runner.node.name))
        report(f"{ready} of {total} nodes are Ready", 0.7 + 0.3 * ready / total)
        return ready == total

    names = [*CONTROL_PLANE, *(f"{runner.node.name}.containerd" for runner in runners)]
    _wait_for(all_ready, cluster.processes, names, "whole cluster", _READY_SECONDS)
