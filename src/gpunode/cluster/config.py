"""Command lines and configuration files of every component. Pure: Plan and paths in, text out."""

from pathlib import Path
from typing import Final

import yaml

from gpunode.cluster.image import PAUSE_IMAGE
from gpunode.cluster.layout import Layout
from gpunode.cluster.pki import Pki
from gpunode.cluster.spec import (
    KUBELET_HEALTH_PORT,
    KUBELET_PORT,
    NodePlan,
    Plan,
    feature_gates,
    kubelet_gates,
    runtime_config,
)

# The defaults (20 and 50 requests a second) would hide everything else when gangs are placed.
_CLIENT_LIMITS: Final = ("--kube-api-qps=2000", "--kube-api-burst=4000")
ISSUER: Final = "https://kubernetes.default.svc"


def etcd(plan: Plan, layout: Layout, pki: Pki) -> tuple[str, ...]:
    """It holds every secret, and anyone on the machine can reach a loopback port: so it asks for a certificate."""
    own = pki.directory / "etcd"
    client, peer = (f"https://127.0.0.1:{port}" for port in (plan.etcd_port, plan.etcd_peer_port))
    return (
        "etcd",
        f"--data-dir={layout.state / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        *(
            f"--{prefix}{flag}"
            for prefix in ("", "peer-")
            for flag in (
                f"cert-file={own}.crt",
                f"key-file={own}.key",
                f"trusted-ca-file={pki.etcd_ca.cert}",
                "client-cert-auth=true",
            )
        ),
        # A cluster that lives no longer than the machine's uptime does not pay for durability.
        "--unsafe-no-fsync",
        "--log-level=warn",
    )


def apiserver(plan: Plan, pki: Pki) -> tuple[str, ...]:
    """It listens on 127.0.0.1 alone; pods come in through address translation (see network)."""
    server, kubelet_client = pki.directory / "apiserver", pki.directory / "apiserver-kubelet"
    return (
        "kube-apiserver",
        f"--etcd-servers=https://127.0.0.1:{plan.etcd_port}",
        f"--etcd-cafile={pki.etcd_ca.cert}",
        f"--etcd-certfile={pki.directory / 'etcd-client'}.crt",
        f"--etcd-keyfile={pki.directory / 'etcd-client'}.key",
        "--bind-address=127.0.0.1",
        f"--secure-port={plan.spec.port}",
        f"--advertise-address={plan.nodes[0].address}",
        # Nothing here routes by the endpoints of the service "kubernetes".
        "--endpoint-reconciler-type=none",
        f"--tls-cert-file={server}.crt",
        f"--tls-private-key-file={server}.key",
        f"--client-ca-file={pki.ca.cert}",
        f"--kubelet-certificate-authority={pki.ca.cert}",
        f"--kubelet-client-certificate={kubelet_client}.crt",
        f"--kubelet-client-key={kubelet_client}.key",
        "--kubelet-preferred-address-types=InternalIP",
        f"--requestheader-client-ca-file={pki.front_proxy_ca.cert}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki.directory / 'front-proxy-client'}.crt",
        f"--proxy-client-key-file={pki.directory / 'front-proxy-client'}.key",
        f"--service-account-key-file={pki.service_account_public_key}",
        f"--service-account-signing-key-file={pki.service_account_key}",
        f"--service-account-issuer={ISSUER}",
        f"--service-cluster-ip-range={plan.service_cidr}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--feature-gates={feature_gates(plan.spec.kubernetes)}",
        f"--runtime-config={runtime_config(plan.spec.kubernetes)}",
    )


def controller_manager(plan: Plan, layout: Layout, pki: Pki) -> tuple[str, ...]:
    return (
        *_client("kube-controller-manager", plan, layout, plan.controller_manager_port),
        f"--service-account-private-key-file={pki.service_account_key}",
        f"--root-ca-file={pki.ca.cert}",
        f"--cluster-signing-cert-file={pki.ca.cert}",
        f"--cluster-signing-key-file={pki.ca.key}",
        "--use-service-account-credentials=true",
    )


def scheduler(plan: Plan, layout: Layout) -> tuple[str, ...]:
    return _client("kube-scheduler", plan, layout, plan.scheduler_port)


def _client(name: str, plan: Plan, layout: Layout, port: int) -> tuple[str, ...]:
    kubeconfig = layout.kubeconfig(name)
    return (
        name,
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        "--leader-elect=false",
        f"--feature-gates={feature_gates(plan.spec.kubernetes)}",
        *_CLIENT_LIMITS,
    )


def kubelet(node: NodePlan, layout: Layout) -> tuple[str, ...]:
    return (
        "kubelet",
        f"--kubeconfig={layout.kubeconfig(node.name)}",
        f"--config={layout.node(node).root / 'kubelet.yaml'}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
    )


def kubelet_config(plan: Plan, node: NodePlan, layout: Layout, pki: Pki) -> str:
    """KubeletConfiguration of a node that shares its host with others.

    No cgroups of its own beyond the containers', everything bound to the node's own address, and no image ever
    collected: the images exist nowhere else.
    """
    return yaml.safe_dump(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": str(node.address),
            "port": KUBELET_PORT,
            "healthzBindAddress": str(node.address),
            "healthzPort": KUBELET_HEALTH_PORT,
            "tlsCertFile": str(pki.directory / f"{node.name}.crt"),
            "tlsPrivateKeyFile": str(pki.directory / f"{node.name}.key"),
            "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": str(pki.ca.cert)}},
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            # They would stay in the host's tables, and what they guard against is guarded against in network.
            "makeIPTablesUtilChains": False,
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "50Mi"},
            "resolvConf": str(layout.node(node).root / "resolv.conf"),
            "volumePluginDir": "/var/lib/kubelet/volume-plugins",
            "featureGates": kubelet_gates(plan.spec.kubernetes),
        },
        sort_keys=False,
    )


def containerd_config(root: Path, runc: str, cni_plugins: str, snapshotter: str) -> str:
    """containerd's configuration for the node whose files are under `root`; its /run is the node's own."""
    return f"""\
version = 3
root = "{root}/containerd"
state = "/run/containerd"

[grpc]
  address = "/run/containerd/containerd.sock"

[plugins."io.containerd.cri.v1.images"]
  snapshotter = "{snapshotter}"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{PAUSE_IMAGE}"

[plugins."io.containerd.cri.v1.runtime"]
  cdi_spec_dirs = ["/var/run/cdi"]
  # Without CAP_SYS_RESOURCE no sandbox starts otherwise: a negative oom_score_adj would be refused.
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{cni_plugins}"]
    conf_dir = "{root}/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
      BinaryName = "{runc}"

[plugins."io.containerd.internal.v1.opt"]
  path = "{root}/opt"
"""


def cni_config(node: NodePlan) -> dict[str, object]:
    """Content of the node's .conflist. Masquerading is one rule a cluster (see network), not one a pod."""
    return {
        "cniVersion": "1.0.0",
        "name": node.name,
        "plugins": [
            {
                "type": "bridge",
                "bridge": node.bridge,
                "isGateway": True,
                "ipMasq": False,
                "ipam": {
                    "type": "host-local",
                    "dataDir": "/var/lib/cni/networks",
                    "ranges": [[{"subnet": str(node.subnet), "gateway": str(node.address)}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }
