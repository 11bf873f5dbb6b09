"""gpunode quarantine against an API server that keeps rules."""

import getpass
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import yaml
from tests.cli.answers import write_kubeconfig
from typer.testing import CliRunner, Result

from gpunode.cli.main import app

NODE, GPU = "here", "gpu-0000-07-00-0"
PARTS = [f"{GPU}-mig-1g-10gb-0", f"{GPU}-mig-1g-10gb-1"]
OTHER = "gpu-0000-0f-00-0"
_RULES = "/apis/resource.k8s.io/v1/devicetaintrules"


@dataclass
class Cluster:
    """What the server has and was asked. refuse: status by method, for rules. serves: whether it knows rules.
    driver: of its slices."""

    kubeconfig: Path
    rules: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    refuse: dict[str, int] = field(default_factory=dict)
    serves: bool = True
    driver: str = "gpu.gpunode.dev"

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["quarantine", *arguments, "--kubeconfig", str(self.kubeconfig)])

    def quarantined(self) -> dict[str, str]:
        """Reason by device."""
        return {
            r["spec"]["deviceSelector"]["device"]: r["metadata"]["annotations"]["gpunode.dev/reason"]
            for r in self.rules.values()
        }

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        if path == "/apis/resource.k8s.io/v1":
            return 200, {"resources": [{"name": "devicetaintrules"}] if self.serves else []}
        if path == "/apis/resource.k8s.io/v1/resourceslices":
            devices = [{"name": name} for name in (GPU, *PARTS, OTHER)]
            pool = {"name": NODE, "generation": 1, "resourceSliceCount": 1}
            spec = {"driver": self.driver, "nodeName": NODE, "pool": pool, "devices": devices}
            asked = f"spec.nodeName={NODE},spec.driver={self.driver}" == query.get("fieldSelector", [""])[0]
            items = [{"metadata": {"name": "s"}, "spec": spec}] if asked else []
            return 200, {"metadata": {"resourceVersion": "1"}, "items": items}
        if not path.startswith(_RULES):
            return 404, _status(404, "NotFound")
        self.asked.append(method)
        if method in self.refuse:
            return self.refuse[method], _status(self.refuse[method], "Refused")
        name = path.removeprefix(_RULES).strip("/")
        if method == "POST":
            name = body["metadata"]["name"]
            if name in self.rules:
                return 409, _status(409, "AlreadyExists")
            body["metadata"]["uid"] = f"uid-{name}"
            self.rules[name] = body
            return 201, body
        if not name:
            return 200, {"metadata": {"resourceVersion": "1"}, "items": list(self.rules.values())}
        if name not in self.rules:
            return 404, _status(404, "NotFound")
        if method == "DELETE":
            assert body["preconditions"]["uid"] == self.rules.pop(name)["metadata"]["uid"]
        elif method == "PATCH":
            self.rules[name]["metadata"]["annotations"] |= body["metadata"]["annotations"]
        return 200, self.rules.get(name, {})


