"""The commands of the documents on a real cluster, as a reader would type them."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpunode.cluster.cluster import Cluster
from gpunode.cluster.install import kubectl
from gpunode.cluster.paths import cache_root
from gpunode.cluster.story import NAMESPACE, Stage, stage
from gpunode.health.policy import Policy, parse_policy
from gpunode.kubelet.plugin import KubeletPaths
from tests.docs.documents import OPEN_A_GATE, ROOT, Command, all_commands, bound, commands, pages, runs_on_cluster

pytestmark = pytest.mark.e2e

PAGES = [page for page in pages() if any(runs_on_cluster(command) for command in commands(page))]
# These show a gang that runs; the page on gangs makes its own.
WITH_TRAIN = ("README.md", "docs/operations.md")
POD = """
apiVersion: v1
kind: Pod
metadata: {name: gated, namespace: team-a}
spec:
  containers: [{name: main, image: localhost/busybox:1, imagePullPolicy: IfNotPresent, command: [sleep, "1"]}]
  resourceClaims: [{name: gpus, resourceClaimName: there-is-none}]
"""


def environment(cluster: Cluster) -> Mapping[str, str]:
    """What the two export lines of the README set."""
    path = f"{ROOT}/.venv/bin:{Path(cluster.kubectl).parent}:{os.environ['PATH']}"
    return {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "PATH": path}


def run(cluster: Cluster, text: str, stdin: str = "") -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=ROOT, env=environment(cluster), input=stdin, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
async def it(cluster: Cluster) -> AsyncIterator[Stage]:
    async with stage(cluster) as found:
        found.apply("team-a")
        await found.clear()
        yield found
        await found.clear()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
async def test_commands_on_a_cluster(cluster: Cluster, it: Stage, page: Path) -> None:
    if str(page.relative_to(ROOT)) in WITH_TRAIN:
        it.apply("train")
        await it.until_running("train", 8, 60)
    ran = [run(cluster, command.text) for command in commands(page) if runs_on_cluster(command)]
    assert any(ran), "not one of them said anything"


def dry(name: str) -> list[Command]:
    return [c for c in all_commands() if (where := bound(c)) is not None and where.by.endswith(f"::{name}")]


@pytest.mark.parametrize("text", sorted({c.text for c in dry("test_installing_and_removing_is_accepted")}))
def test_installing_and_removing_is_accepted(cluster: Cluster, text: str) -> None:
    run(cluster, f"{text} --dry-run=server")


def overlay(cluster: Cluster, title: str, folder: Path) -> list[dict[str, Any]]:
    """What an overlay of the page on operations makes of the manifests, by its first line."""
    text = (ROOT / "docs" / "operations.md").read_text().partition(f"# {title}\n")[2].partition("```")[0]
    (folder / "kustomization.yaml").write_text(text.replace("PATH-TO", os.path.relpath(ROOT, folder)))
    return list(yaml.safe_load_all(run(cluster, f"kubectl kustomize {folder}")))


def test_the_overlay_is_one(cluster: Cluster, tmp_path: Path) -> None:
    built = overlay(cluster, "kustomization.yaml", tmp_path)
    (agent,) = [one["spec"]["template"]["spec"] for one in built if one["kind"] == "DaemonSet"]
    assert agent["nodeSelector"] == {"gpunode.dev/gpus": "true"}
    assert agent["containers"][0]["image"] == "REGISTRY/gpunode:0.1.0"


OTHER = "gpu.example.com"
CLAIM = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: asked, namespace: default}}
spec:
  devices:
    requests: [{{name: gpu, exactly: {{deviceClassName: gpu.gpunode.dev}}}}]
    config: [{{opaque: {{driver: {driver}, parameters: {{apiVersion: gpunode.dev/v1alpha1, kind: {kind}}}}}}}]
"""


