"""Paths and errors of the API client."""

import pytest

from gpunode.kube.errors import ApiError
from gpunode.kube.kinds import CLAIMS, NODES, PODS, SLICES


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (NODES.path(), "/api/v1/nodes"),
        (PODS.path("ns"), "/api/v1/namespaces/ns/pods"),
        (PODS.path_of("ns/p", "eviction"), "/api/v1/namespaces/ns/pods/p/eviction"),
        (SLICES.path(name="s"), "/apis/resource.k8s.io/v1/resourceslices/s"),
        (CLAIMS.path_of("ns/c", "status"), "/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims/c/status"),
    ],
)
def test_paths(path: str, expected: str) -> None:
    assert path == expected


def test_api_error_says_what_was_asked_and_answered() -> None:
    error = ApiError("PATCH", "/api/v1/x", 409, "Conflict", "the object has been modified")
    assert str(error) == "PATCH /api/v1/x: 409 Conflict: the object has been modified"
    assert error.conflict
    assert not error.not_found
