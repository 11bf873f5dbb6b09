"""A real cluster: needs root and the binaries that `gpunode cluster build` makes."""

import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from gpunode.cluster import build, packages
from gpunode.cluster.cluster import load
from gpunode.cluster.down import down
from gpunode.cluster.errors import ClusterError
from gpunode.cluster.layout import layout
from gpunode.cluster.lifecycle import require_root, up
from gpunode.cluster.processes import Processes
from gpunode.cluster.spec import DEFAULT_KUBERNETES, ClusterSpec, bridge_prefix, tag

pytestmark = pytest.mark.e2e

NAME, PORT = "e2e-cluster", 26443


def unavailable():
    try:
        require_root()
        packages.find()
        build.find(DEFAULT_KUBERNETES)
    except ClusterError as error:
        return str(error)
    return ""


if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def cluster():
    down(NAME)
    yield up(ClusterSpec(NAME, nodes=2, port=PORT))
    down(NAME)


def kubectl(cluster, *args, kubeconfig=None):
    argv = [cluster.kubectl, f"--kubeconfig={kubeconfig or cluster.kubeconfig}", *args]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout


def wait_for(condition, what, seconds=40.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.2)
    return found


def run_pod(cluster, name, node=None, **spec):
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {"name": "c", "image": "localhost/busybox:1", "command": ["sh", "-c", "echo hello; sleep 3600"]}
            ],
            **({"nodeName": node} if node else {}),
            **spec,
        },
    }
    # The ServiceAccount that pods need is made by a controller shortly after the cluster is up.
    account = "/api/v1/namespaces/default/serviceaccounts/default"
    wait_for(lambda: answers(cluster, account), "the default ServiceAccount")
    cluster.api.call("POST", "/api/v1/namespaces/default/pods", pod)
    kubectl(cluster, "wait", "--for=condition=Ready", f"pod/{name}", "--timeout=40s")


def can_exec(cluster, pod):
    try:
        return kubectl(cluster, "exec", pod, "--", "true") == ""
    except subprocess.CalledProcessError:
        return False


def answers(cluster, path):
    try:
        return cluster.api.call("GET", path)
    except ClusterError:
        return None


def traces(name, containers=()):
    """Everything of a cluster that is still on this machine."""

    def output(*argv):
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    where = layout(name)
    links = [link["ifname"] for link in json.loads(output("ip", "-j", "link")) if bridge_prefix(name) in str(link)]
    rules = [line for line in iptables() if tag(name) in line]
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(where.state) in line]
    cgroups = [str(path) for one in containers for path in Path("/sys/fs/cgroup").glob(f"**/k8s.io/{one}")]
    left = {
        "processes": Processes(where.state).marked(),
        "links": links,
        "rules": rules,
        "mounts": mounts,
        "cgroups": cgroups,
        "state": [str(path) for path in where.state.rglob("*")] if where.state.exists() else [],
    }
    return {what: found for what, found in left.items() if found}


def iptables():
    lines = []
    for table in ("nat", "filter", "mangle"):
        argv = ("iptables", "-w", "-t", table, "-S")
        lines += subprocess.run(argv, check=True, capture_output=True, text=True).stdout.splitlines()
    return lines


def container_ids(cluster):
    return [path.name for path in cluster.layout.state.glob("nodes/*/run/containerd/*v2.task/k8s.io/*")]


def container_pids(ids):
    found = set()
    for one in ids:
        for procs in Path("/sys/fs/cgroup").glob(f"**/k8s.io/{one}/cgroup.procs"):
            found |= {int(line) for line in procs.read_text().split()}
    return found


def test_up_again_leaves_running_processes_alone(cluster):
    before = {name: cluster.processes.get(name) for name in cluster.component_names()}
    assert None not in before.values()
    up(ClusterSpec(NAME, nodes=2, port=PORT))
    assert {name: cluster.processes.get(name) for name in cluster.component_names()} == before


def test_nodes_are_ready_at_their_own_addresses(cluster):
    assert cluster.node_status() == {"gpu-node-0": True, "gpu-node-1": True}
    shown = {}
    for item in cluster.api.call("GET", "/api/v1/nodes")["items"]:
        shown[item["metadata"]["name"]] = item["status"]["addresses"][0]["address"]
        assert item["status"]["nodeInfo"]["kubeletVersion"] == f"v{DEFAULT_KUBERNETES}"
    assert shown == {node.name: node.address for node in cluster.nodes}


