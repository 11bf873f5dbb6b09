"""What has to be written to turn the slices that exist into those that are wanted."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from gpunode.model.resource import ResourceSlice


@dataclass(frozen=True)
class Changes:
    """update: wanted specs under the metadata of the slices they replace, resourceVersion included."""

    create: tuple[ResourceSlice, ...] = ()
    update: tuple[ResourceSlice, ...] = ()
    delete: tuple[ResourceSlice, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.create or self.update or self.delete)


def changes(desired: Sequence[ResourceSlice], existing: Sequence[ResourceSlice]) -> Changes:
    """Matches by name. existing: the caller's own slices only; what is not desired any more is deleted.

    A slice whose immutable fields (driver, pool name, node) differ cannot be updated: it is deleted and the wanted
    one created at the next call, when its name is free.
    """
    have = {s.metadata.name: s for s in existing}
    want = {s.metadata.name: s for s in desired}
    fixed = {name for name in want.keys() & have.keys() if _identity(want[name]) != _identity(have[name])}
    return Changes(
        create=tuple(s for name, s in want.items() if name not in have),
        update=tuple(
            replace(s, metadata=have[name].metadata)
            for name, s in want.items()
            if name in have and name not in fixed and s.spec != have[name].spec
        ),
        delete=tuple(s for name, s in have.items() if name not in want or name in fixed),
    )


def _identity(found: ResourceSlice) -> tuple[str, str, str | None]:
    return found.spec.driver, found.spec.pool.name, found.spec.node_name
