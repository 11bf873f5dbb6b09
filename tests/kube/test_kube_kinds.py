"""Paths and errors of the API client."""

import pytest

from gpunode.kube.client import decode
from gpunode.kube.errors import ApiError
from gpunode.kube.kinds import CLAIMS, NODES, PODS, SLICES
from gpunode.model.resource import ResourceSlice


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
    assert not error.not_found


@pytest.mark.parametrize(
    ("status", "reason", "raced"),
    [
        (409, "Conflict", True),
        (409, "AlreadyExists", True),
        (404, "NotFound", True),
        (422, "", True),
        (422, "Invalid", False),
        (403, "Forbidden", False),
        (500, "InternalError", False),
    ],
)
def test_a_lost_race_is_told_from_a_refusal(status: int, reason: str, raced: bool) -> None:
    assert ApiError("PATCH", "/api/v1/x", status, reason, "").raced is raced


def test_an_answer_that_is_no_such_object_is_an_error_of_the_api() -> None:
    with pytest.raises(ApiError, match="ResourceSlice"):
        decode(b'{"kind": "Status"}', ResourceSlice)