def _status(code: int, reason: str) -> dict[str, Any]:
    return {"kind": "Status", "code": code, "reason": reason, "message": f"it is {reason}"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path / "kubeconfig")

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            path, _, query = self.path.partition("?")
            code, body = found.answer(self.command, path, parse_qs(query), json.loads(data) if data else None)
            answer = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_PATCH = do_DELETE = _serve

        def log_message(self, format: str, *args: object) -> None:
            """Be quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    write_kubeconfig(found.kubeconfig, f"http://127.0.0.1:{server.server_port}")
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_gpu_goes_with_its_partitions_and_comes_back_with_them(cluster: Cluster) -> None:
    done = cluster.run(NODE, GPU, "--reason", "ticket 4711")
    assert done.exit_code == 0, done.stderr
    assert done.output == f"{GPU} of {NODE} is in quarantine (3 devices); --lift ends it\n"
    assert cluster.quarantined() == dict.fromkeys([GPU, *PARTS], f"ticket 4711 ({getpass.getuser()})")
    (spec,) = [r["spec"] for r in cluster.rules.values() if r["spec"]["deviceSelector"]["device"] == GPU]
    assert spec["taint"] == {"key": "gpunode.dev/quarantine", "value": "true", "effect": "NoSchedule"}
    assert spec["deviceSelector"] == {"driver": "gpu.gpunode.dev", "pool": NODE, "device": GPU}
    lifted = cluster.run(NODE, GPU, "--lift")
    assert (lifted.exit_code, lifted.output) == (0, f"{GPU} of {NODE} is in service again (3 devices)\n")
    assert cluster.rules == {}


def test_a_gpu_of_another_driver_name(cluster: Cluster) -> None:
    """Slices are asked for by that name, and the rule, which is found again by it, selects it."""
    cluster.driver = "gpu.example.com"
    assert cluster.run(NODE, OTHER, "--reason", "x").exit_code == 1, "not of the usual name"
    own = ("--driver", cluster.driver)
    assert cluster.run(NODE, OTHER, "--reason", "x", *own).exit_code == 0
    (rule,) = cluster.rules.values()
    assert rule["spec"]["deviceSelector"] == {"driver": cluster.driver, "pool": NODE, "device": OTHER}
    assert cluster.run(NODE, OTHER, "--lift").exit_code == 1
    assert cluster.run(NODE, OTHER, "--lift", *own).exit_code == 0
    assert cluster.rules == {}


def test_one_partition_alone(cluster: Cluster) -> None:
    assert "(1 device)" in cluster.run(NODE, PARTS[0], "--reason", "x").output
    cluster.run(NODE, OTHER, "--reason", "y")
    assert set(cluster.quarantined()) == {PARTS[0], OTHER}
    assert "(1 device)" in cluster.run(NODE, GPU, "--lift").output, "the GPU's word lifts its partitions' too"
    assert set(cluster.quarantined()) == {OTHER}


def test_said_again_the_new_reason_stands(cluster: Cluster) -> None:
    cluster.run(NODE, OTHER, "--reason", "first")
    again = cluster.run(NODE, OTHER, "--reason", "second")
    assert again.exit_code == 0
    assert cluster.quarantined() == {OTHER: f"second ({getpass.getuser()})"}
    assert cluster.asked == ["POST", "POST", "GET", "PATCH"]


def test_a_rule_of_that_name_that_is_something_else_is_left_alone(cluster: Cluster) -> None:
    cluster.run(NODE, OTHER, "--reason", "first")
    (name,) = cluster.rules
    cluster.rules[name]["spec"]["deviceSelector"]["pool"] = "elsewhere"
    refused = cluster.run(NODE, OTHER, "--reason", "second")
    assert refused.exit_code == 1
    assert f"DeviceTaintRule {name} exists and is no quarantine of {OTHER} of {NODE}" in refused.stderr
    assert "first" in cluster.quarantined()[OTHER]
    assert cluster.run(NODE, OTHER, "--lift").exit_code == 1 and name in cluster.rules


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_for_programs(cluster: Cluster, form: str) -> None:
    done = cluster.run(NODE, GPU, "--reason", "ticket", "-o", form)
    told = {"node": NODE, "devices": [GPU, *PARTS], "quarantine": True, "reason": "ticket"}
    assert (json.loads if form == "json" else yaml.safe_load)(done.output) == told
    lifted = cluster.run(NODE, GPU, "--lift", "-o", form)
    assert (json.loads if form == "json" else yaml.safe_load)(lifted.output) == {
        **told, "quarantine": False, "reason": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        ((NODE, GPU), "give either --reason TEXT or --lift", 2),
        ((NODE, GPU, "--reason", "x", "--lift"), "give either --reason TEXT or --lift", 2),
        ((NODE, GPU, "--lift"), f"{GPU} of {NODE} is not in quarantine", 1),
        ((NODE, "gpu-9", "--reason", "x"), f"node {NODE} publishes no device gpu-9; it has: {GPU}, ", 1),
        ((NODE, GPU[:-1], "--reason", "x"), "publishes no device", 1),
        ((NODE,), "Missing argument", 2),
    ],
)
def test_what_makes_no_sense_is_refused(cluster: Cluster, arguments: tuple[str, ...], says: str, code: int) -> None:
    done = cluster.run(*arguments)
    assert done.exit_code == code
    assert says in done.stderr and done.stdout == ""
    assert cluster.rules == {}


def test_a_cluster_without_rules(cluster: Cluster) -> None:
    cluster.serves = False
    done = cluster.run(NODE, GPU, "--reason", "x")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "serves no DeviceTaintRule" in done.stderr


@pytest.mark.parametrize(("method", "lift"), [("POST", False), ("GET", True), ("DELETE", True)])
@pytest.mark.parametrize("status", [403, 409, 500])
def test_refusals_are_one_sentence(cluster: Cluster, method: str, lift: bool, status: int) -> None:
    if lift:
        cluster.run(NODE, OTHER, "--reason", "x")
    cluster.refuse[method] = status
    done = cluster.run(NODE, OTHER, *(["--lift"] if lift else ["--reason", "x"]))
    assert done.exit_code == 1 and done.stdout == ""
    assert done.stderr.startswith("gpunode: ") and done.stderr.count("\n") == 1
    assert ("lacks this right" in done.stderr) == (status == 403)


def test_a_quarantine_that_somebody_else_lifts_meanwhile_is_lifted(cluster: Cluster) -> None:
    cluster.run(NODE, OTHER, "--reason", "x")
    cluster.refuse["DELETE"] = 404
    assert cluster.run(NODE, OTHER, "--lift").exit_code == 0


def test_no_cluster(cluster: Cluster, tmp_path: Path) -> None:
    write_kubeconfig(cluster.kubeconfig, "http://127.0.0.1:9")
    done = cluster.run(NODE, GPU, "--lift")
    assert done.exit_code == 1 and "is the cluster up?" in done.stderr
    cluster.kubeconfig = tmp_path / "absent"
    assert "no such kubeconfig" in cluster.run(NODE, GPU, "--lift").stderr