def test_the_overlay_of_another_driver_name_names_it_everywhere(cluster: Cluster, tmp_path: Path) -> None:
    built = overlay(cluster, "kustomization.yaml of another driver name", tmp_path)
    for one in built:
        name = one["metadata"].pop("name")
        assert "gpu.gpunode.dev" not in list(words(one)), one
        one["metadata"]["name"] = name
    for kind in ("DaemonSet", "Deployment"):
        (workload,) = [one for one in built if one["kind"] == kind]
        assert f"--driver={OTHER}" in workload["spec"]["template"]["spec"]["containers"][0]["args"]
    run(cluster, "kubectl apply --dry-run=server --force-conflicts --server-side -f -", yaml.safe_dump_all(built))


def words(value: object) -> Iterator[str]:
    """Names in all strings of a manifest."""
    match value:
        case dict():
            for inner in value.values():
                yield from words(inner)
        case list():
            for inner in value:
                yield from words(inner)
        case str():
            yield from re.findall(r"[\w.-]+", value)


def test_the_policy_takes_its_drivers_from_one_place(cluster: Cluster, tmp_path: Path) -> None:
    """The overlay's policy under a name of its own, beside the one that is there."""
    names = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    made = [one for one in overlay(cluster, "kustomization.yaml of another driver name", tmp_path)
            if one["kind"] in names and one["metadata"]["name"] == "config.gpunode.dev"]  # fmt: skip
    assert len(made) == 2
    for one in made:
        one["metadata"]["name"] = "config-other.gpunode.dev"
        if "policyName" in one["spec"]:
            one["spec"]["policyName"] = "config-other.gpunode.dev"
    assert refusal(cluster, OTHER, "Nonsense") == "", "not ours yet"
    text = yaml.safe_dump_all(made)
    run(cluster, "kubectl apply -f -", text)
    try:
        deadline = time.monotonic() + 60
        while not (said := refusal(cluster, OTHER, "Nonsense")):
            assert time.monotonic() < deadline, "the policy is not in force"
            time.sleep(0.2)
        assert "spec.devices.config[0].opaque.parameters.kind: must be GpuConfig or MigConfig" in said
        assert refusal(cluster, OTHER, "GpuConfig") == ""
        assert refusal(cluster, "unknown.example.com", "Nonsense") == ""
    finally:
        run(cluster, "kubectl delete -f -", text)


