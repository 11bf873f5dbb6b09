"""Bridges, address translation and forwarding of a cluster; and taking all of it away again.

Each node has a bridge whose address is the node's InternalIP and its pods' gateway. Pods reach the API server at its
service address: packets that enter through our bridges are translated to 127.0.0.1, so that the API server listens
on the loopback interface alone. That needs route_localnet on the bridges, and a rule which drops whatever comes in
there for 127.0.0.0/8 untranslated, so that pods see nothing else of the host's loopback.
"""

import json
import os
import re
import shutil
import subprocess
from ipaddress import IPv4Network
from pathlib import Path

from gpunode.cluster.errors import ClusterError
from gpunode.cluster.spec import Plan, bridge_prefix, tag


def routes(ignore_prefix: str) -> list[IPv4Network]:
    """Destinations of this machine's IPv4 routes other than the default one and those of our own bridges."""
    listed = json.loads(_run(["ip", "-j", "-4", "route", "show", "table", "all"]) or "[]")
    return [
        IPv4Network(route["dst"])
        for route in listed
        if route.get("dst", "default") != "default" and not route.get("dev", "").startswith(ignore_prefix)
    ]


def ensure(plan: Plan) -> None:
    """Makes bridges and rules of the cluster; what exists is left as it is."""
    for node in plan.nodes:
        if not Path("/sys/class/net", node.bridge).exists():
            # A fixed address: else it follows the pods that come and go, and their neighbours' ARP entries are wrong.
            mac = ":".join(f"{byte:02x}" for byte in b"\x02\x47" + node.address.packed)
            _run(["ip", "link", "add", node.bridge, "address", mac, "type", "bridge"])
        _run(["ip", "address", "replace", f"{node.address}/24", "dev", node.bridge])
        _run(["ip", "link", "set", node.bridge, "up"])
        Path("/proc/sys/net/ipv4/conf", node.bridge, "route_localnet").write_text("1\n")
    _run(["iptables-restore", "-w", "--noflush"], rules(plan))
    for table, chain, jump in jumps(plan.spec.name, plan.service_address.exploded):
        rule = [chain, *jump]
        if not _succeeds(["iptables", "-w", "-t", table, "-C", *rule]):
            _run(["iptables", "-w", "-t", table, "-I", *rule])


def rules(plan: Plan) -> str:
    """Our own chains as input of iptables-restore --noflush: naming a chain there empties it first."""
    chain, bridges, pods = _chain(plan.spec.name), f"{plan.bridge_prefix}+", plan.pod_cidr
    port = plan.spec.port
    return "\n".join(
        (
            "*nat",
            f":{chain}-SVC - [0:0]",
            f":{chain}-MASQ - [0:0]",
            f"-A {chain}-SVC -d {plan.service_address}/32 -p tcp --dport 443 -j DNAT --to-destination 127.0.0.1:{port}",
            f"-A {chain}-MASQ -s {pods} ! -d {pods} -j MASQUERADE",
            "COMMIT",
            "*filter",
            f":{chain}-FWD - [0:0]",
            f":{chain}-IN - [0:0]",
            f"-A {chain}-FWD -i {bridges} -j ACCEPT",
            f"-A {chain}-FWD -o {bridges} -j ACCEPT",
            f"-A {chain}-IN -i {bridges} -d 127.0.0.1/32 -p tcp --dport {port} -m conntrack --ctstate DNAT -j ACCEPT",
            f"-A {chain}-IN -i {bridges} -d 127.0.0.0/8 -j DROP",
            "COMMIT",
            "",
        )
    )


def jumps(name: str, service_address: str = "0.0.0.0") -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """(table, built-in chain, rule) that lead into our chains.

    The one in OUTPUT is for host-network pods, which have no bridge to come through.
    """
    chain, bridges = _chain(name), f"{bridge_prefix(name)}+"
    return (
        ("nat", "PREROUTING", ("-i", bridges, "-j", f"{chain}-SVC")),
        ("nat", "OUTPUT", ("-d", f"{service_address}/32", "-j", f"{chain}-SVC")),
        ("nat", "POSTROUTING", ("-j", f"{chain}-MASQ")),
        ("filter", "FORWARD", ("-j", f"{chain}-FWD")),
        ("filter", "INPUT", ("-i", bridges, "-j", f"{chain}-IN")),
    )


def remove(name: str) -> None:
    """Deletes every bridge, every veth on one and every rule of the cluster, known from its name alone."""
    prefix = bridge_prefix(name)
    for link in json.loads(_run(["ip", "-j", "link", "show"]) or "[]"):
        if link.get("master", "").startswith(prefix) or link["ifname"].startswith(prefix):
            # A veth goes by itself when its namespace does, so it may be gone by now.
            _succeeds(["ip", "link", "delete", link["ifname"]])
    if shutil.which("iptables", path=_environment()["PATH"]) is None:
        return
    for table in ("nat", "filter"):
        listed = _run(["iptables", "-w", "-t", table, "-S"]).splitlines()
        ours = [line.split() for line in listed if f"{_chain(name)}-" in line]
        deletions = [["-D", *words[1:]] for words in ours if words[0] == "-A" and not words[1].startswith(_chain(name))]
        chains = [words[1] for words in ours if words[0] == "-N"]
        deletions += [[flag, chain] for flag in ("-F", "-X") for chain in chains]
        for deletion in deletions:
            _run(["iptables", "-w", "-t", table, *deletion])


def any_left() -> bool:
    """Whether a bridge of any cluster is there, also one whose state is kept under another root."""
    return any(re.fullmatch(r"gpn[0-9a-f]{5}-\d+", link.name) for link in Path("/sys/class/net").iterdir())


def _chain(name: str) -> str:
    return f"GPUNODE-{tag(name)}"


def _run(argv: list[str], stdin: str = "") -> str:
    try:
        result = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False, env=_environment())
    except FileNotFoundError as error:
        raise ClusterError(f"{argv[0]} is not installed: run `gpunode cluster build`, which installs it") from error
    if result.returncode != 0:
        raise ClusterError(f"`{' '.join(argv)}` failed: {result.stderr.strip()}")
    return result.stdout


def _succeeds(argv: list[str]) -> bool:
    return subprocess.run(argv, capture_output=True, check=False, env=_environment()).returncode == 0


def _environment() -> dict[str, str]:
    # A plain user's PATH may lack the directories of ip and iptables.
    return {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin", "LC_ALL": "C"}
