"""The few calls to the API server that bringing a cluster up and down takes; the driver itself uses gpunode.kube.

Cluster commands are synchronous code that waits on processes and threads, and begin before there is a kubeconfig.
"""

import http.client
import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpunode.cluster.errors import ClusterError
from gpunode.cluster.pki import KeyPair


class ApiUnreachableError(ClusterError):
    """The API server does not answer (connection refused, reset or timed out)."""


class ApiStatusError(ClusterError):
    """The API server answered with an error status."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Api:
    """The API server on 127.0.0.1 as the cluster's administrator. One connection a call; calls may be concurrent."""

    port: int
    ca: Path
    client: KeyPair

    def call(self, method: str, path: str, body: object = None, timeout: float = 10.0) -> Any:
        """The decoded JSON answer; text where it is not JSON (/readyz).

        Raises ApiUnreachableError, or ApiStatusError for a status of 300 or more.
        """
        try:
            context = ssl.create_default_context(cafile=str(self.ca))
            context.load_cert_chain(self.client.cert, self.client.key)
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=context, timeout=timeout)
            try:
                data = None if body is None else json.dumps(body)
                connection.request(method, path, data, {"Content-Type": "application/json"})
                response = connection.getresponse()
                text = response.read().decode()
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            raise ApiUnreachableError(f"the API server on port {self.port} does not answer: {error}") from error
        if response.status >= 300:
            raise ApiStatusError(f"{method} {path}: {response.status} {_message(text)}", response.status)
        return json.loads(text) if "json" in response.headers.get("Content-Type", "") else text

    def ready(self) -> bool:
        try:
            return bool(self.call("GET", "/readyz", timeout=2.0) == "ok")
        except ClusterError:
            return False


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]
