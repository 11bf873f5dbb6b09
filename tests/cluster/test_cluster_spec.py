from ipaddress import IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.cluster.errors import ClusterError
from gpunode.cluster.spec import (
    MAX_NODES,
    MAX_SLOTS,
    ClusterSpec,
    Plan,
    bridge_prefix,
    feature_gates,
    free_slot,
    minor,
    pod_cidr,
    runtime_config,
    service_cidr,
)

names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?", fullmatch=True)
ports = st.integers(1024, 65531)
slots = st.integers(0, MAX_SLOTS - 1)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": "UPPER"}, "cluster name"),
        ({"name": ""}, "cluster name"),
        ({"name": "../up"}, "cluster name"),
        ({"name": "a" * 31}, "cluster name"),
        ({"node_prefix": "-x"}, "node prefix"),
        ({"nodes": 0}, "0 nodes"),
        ({"nodes": MAX_NODES + 1}, "nodes"),
        ({"port": 80}, "port 80"),
        ({"port": 65532}, "port 65532"),
        ({"kubernetes": "1.35.1"}, "1.35.1"),
        ({"kubernetes": "v1.37.2"}, "v1.37.2"),
        ({"kubernetes": "1.37"}, "1.37"),
    ],
)
def test_out_of_range_is_refused_with_the_value(fields, says):
    with pytest.raises(ClusterError, match=says):
        ClusterSpec(**fields)


@given(names, st.integers(1, MAX_NODES), ports, slots)
def test_names_ports_and_addresses_of_a_plan_are_distinct_and_fit(name, nodes, port, slot):
    plan = Plan(ClusterSpec(name, nodes, port=port), slot)
    used = [port, plan.etcd_port, plan.etcd_peer_port, plan.controller_manager_port, plan.scheduler_port]
    assert len(set(used)) == 5
    assert max(used) <= 65535
    assert len(plan.nodes) == nodes
    assert len({n.bridge for n in plan.nodes}) == len({n.address for n in plan.nodes}) == nodes
    # IFNAMSIZ is 16 with the closing zero.
    assert all(len(n.bridge) <= 15 and n.bridge.startswith(plan.bridge_prefix) for n in plan.nodes)
    assert all(n.address in n.subnet and n.subnet.subnet_of(plan.pod_cidr) for n in plan.nodes)
    assert plan.service_address in plan.service_cidr
    assert plan.node(plan.nodes[-1].name) == plan.nodes[-1]


@given(slots, slots)
def test_slots_share_no_address(one, other):
    networks = [f(s) for s in {one, other} for f in (pod_cidr, service_cidr)]
    assert not any(a.overlaps(b) for a in networks for b in networks if a is not b)


@given(st.sets(slots))
def test_free_slot_is_the_lowest_that_is_not_taken(taken):
    if len(taken) == MAX_SLOTS:
        with pytest.raises(ClusterError, match="no free network"):
            free_slot(taken, [])
    else:
        slot = free_slot(taken, [])
        assert slot not in taken
        assert set(range(slot)) <= taken


@pytest.mark.parametrize(
    ("route", "slot"),
    [("10.244.7.0/24", 1), ("10.96.0.0/16", 1), ("10.244.0.9/32", 1), ("10.0.0.0/8", 0), ("192.168.0.0/16", 0)],
)
def test_free_slot_avoids_networks_that_the_host_routes_but_not_wider_ones(route, slot):
    assert free_slot(set(), [IPv4Network(route)]) == slot


def test_clusters_have_different_bridges():
    assert bridge_prefix("default") != bridge_prefix("e2e")


def test_unknown_node_is_named_with_those_there_are():
    with pytest.raises(ClusterError, match=r"no node 'n7'.*gpu-node-0 to gpu-node-2"):
        Plan(ClusterSpec(), 0).node("n7")


def test_gates_follow_the_version():
    # GangScheduling was folded into GenericWorkload in 1.37, and a gate that a component does not know stops it.
    assert "GangScheduling=true" in feature_gates("1.36.3")
    assert "GangScheduling" not in feature_gates("1.37.2")
    assert "scheduling.k8s.io/v1alpha2=true" in runtime_config("1.36.3")
    assert "scheduling.k8s.io/v1beta1=true" in runtime_config("1.37.0")
    assert minor("1.36.12") == "1.36"
