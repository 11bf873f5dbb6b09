"""The difference between wanted and existing slices."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpunode.model.meta import ObjectMeta
from gpunode.model.resource import Device, Pool, ResourceSlice, ResourceSliceSpec
from gpunode.slices.changes import Changes, changes


def made(name: str, *devices: str, version: str = "", **spec: Any) -> ResourceSlice:
    fields: dict[str, Any] = {
        "driver": "d.example.com",
        "node_name": "n",
        "pool": Pool(name="n", generation=1, resource_slice_count=1),
    }
    return ResourceSlice(
        metadata=ObjectMeta(name=name, resource_version=version, uid=f"uid-{name}" if version else ""),
        spec=ResourceSliceSpec(devices=tuple(Device(name=d) for d in devices), **(fields | spec)),
    )


def test_each_slice_is_created_updated_deleted_or_left_alone() -> None:
    existing = [made("same", "a", version="1"), made("differs", "b", version="2"), made("gone", version="3")]
    todo = changes([made("same", "a"), made("differs", "c"), made("fresh", "d")], existing)
    assert todo.create == (made("fresh", "d"),)
    assert todo.update == (replace(existing[1], spec=made("differs", "c").spec),)
    assert todo.update[0].metadata.resource_version == "2"
    assert todo.delete == (existing[2],)


@pytest.mark.parametrize(
    "other",
    [{"driver": "e.example.com"}, {"node_name": "m"}, {"pool": Pool(name="p", generation=1, resource_slice_count=1)}],
    ids=lambda fields: next(iter(fields)),
)
def test_what_cannot_be_updated_is_deleted_first_and_created_then(other: dict[str, Any]) -> None:
    wanted, old = made("s", "a"), made("s", "a", version="1", **other)
    assert changes([wanted], [old]) == Changes(delete=(old,))
    assert changes([wanted], []) == Changes(create=(wanted,))


def test_only_nothing_to_do_is_false() -> None:
    one = made("s")
    assert not Changes()
    assert not changes([one], [replace(one, metadata=ObjectMeta(name="s", uid="u"))])
    assert all([Changes(create=(one,)), Changes(update=(one,)), Changes(delete=(one,))])
