"""An API server that knows a few answers, for commands that should give up with one sentence."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NODE = "here"
DEVICE = "gpu-0000-07-00-0"
_SLICES = "/apis/resource.k8s.io/v1/resourceslices"
_ANSWERS: dict[str, object] = {
    "/version": {},
    f"/api/v1/nodes/{NODE}": {"metadata": {"name": NODE, "uid": "1"}},
    "/apis/scheduling.k8s.io/v1beta1": {"resources": [{"name": "podgroups"}]},
    "/apis/resource.k8s.io/v1": {"resources": [{"name": "devicetaintrules"}]},
}
_ONE_SLICE = {
    "metadata": {"name": f"{NODE}-0"},
    "spec": {
        "driver": "gpu.gpunode.dev",
        "nodeName": NODE,
        "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": DEVICE}],
    },
}


_CLAIMS = "/apis/resource.k8s.io/v1/resourceclaims"


def _claim(name: str, driver: str, pool: str, *statuses: object) -> dict[str, object]:
    results = [{"request": "gpus", "driver": driver, "pool": pool, "device": f"gpu-{n}"} for n in range(2)]
    return {
        "metadata": {"namespace": "team-a", "name": name, "uid": f"u-{name}"},
        "status": {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": f"pod-{name}", "uid": "p"}],
            "devices": list(statuses),
        },
    }


def _status(device: str, healthy: str, message: str = "") -> dict[str, object]:
    conditions = [
        {"type": "Prepared", "status": "True", "reason": "Prepared", "message": "CDI device x"},
        {"type": "Healthy", "status": healthy, "reason": "Any", "message": message},
    ]
    data = {"uuid": f"GPU-{device[-1]}", "deviceNodes": ["/dev/nvidia0"]}
    return {"driver": "gpu.gpunode.dev", "pool": NODE, "device": device, "conditions": conditions, "data": data}


_ALL_CLAIMS = [
    _claim("waits", "gpu.gpunode.dev", NODE),
    _claim("runs", "gpu.gpunode.dev", NODE, _status("gpu-1", "False", "XID 79 [lost]"), _status("gpu-0", "True")),
    _claim("elsewhere", "gpu.gpunode.dev", "away"),
    _claim("foreign", "other.example.com", NODE, {"driver": "other.example.com", "pool": NODE, "device": "gpu-0"}),
    {"metadata": {"namespace": "team-a", "name": "pending", "uid": "u"}, "spec": {}},
]


class _Answers(BaseHTTPRequestHandler):
    """The first part of the path is the mood: "allow", or "forbid" for one that refuses all but /version."""

    def do_GET(self) -> None:
        _, mood, rest = self.path.split("/", 2)
        path, _, query = f"/{rest}".partition("?")
        if mood == "forbid" and path != "/version":
            message = f"{path} is forbidden: User cannot get it"
            self._send(403, {"kind": "Status", "code": 403, "reason": "Forbidden", "message": message})
        elif path in _ANSWERS:
            self._send(200, _ANSWERS[path])
        elif path.startswith("/api/v1/nodes/"):
            self._send(404, {"kind": "Status", "code": 404, "reason": "NotFound", "message": "not found"})
        elif path == _CLAIMS:
            self._send(200, {"metadata": {"resourceVersion": "1"}, "items": _ALL_CLAIMS})
        else:
            listed = path == _SLICES and f"nodeName%3D{NODE}," in query.replace("%2C", ",").replace("=", "%3D")
            self._send(200, {"metadata": {"resourceVersion": "1"}, "items": [_ONE_SLICE] if listed else []})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self._send(201, {})

    def _send(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


@contextmanager
def api_server() -> Iterator[str]:
    """Its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def write_kubeconfig(file: Path, server: str) -> None:
    """A kubeconfig for that address with a token."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "a", "cluster": {"server": server}}],
        "users": [{"name": "a", "user": {"token": "t"}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "current-context": "a",
    }
    file.write_text(json.dumps(config))
