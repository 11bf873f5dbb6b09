import tomllib
from pathlib import Path

import pytest
import yaml

from gpunode.cluster import config, network
from gpunode.cluster.layout import Layout
from gpunode.cluster.pki import Pki
from gpunode.cluster.spec import ClusterSpec, Plan

LAYOUT = Layout(Path("/state/c"))
PKI = Pki(LAYOUT.pki)
PLAN = Plan(ClusterSpec("c", nodes=2, port=17000), 1)


def flags(argv):
    return dict(word.removeprefix("--").split("=", 1) for word in argv[1:] if "=" in word)


def commands(plan):
    return (
        config.etcd(plan, LAYOUT, PKI),
        config.apiserver(plan, PKI),
        config.controller_manager(plan, LAYOUT, PKI),
        config.scheduler(plan, LAYOUT),
    )


def test_the_control_plane_listens_on_loopback_alone():
    etcd, *others = (flags(argv) for argv in commands(PLAN))
    assert {command["bind-address"] for command in others} == {"127.0.0.1"}
    listens = [etcd["listen-client-urls"], etcd["listen-peer-urls"]]
    assert listens == ["https://127.0.0.1:17001", "https://127.0.0.1:17002"]
    assert [command["secure-port"] for command in others] == ["17000", "17003", "17004"]


def test_etcd_lets_in_only_those_whom_its_own_authority_vouches_for():
    etcd = flags(config.etcd(PLAN, LAYOUT, PKI))
    for prefix in ("", "peer-"):
        assert etcd[f"{prefix}client-cert-auth"] == "true"
        assert etcd[f"{prefix}trusted-ca-file"] == str(PKI.etcd_ca.cert) != str(PKI.ca.cert)


def test_two_clusters_have_no_port_in_common():
    def ports(plan):
        return {word.rpartition(":")[2] for argv in commands(plan) for word in argv if "127.0.0.1:" in word}

    assert not ports(PLAN) & ports(Plan(ClusterSpec("d", port=17005), 2))


def test_identities_are_authorized_as_nodes_and_by_roles():
    apiserver = flags(config.apiserver(PLAN, PKI))
    assert apiserver["authorization-mode"] == "Node,RBAC"
    assert apiserver["enable-admission-plugins"] == "NodeRestriction"
    assert apiserver["service-cluster-ip-range"] == "10.97.0.0/16"
    assert "controllers" not in flags(config.controller_manager(PLAN, LAYOUT, PKI))


@pytest.mark.parametrize("version", ["1.36.3", "1.37.2"])
def test_gates_are_the_same_in_the_whole_control_plane(version):
    plan = Plan(ClusterSpec(kubernetes=version), 0)
    gates = {flags(argv)["feature-gates"] for argv in commands(plan)[1:]}
    assert len(gates) == 1
    assert "GenericWorkload=true" in gates.pop()


def test_kubelet_keeps_to_its_own_address_and_makes_no_cgroups():
    node = PLAN.nodes[1]
    text = yaml.safe_load(config.kubelet_config(PLAN, node, LAYOUT, PKI))
    assert text["address"] == text["healthzBindAddress"] == "10.245.1.1"
    assert text["cgroupsPerQOS"] is False
    assert text["enforceNodeAllocatable"] == []
    assert text["authentication"]["anonymous"] == {"enabled": False}
    assert text["featureGates"]["GenericWorkload"] is True
    argv = flags(config.kubelet(node, LAYOUT))
    assert argv["node-ip"] == "10.245.1.1"
    assert argv["hostname-override"] == "gpu-node-1"


def test_containerd_configuration_is_toml_with_the_nodes_paths():
    text = tomllib.loads(config.containerd_config(Path("/state/n"), "/usr/sbin/runc", "/usr/lib/cni", "overlayfs"))
    runtime = text["plugins"]["io.containerd.cri.v1.runtime"]
    assert text["root"] == "/state/n/containerd"
    assert runtime["cdi_spec_dirs"] == ["/var/run/cdi"]
    assert runtime["cni"] == {"bin_dirs": ["/usr/lib/cni"], "conf_dir": "/state/n/cni"}
    assert text["plugins"]["io.containerd.cri.v1.images"]["pinned_images"]["sandbox"] == "localhost/pause:1"


def test_pods_get_addresses_of_their_nodes_bridge():
    (bridge,) = config.cni_config(PLAN.nodes[1])["plugins"]
    assert bridge["bridge"] == PLAN.nodes[1].bridge
    assert bridge["ipam"]["ranges"] == [[{"subnet": "10.245.1.0/24", "gateway": "10.245.1.1"}]]


def test_every_chain_is_declared_and_reached():
    text = network.rules(PLAN).splitlines()
    declared = {line[1:].split()[0] for line in text if line.startswith(":")}
    filled = {line.split()[1] for line in text if line.startswith("-A")}
    reached = {rule[-1] for _, _, rule in network.jumps("c", "10.97.0.1")}
    assert declared == filled == reached
    # Chain names have at most 28 characters.
    assert all(len(chain) <= 28 for chain in declared)


def test_pods_reach_nothing_of_the_hosts_loopback_but_the_api_server():
    rules = [line for line in network.rules(PLAN).splitlines() if "-IN -i" in line]
    assert [line.split()[-1] for line in rules] == ["ACCEPT", "DROP"]
    assert "--dport 17000 -m conntrack --ctstate DNAT" in rules[0]
    assert "-d 127.0.0.0/8" in rules[1]
