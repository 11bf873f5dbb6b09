"""One node: a mount namespace with containerd and kubelet in it, and its own /run, /var/lib/kubelet and so on.

The namespace lives as long as any process in it: a `sleep` holds it, and if that was killed, the node's other
processes still lead into it. Its mounts vanish with it, so nothing has to be unmounted after a crash.
"""

import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpunode.cluster import config
from gpunode.cluster.build import Binaries
from gpunode.cluster.errors import ClusterError
from gpunode.cluster.image import BUSYBOX_IMAGE, PAUSE_IMAGE
from gpunode.cluster.layout import Layout, NodeFiles
from gpunode.cluster.packages import HostTools
from gpunode.cluster.pki import Pki, client_certificate, kubeconfig, write_secret
from gpunode.cluster.processes import Processes, environment, replace_text
from gpunode.cluster.spec import KUBELET_HEALTH_PORT, NodePlan, Plan

# In the environment of every process of a node, next to the cluster's mark.
NODE_MARKER: Final = "GPUNODE_CLUSTER_NODE"
COMPONENTS: Final = ("kubelet", "containerd", "holder")


def process_name(node: str, component: str) -> str:
    return f"{node}.{component}"


@dataclass(frozen=True, slots=True)
class NodeRunner:
    """Starts the parts of one node; every method leaves alone what is running already."""

    plan: Plan
    node: NodePlan
    layout: Layout
    processes: Processes
    binaries: Binaries
    tools: HostTools

    @property
    def files(self) -> NodeFiles:
        return self.layout.node(self.node)

    def prepare(self) -> None:
        """Directories, certificate and configuration files."""
        files, pki = self.files, Pki(self.layout.pki)
        for source, _ in files.binds:
            if source != files.kmsg:
                source.mkdir(parents=True, exist_ok=True)
        files.kmsg.touch()
        (files.run / "cdi").mkdir(exist_ok=True)
        (files.root / "cni").mkdir(exist_ok=True)
        # The namespace hides the host's /run, where resolv.conf may point to.
        resolv = Path("/etc/resolv.conf")
        replace_text(files.root / "resolv.conf", resolv.read_text() if resolv.exists() else "")
        pair = pki.leaf(
            self.node.name,
            f"/O=system:nodes/CN=system:node:{self.node.name}",
            (f"DNS:{self.node.name}", f"IP:{self.node.address}"),
        )
        user = kubeconfig(self.plan.server, pki.ca.cert.read_bytes(), client_certificate(pair), self.node.name)
        write_secret(self.layout.kubeconfig(self.node.name), user)
        replace_text(files.root / "kubelet.yaml", config.kubelet_config(self.plan, self.node, self.layout, pki))
        snapshotter = "native" if _filesystem(files.root) == "overlay" else "overlayfs"
        containerd = config.containerd_config(files.root, self.tools.runc, self.tools.cni_plugins, snapshotter)
        replace_text(files.root / "containerd.toml", containerd)
        replace_text(files.root / "cni" / "10-bridge.conflist", json.dumps(config.cni_config(self.node)))

    def start_runtime(self) -> None:
        """The namespace, containerd in it, and the images in containerd."""
        self._hold_namespace()
        argv = (self.binaries["containerd"], f"--config={self.files.root / 'containerd.toml'}")
        self._start("containerd", argv)
        self._wait("containerd", self._containerd_answers, 30)
        present = self._ctr("images", "ls", "-q").split()
        images = self.layout.images
        for name, file in ((PAUSE_IMAGE, images / "pause.tar"), (BUSYBOX_IMAGE, images / "busybox.tar")):
            if name not in present:
                self._ctr("images", "import", str(file))

    def start_kubelet(self) -> None:
        argv = config.kubelet(self.node, self.layout)
        self._start("kubelet", (self.binaries["kubelet"], *argv[1:]))

    def kubelet_healthy(self) -> bool:
        """True once it answers; raises ClusterError if it has stopped."""
        self.check("kubelet")
        try:
            url = f"http://{self.node.address}:{KUBELET_HEALTH_PORT}/healthz"
            with urllib.request.urlopen(url, timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def check(self, component: str) -> None:
        """Raises ClusterError with the end of its log if that process is not running."""
        check(self.processes, process_name(self.node.name, component))

    def _start(self, component: str, argv: tuple[str, ...]) -> None:
        name = process_name(self.node.name, component)
        entry = enter(self.processes, self.node.name)
        search = f"{self.binaries.directory('containerd')}:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        self.processes.start(name, (*entry, *argv), env={"PATH": search, NODE_MARKER: self.node.name})

    def _hold_namespace(self) -> None:
        name = process_name(self.node.name, "holder")
        env = {NODE_MARKER: self.node.name}
        if not self.processes.alive(name):
            inside = _any_process(self.processes, self.node.name)
            if inside is None:
                # A new namespace is a new boot of the node: sockets and task state of the old one are void.
                shutil.rmtree(self.files.run, ignore_errors=True)
                (self.files.run / "cdi").mkdir(parents=True)
                argv: tuple[str, ...] = ("unshare", "--mount", "--propagation", "private", "sleep", "infinity")
            else:
                argv = ("nsenter", "-t", str(inside), "-m", "--", "sleep", "infinity")
            self.processes.start(name, argv, env=env)
            self._wait("holder", self._in_namespace, 10)
        self._mount(self._holder())

    def _in_namespace(self) -> bool:
        own = Path("/proc/self/ns/mnt").readlink()
        comm = Path(f"/proc/{self._holder()}/comm")
        return comm.read_text().strip() == "sleep" and Path(f"/proc/{self._holder()}/ns/mnt").readlink() != own

    def _holder(self) -> int:
        record = self.processes.get(process_name(self.node.name, "holder"))
        if record is None:
            raise ClusterError(f"the mount namespace of {self.node.name} is gone: run `gpunode cluster up` again")
        return record.pid

    def _mount(self, holder: int) -> None:
        def mount(*arguments: str) -> None:
            _run("nsenter", "-t", str(holder), "-m", "--", "mount", *arguments)

        state = self.layout.state
        for source, target in self.files.binds:
            if _same_file(source, Path(f"/proc/{holder}/root{target}")):
                continue
            if source != self.files.kmsg:
                target.mkdir(parents=True, exist_ok=True)
            if state.is_relative_to(target):
                # The cluster's own files, which the node's processes name by these paths, must not be hidden.
                kept = source / state.relative_to(target)
                kept.mkdir(parents=True, exist_ok=True)
                mount("--bind", str(state), str(kept))
            mount("--rbind", str(source), str(target))
        # As systemd has it on a real node: what is mounted later reaches the containers that ask for it.
        mount("--make-rshared", "/")

    def _containerd_answers(self) -> bool:
        self.check("containerd")
        return subprocess.run(self._ctr_argv("version"), capture_output=True, check=False).returncode == 0

    def _ctr(self, *args: str) -> str:
        return _run(*self._ctr_argv(*args))

    def _ctr_argv(self, *args: str) -> tuple[str, ...]:
        return (self.binaries["ctr"], "--address", str(self.files.socket), "--namespace", "k8s.io", *args)

    def _wait(self, component: str, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                log = self.processes.log(process_name(self.node.name, component))
                raise ClusterError(f"{component} of {self.node.name} was not ready in {seconds:.0f} s: see {log}")
            time.sleep(0.05)


def enter(processes: Processes, node: str) -> tuple[str, ...]:
    """What to put before a command line so that it runs in the node's mount namespace.

    Raises ClusterError if the namespace is gone.
    """
    record = processes.get(process_name(node, "holder"))
    pid = record.pid if record is not None else _any_process(processes, node)
    if pid is None:
        raise ClusterError(f"node {node} is not running: run `gpunode cluster up`")
    return ("nsenter", "-t", str(pid), "-m", "--")


def check(processes: Processes, name: str) -> None:
    """Raises ClusterError with the end of its log if that process is not running."""
    if not processes.alive(name):
        raise ClusterError(f"{name} stopped right after its start, see {processes.log(name)}: {processes.tail(name)}")


def _any_process(processes: Processes, node: str) -> int | None:
    """A live process inside the node's namespace, also one whose record was lost."""
    own = Path("/proc/self/ns/mnt").readlink()
    for pid in processes.marked():
        with contextlib.suppress(OSError):
            if environment(pid).get(NODE_MARKER) == node and Path(f"/proc/{pid}/ns/mnt").readlink() != own:
                return pid
    return None


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _filesystem(path: Path) -> str:
    return _run("stat", "--file-system", "--format", "%T", str(path)).strip().removesuffix("fs")


def _run(*argv: str) -> str:
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ClusterError(f"`{' '.join(argv)}` failed: {(result.stderr or result.stdout).strip()}")
    return result.stdout