def test_pods_have_logs_exec_and_the_api_server(cluster):
    for number, node in enumerate(cluster.nodes):
        run_pod(cluster, f"pod-{number}", node.name)
        assert kubectl(cluster, "logs", f"pod-{number}") == "hello\n"
    # A TLS server tells a client that speaks plain HTTP so: the answer shows who is at the service address.
    ask = 'printf "GET / HTTP/1.0\\r\\n\\r\\n" | nc -w 5 $KUBERNETES_SERVICE_HOST $KUBERNETES_SERVICE_PORT'
    answer = kubectl(cluster, "exec", "pod-0", "--", "sh", "-c", ask)
    assert "HTTP request to an HTTPS server" in answer
    assert str(cluster.plan.service_address) in kubectl(cluster, "exec", "pod-0", "--", "env")


def test_pods_of_different_nodes_see_each_other(cluster):
    """Each node's pods are in a subnet of their own; the host routes between them."""
    run_pod(cluster, "server", cluster.nodes[0].name)
    run_pod(cluster, "client", cluster.nodes[1].name)
    address = kubectl(cluster, "get", "pod", "server", "-o", "jsonpath={.status.podIP}")
    listen = "(echo from server | nc -l -p 80 >/dev/null 2>&1 &) ; sleep 0.2; echo started"
    assert kubectl(cluster, "exec", "server", "--", "sh", "-c", listen) == "started\n"
    assert kubectl(cluster, "exec", "client", "--", "nc", "-w", "5", address, "80") == "from server\n"


