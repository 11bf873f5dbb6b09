"""Taking a cluster away without a trace, whatever is left of it.

First the friendly way, bounded in time: pods are deleted through the API server, so that kubelet and containerd undo
what they did. Then the sure way, which needs no cooperation: everything is found by marks that survive a kill -9 and
a lost state directory - processes by their environment, containers by their cgroups, bridges and rules by their names.
"""

import contextlib
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from gpunode.cluster import host, network
from gpunode.cluster.build import Report
from gpunode.cluster.cluster import CONTROL_PLANE, admin_api
from gpunode.cluster.errors import ClusterError
from gpunode.cluster.layout import Layout, layout, locked, plans, saved_settings
from gpunode.cluster.lifecycle import quiet, require_root
from gpunode.cluster.nodes import COMPONENTS, process_name
from gpunode.cluster.paths import state_root
from gpunode.cluster.processes import Processes, start_ticks, stop_pids
from gpunode.cluster.spec import Plan, check_name

_PODS_SECONDS: Final = 15.0
_CGROUPS: Final = Path("/sys/fs/cgroup")
# Parent cgroup of CRI containers when kubelet names none.
_CONTAINERS: Final = "k8s.io"
_SHIM: Final = "containerd-shim"
# Mount points that `up` makes on the host; other software may use them too, so only empty ones are removed.
_MOUNT_POINTS: Final = ("/var/lib/kubelet", "/var/lib/cni", "/var/run/netns", "/var/lib/gpunode")


def down(name: str = "default", report: Report = quiet) -> bool:
    """Stops every process of the cluster and removes its state, mounts, bridges, rules and cgroups.

    Returns False if there was nothing of a cluster of that name.
    Raises ClusterError if it is not root, the cluster is being worked on, or a process outlives SIGKILL.
    """
    check_name(name)
    require_root()
    with locked(name, wait=False):
        where = layout(name)
        processes = Processes(where.state)
        plan = _plan_if_readable(where)
        processes.adopt()
        existed = where.state.exists() or bool(processes.marked())
        if plan is not None:
            report("Deleting pods", 0.0)
            _delete_pods(plan, where, processes)
        report("Stopping kubelets", 0.5)
        last = _last_to_stop(plan)
        processes.stop_all(set(processes.names()) - last)
        report("Stopping container runtimes", 0.7)
        processes.stop_all(n for n in processes.names() if n not in CONTROL_PLANE and not n.endswith(".holder"))
        containers = _containers(where, processes)
        _kill_strays(processes, containers)
        report("Stopping the API server and etcd", 0.8)
        processes.stop_all(("kube-apiserver",))
        processes.stop_all(processes.names())
        stop_pids(processes.marked(), grace=0)
        if left := processes.marked():
            raise ClusterError(f"processes {sorted(left)} of cluster {name} cannot be killed: see them with ps")
        report("Removing network and files", 0.9)
        network.remove(name)
        _remove_cgroups(containers)
        shutil.rmtree(where.state, ignore_errors=True)
        _restore_host()
        report(f"Cluster {name} is gone", 1.0)
    return existed


def _plan_if_readable(where: Layout) -> Plan | None:
    with contextlib.suppress(ClusterError):
        return where.read_plan()
    return None


def _last_to_stop(plan: Plan | None) -> set[str]:
    """What must outlive the kubelets and all processes that others started in the cluster."""
    nodes = plan.nodes if plan is not None else ()
    runtime = {process_name(node.name, part) for node in nodes for part in COMPONENTS if part != "kubelet"}
    return {*runtime, "etcd", "kube-apiserver"}


def _delete_pods(plan: Plan, where: Layout, processes: Processes) -> None:
    """Deletes all pods and waits, for a bounded time, until no container is left."""
    # They would replace the pods as fast as they go.
    processes.stop_all(("kube-controller-manager", "kube-scheduler"))
    api = admin_api(plan, where)
    try:
        pods = api.call("GET", "/api/v1/pods?resourceVersion=0")["items"]
    except ClusterError:
        return

    def delete(pod: dict[str, dict[str, str]]) -> None:
        meta = pod["metadata"]
        with contextlib.suppress(ClusterError):
            api.call("DELETE", f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}?gracePeriodSeconds=1")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(delete, pods))
    deadline = time.monotonic() + _PODS_SECONDS
    # Finalizers of Jobs keep the objects, since their controller has stopped; containers are what counts.
    while _shims(processes) and time.monotonic() < deadline:
        if not any(processes.alive(process_name(node.name, "kubelet")) for node in plan.nodes):
            return
        time.sleep(0.2)


def _shims(processes: Processes) -> dict[int, int]:
    return {pid: ticks for pid, ticks in processes.marked().items() if _SHIM in _command(pid)}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _containers(where: Layout, processes: Processes) -> set[str]:
    """Ids of containers that may still exist: those containerd has state of, and those under a shim of ours."""
    found = {
        bundle.name
        for pattern in ("run/containerd", "containerd")
        for bundle in where.state.glob(f"nodes/*/{pattern}/io.containerd.runtime.v2.task/k8s.io/*")
        if bundle.is_dir()
    }
    shims = _shims(processes)
    for pid in _numbered(Path("/proc")):
        if _parent(pid) in shims:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
                    _, _, container = line.rpartition(f"/{_CONTAINERS}/")
                    if container != line:
                        found.add(container)
    return found


def _numbered(directory: Path) -> Iterable[int]:
    return (int(entry.name) for entry in directory.iterdir() if entry.name.isdigit())


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat[stat.rindex(")") + 2 :].split()[1])


def _kill_strays(processes: Processes, containers: set[str]) -> None:
    """Kills the shims, then what is in the containers' cgroups: a shim would report, and start, nothing more."""
    keep = {record.pid for name in CONTROL_PLANE if (record := processes.get(name)) is not None}
    stop_pids({pid: ticks for pid, ticks in processes.marked().items() if pid not in keep}, grace=0)
    for _ in range(3):
        members = {
            pid: ticks
            for directory in _cgroup_directories(containers)
            for pid in _members(directory)
            if (ticks := start_ticks(pid)) is not None
        }
        if not members:
            return
        stop_pids(members, grace=0)


def _cgroup_directories(containers: set[str]) -> list[Path]:
    """Their directories in every hierarchy of cgroup v1, or in the one of cgroup v2; deepest first."""
    roots = [_CGROUPS, *(entry for entry in _CGROUPS.iterdir() if entry.is_dir())] if _CGROUPS.exists() else []
    tops = [root / _CONTAINERS / container for root in roots for container in containers]
    return [directory for top in tops if top.is_dir() for directory in (*sorted(_below(top), reverse=True), top)]


def _below(directory: Path) -> list[Path]:
    return [entry for entry in directory.rglob("*") if entry.is_dir()]


def _members(directory: Path) -> list[int]:
    try:
        return [int(line) for line in (directory / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _remove_cgroups(containers: set[str]) -> None:
    """A cgroup cannot be removed while a killed process is still being torn down, so this tries for a second."""
    for _ in range(20):
        left = _cgroup_directories(containers)
        for directory in left:
            with contextlib.suppress(OSError):
                directory.rmdir()
        if not left:
            break
        time.sleep(0.05)
    for parent in (_CGROUPS / _CONTAINERS, *_CGROUPS.glob(f"*/{_CONTAINERS}")):
        # Refused, as it should be, while another cluster has containers there.
        with contextlib.suppress(OSError):
            parent.rmdir()


def _restore_host() -> None:
    """After the last cluster: kernel settings as they were, and the empty mount points gone."""
    if plans() or network.any_left():
        return
    host.restore_settings(saved_settings())
    for point in (state_root(), *_MOUNT_POINTS):
        with contextlib.suppress(OSError):
            Path(point).rmdir()