def refusal(cluster: Cluster, driver: str, kind: str) -> str:
    """What the API server says against a claim with such parameters, "" when it takes it."""
    done = subprocess.run(
        [str(cluster.kubectl), f"--kubeconfig={cluster.kubeconfig}", "create", "--dry-run=server", "-f", "-"],
        input=CLAIM.format(driver=driver, kind=kind),
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    return done.stderr if done.returncode else ""


def test_the_overlay_of_the_mps_keeper_is_one(cluster: Cluster, tmp_path: Path) -> None:
    (keeper,) = overlay(cluster, "kustomization.yaml for daemonset/mps", tmp_path)
    spec = keeper["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"gpunode.dev/gpus": "true"}
    assert spec["containers"][0]["args"][-1] == "--driver-root=/opt/nvidia/driver"


def test_the_mps_keeper_of_another_driver_name_shares_its_agents_directory(cluster: Cluster, tmp_path: Path) -> None:
    (keeper,) = overlay(cluster, "kustomization.yaml for daemonset/mps under another driver name", tmp_path)
    assert "gpu.gpunode.dev" not in yaml.safe_dump(keeper)
    spec = keeper["spec"]["template"]["spec"]
    places = {m["name"]: m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
    paths = {v["name"]: v["hostPath"]["path"] for v in spec["volumes"]}
    assert places["mps"] == paths["mps"] == str(KubeletPaths().plugin_dir(OTHER) / "mps")
    assert f"--driver={OTHER}" in spec["containers"][0]["args"]


def test_another_kubelet_directory_is_seen_at_the_same_path(cluster: Cluster, tmp_path: Path) -> None:
    built = overlay(cluster, "kustomization.yaml for another kubelet directory", tmp_path)
    (spec,) = [one["spec"]["template"]["spec"] for one in built if one["kind"] == "DaemonSet"]
    (container,) = spec["containers"]
    (place,) = [m for m in container["volumeMounts"] if m["name"] == "kubelet"]
    (path,) = [v["hostPath"]["path"] for v in spec["volumes"] if v["name"] == "kubelet"]
    assert place["mountPath"] == path
    assert place["mountPropagation"] == "Bidirectional"
    assert f"--kubelet-dir={path}" in container["args"]


@pytest.mark.parametrize("of", ["page", "example"])
def test_the_health_policy_is_where_the_agent_reads_it(cluster: Cluster, tmp_path: Path, of: str) -> None:
    example = ROOT / "daemonset" / "examples" / "health-policy"
    if of == "page":
        shutil.copy(example / "policy.yaml", tmp_path)
        built = overlay(cluster, "kustomization.yaml with a health policy", tmp_path)
    else:
        built = list(yaml.safe_load_all(run(cluster, f"kubectl kustomize {example}")))
    (spec,) = [one["spec"]["template"]["spec"] for one in built if one["kind"] == "DaemonSet"]
    (policy,) = [one for one in built if one["kind"] == "ConfigMap"]
    (container,) = spec["containers"]
    (volume,) = [v for v in spec["volumes"] if "configMap" in v]
    (place,) = [m for m in container["volumeMounts"] if m["name"] == volume["name"]]
    assert policy["metadata"]["name"] == volume["configMap"]["name"] != "gpunode-health-policy", (
        "no hash of its content"
    )
    assert policy["metadata"]["namespace"] == "gpunode-system"
    (argument,) = [a for a in container["args"] if a.startswith("--health-policy=")]
    directory, _, file = argument.partition("=")[2].rpartition("/")
    assert directory == place["mountPath"]
    assert parse_policy(policy["data"][file]) != Policy()


def test_installing_once_more_changes_nothing(cluster: Cluster) -> None:
    name = cluster.spec.name
    status = f"gpunode cluster status --name {name} -o json"
    before = json.loads(run(cluster, status))["components"]
    assert f"gpunode runs on {len(cluster.nodes)} nodes" in run(cluster, f"gpunode cluster install --name {name}")
    assert json.loads(run(cluster, status))["components"] == before


def test_what_an_agent_keeps_is_where_the_page_says(cluster: Cluster) -> None:
    files = cluster.nodes[0].state
    page = (ROOT / "docs" / "local-cluster.md").read_text()
    assert "`nodes/NODE/gpunode/health.json` and `nodes/NODE/var-lib-kubelet`" in page
    run(cluster, f"gpunode health status --state {files}/gpunode/health.json")
    run(cluster, f"gpunode claims --kubelet-dir {files}/var-lib-kubelet")


def test_the_environment_is_as_documented(cluster: Cluster) -> None:
    assert Path(cluster.kubectl).parent == cache_root() / f"kubernetes-{cluster.spec.kubernetes}"
    name = cluster.spec.name
    assert run(cluster, f"gpunode cluster kubeconfig --path --name {name}").strip() == str(cluster.kubeconfig)
    assert "gpu-node-0" in run(cluster, f"gpunode cluster status --name {name}")


def test_a_nodes_namespace_can_be_entered(cluster: Cluster) -> None:
    rows = json.loads(run(cluster, f"gpunode cluster status --name {cluster.spec.name} -o json"))["components"]
    pid = next(row["pid"] for row in rows if row["component"] == f"{cluster.nodes[0].name}.holder")
    (line,) = [c.text for c in all_commands() if c.text.startswith("nsenter ")]
    run(cluster, line.replace("PID", str(pid)))


async def test_a_gate_can_be_opened_by_hand(cluster: Cluster, it: Stage) -> None:
    (line,) = [c.text for c in all_commands() if c.text.startswith(OPEN_A_GATE)]
    run(cluster, "kubectl create -f -", POD)
    gates = ("get", "pod", "-n", NAMESPACE, "gated", "-o", "jsonpath={.spec.schedulingGates[*].name}")
    try:
        assert kubectl(cluster, *gates) == "gpunode.dev/placement"
        run(cluster, line.replace("POD", "gated"))
        assert kubectl(cluster, *gates) == ""
    finally:
        kubectl(cluster, "delete", "pod", "-n", NAMESPACE, "gated", "--now")