def test_the_hosts_loopback_is_closed_to_a_pod_that_forges_routes(cluster):
    """route_localnet, which the way to the API server needs, would open it: a rule must close it again."""
    run_pod(cluster, "forger", cluster.nodes[1].name)
    status = cluster.api.call("GET", "/api/v1/namespaces/default/pods/forger")["status"]
    container = status["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    inside = ("nsenter", "-t", str(min(container_pids([container]))), "-n", "--")
    for argv in (
        ("sysctl", "-w", "net.ipv4.conf.all.route_localnet=1"),
        ("ip", "address", "del", "127.0.0.1/8", "dev", "lo"),
        ("ip", "route", "add", "127.0.0.0/8", "via", cluster.nodes[1].address),
    ):
        subprocess.run([*inside, *argv], check=True, capture_output=True)

    def reaches(address, port):
        code = f"import socket; socket.create_connection(({address!r}, {port}), 2)"
        return subprocess.run([*inside, sys.executable, "-c", code], capture_output=True, check=False).returncode == 0

    assert reaches(str(cluster.plan.service_address), 443)
    assert not reaches("127.0.0.1", cluster.plan.etcd_port)
    assert not reaches("127.0.0.1", cluster.plan.spec.port)


def test_each_node_has_a_kernel_log_and_cdi_directory_of_its_own(cluster):
    first, second = cluster.nodes
    with first.kmsg.open("a") as log:
        log.write("4,1,1000,-;NVRM: Xid (PCI:0000:18:00): 79\n")

    def inside(node, *argv):
        return subprocess.run([*node.enter, *argv], check=True, capture_output=True, text=True).stdout

    assert inside(first, "cat", "/dev/kmsg") == "4,1,1000,-;NVRM: Xid (PCI:0000:18:00): 79\n"
    assert inside(second, "cat", "/dev/kmsg") == ""
    inside(first, "touch", "/var/run/cdi/x.json")
    assert (first.cdi / "x.json").exists()
    assert inside(second, "ls", "/var/run/cdi") == ""
    (first.cdi / "x.json").unlink()


def test_a_kubelet_lives_with_records_in_its_kernel_log(cluster):
    """It reads /dev/kmsg for OOM kills: a regular file must neither stop it nor keep it busy."""
    node = cluster.nodes[0]
    with node.kmsg.open("a") as log:
        log.writelines(f"4,{n},{n}000,-;NVRM: Xid (PCI:0000:18:00): 31, name=x\n" for n in range(2, 300))
    cluster.restart_kubelet(node.name)
    up(ClusterSpec(NAME, nodes=2, port=PORT))
    record = cluster.processes.get(f"{node.name}.kubelet")
    start = cpu_seconds(record.pid)
    time.sleep(3)
    assert cpu_seconds(record.pid) - start < 1.5


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_tokens_are_bound_to_their_node_and_limited_by_rbac(cluster):
    node = cluster.nodes[1].name
    config = cluster.token("default", "default", node)
    who = json.loads(kubectl(cluster, "auth", "whoami", "-o", "json", kubeconfig=config))["status"]["userInfo"]
    assert who["username"] == "system:serviceaccount:default:default"
    assert who["extra"]["authentication.kubernetes.io/node-name"] == [node]
    assert config.stat().st_mode & 0o077 == 0
    with pytest.raises(subprocess.CalledProcessError, match="exit status 1"):
        kubectl(cluster, "get", "nodes", kubeconfig=config)
    with pytest.raises(ClusterError, match="404"):
        cluster.token("default", "nobody")


def test_etcd_refuses_whoever_has_no_certificate_of_its_authority(cluster):
    context = ssl.create_default_context(cafile=str(cluster.layout.pki / "etcd-ca.crt"))
    context.load_cert_chain(cluster.layout.pki / "admin.crt", cluster.layout.pki / "admin.key")
    with pytest.raises(OSError), urllib.request.urlopen(f"https://127.0.0.1:{PORT + 1}/version", context=context):
        pass
    context.load_cert_chain(cluster.layout.pki / "etcd-client.crt", cluster.layout.pki / "etcd-client.key")
    with urllib.request.urlopen(f"https://127.0.0.1:{PORT + 1}/version", context=context) as answer:
        assert "etcdserver" in answer.read().decode()


def test_the_admission_policy_and_gang_apis_are_served(cluster):
    served = kubectl(cluster, "api-resources", "--no-headers", "-o", "name")
    for name in (
        "mutatingadmissionpolicies.admissionregistration",
        "podgroups.scheduling",
        "devicetaintrules.resource",
    ):
        assert name in served


def test_up_repairs_what_was_killed_and_pods_survive(cluster):
    run_pod(cluster, "survivor", cluster.nodes[0].name)
    before = cluster.api.call("GET", "/api/v1/namespaces/default/pods/survivor")["status"]["containerStatuses"]
    extra = cluster.processes.start("extra", ("sleep", "3600"))
    cluster.kill(None, "kube-apiserver")
    cluster.kill(None, "etcd")
    for component in ("kubelet", "containerd", "holder"):
        cluster.kill(cluster.nodes[0].name, component)
    # A record that was lost must not lead to a second process beside the first.
    (cluster.layout.state / "run" / "kube-scheduler.json").unlink()
    up(ClusterSpec(NAME, nodes=2, port=PORT))
    assert all(cluster.processes.alive(name) for name in cluster.component_names())
    after = cluster.api.call("GET", "/api/v1/namespaces/default/pods/survivor")["status"]["containerStatuses"]
    assert [status["containerID"] for status in after] == [status["containerID"] for status in before]
    # A kubelet that has just started does not know its pods at once.
    wait_for(lambda: can_exec(cluster, "survivor"), "exec into the surviving pod")
    run_pod(cluster, "after", cluster.nodes[0].name)
    assert cluster.processes.get("extra") == extra


def test_another_node_joins(cluster):
    grown = up(ClusterSpec(NAME, nodes=3, port=PORT))
    assert grown.node_status() == dict.fromkeys(("gpu-node-0", "gpu-node-1", "gpu-node-2"), True)


@pytest.mark.parametrize("seconds", [0.1, 1.5])
def test_an_up_that_was_killed_is_continued(seconds):
    name = f"{NAME}-up"
    code = "from gpunode.cluster.lifecycle import up; from gpunode.cluster.spec import ClusterSpec; "
    code += f"up(ClusterSpec({name!r}, nodes=2, port={PORT + 20}))"
    try:
        with subprocess.Popen([sys.executable, "-c", code]) as first:
            wait_for(layout(name).plan_file.exists, "the first command at work", 20)
            time.sleep(seconds)
            first.kill()
        cluster = up(ClusterSpec(name, nodes=2, port=PORT + 20))
        assert cluster.node_status() == {"gpu-node-0": True, "gpu-node-1": True}
        run_pod(cluster, "a")
    finally:
        down(name)
    assert traces(name) == {}


@pytest.mark.parametrize("crash", ["nothing", "components", "everything and the state"])
def test_down_leaves_nothing(crash):
    name = f"{NAME}-down"
    rules_before = set(iptables())
    cluster = up(ClusterSpec(name, nodes=1, port=PORT + 10))
    try:
        run_pod(cluster, "a")
        extra = cluster.processes.start("extra", (*cluster.nodes[0].enter, "sleep", "3600"))
        ids = container_ids(cluster)
        pids = container_pids(ids)
        assert len(ids) == 2
        assert len(pids) >= 2
        if crash == "components":
            for part in ("kubelet", "containerd", "holder"):
                cluster.kill("gpu-node-0", part)
            cluster.kill(None, "kube-apiserver")
        if crash == "everything and the state":
            for pid in cluster.processes.marked():
                os.kill(pid, signal.SIGKILL)
            cluster.layout.plan_file.unlink()
            for record in (cluster.layout.state / "run").iterdir():
                record.unlink()
    finally:
        down(name)
    assert traces(name, ids) == {}
    # Other clusters may have come up meanwhile; their chains bear our name, kubelet's and the plugins' would not.
    assert [line for line in set(iptables()) - rules_before if "GPUNODE-" not in line] == []
    assert {pid for pid in pids if Path(f"/proc/{pid}").exists() and not is_zombie(pid)} == set()
    assert not Path(f"/proc/{extra.pid}").exists() or is_zombie(extra.pid)
    assert load(name) is None
    assert down(name) is False


def is_zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
