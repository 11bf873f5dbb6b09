"""What the controller knows of the cluster: one watch cache a kind, and the list of what changed since last asked."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpunode.kube.cache import Cache
from gpunode.kube.client import Api
from gpunode.kube.kinds import CLAIMS, CLASSES, JOBS, NAMESPACES, NODES, PODS, SLICES, Kind, Namespace, Served
from gpunode.model.core import Job, Node, Pod, PodGroup
from gpunode.model.gang import Snapshot
from gpunode.model.names import GANG_NAMESPACE_LABEL, GANG_NAMESPACE_VALUE
from gpunode.model.resource import DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice

# One change to a Snapshot: field name, key, new value or None. For gang_namespaces the value is True or None.
Change = tuple[str, str, Any]


@dataclass(frozen=True)
class Caches:
    """The caches behind a snapshot, for looking up and for taking in the results of writes."""

    nodes: Cache[Node]
    slices: Cache[ResourceSlice]
    claims: Cache[ResourceClaim]
    classes: Cache[DeviceClass]
    pods: Cache[Pod]
    jobs: Cache[Job]
    namespaces: Cache[Namespace]
    pod_groups: Cache[PodGroup] | None
    taint_rules: Cache[DeviceTaintRule] | None

    def all(self) -> tuple[Cache[Any], ...]:
        every = (*vars(self).values(),)
        return tuple(cache for cache in every if cache is not None)


class World:
    """Collects changes of all caches; `changed` is set while there are some that were not taken yet."""

    def __init__(self, api: Api, served: Served) -> None:
        self.served = served
        self.changed = asyncio.Event()
        self._changes: dict[tuple[str, str], Any] = {}

        def note(field: str) -> Callable[[str, Any], None]:
            return partial(self._note, field)

        self.caches = Caches(
            nodes=Cache(api, NODES, on_change=note("nodes")),
            slices=Cache(api, SLICES, on_change=note("slices")),
            claims=Cache(api, CLAIMS, on_change=note("claims")),
            classes=Cache(api, CLASSES, on_change=note("classes")),
            pods=Cache(api, PODS, on_change=note("pods")),
            jobs=Cache(api, JOBS, on_change=note("jobs")),
            namespaces=Cache(api, NAMESPACES, on_change=self._note_namespace),
            pod_groups=(Cache(api, served.pod_groups, on_change=note("pod_groups")) if served.pod_groups else None),
            taint_rules=(Cache(api, served.taint_rules, on_change=note("taint_rules")) if served.taint_rules else None),
        )

    async def synced(self) -> None:
        """Wait until every cache has listed once."""
        for cache in self.caches.all():
            await cache.synced.wait()

    def take_changes(self) -> list[Change]:
        """Changes since the last call, at most one a key."""
        changes = [(field, key, value) for (field, key), value in self._changes.items()]
        self._changes.clear()
        self.changed.clear()
        return changes

    def everything(self) -> list[Change]:
        """The whole state as changes, for a worker that starts from nothing; forgets what was pending."""
        self.take_changes()
        fields = ("nodes", "slices", "claims", "classes", "pods", "jobs", "pod_groups", "taint_rules")
        changes: list[Change] = []
        for field in fields:
            cache: Cache[Any] | None = getattr(self.caches, field)
            if cache is not None:
                changes += [(field, key, value) for key, value in cache.items.items()]
        changes += [("gang_namespaces", key, True) for key, ns in self.caches.namespaces.items.items() if is_gang(ns)]
        return changes

    def _note(self, field: str, key: str, value: object) -> None:
        self._changes[field, key] = value
        self.changed.set()

    def _note_namespace(self, key: str, value: Namespace | None) -> None:
        self._note("gang_namespaces", key, True if value is not None and is_gang(value) else None)


def is_gang(namespace: Namespace) -> bool:
    """Whether the admission policy gates pods of this namespace."""
    return namespace.metadata.labels.get(GANG_NAMESPACE_LABEL) == GANG_NAMESPACE_VALUE


def apply_changes(snapshot: Snapshot, changes: list[Change]) -> Snapshot:
    """The snapshot with the changes applied. Reuses (and updates in place) the dictionaries of the old one."""
    namespaces = set(snapshot.gang_namespaces)
    for field, key, value in changes:
        if field == "gang_namespaces":
            namespaces.add(key) if value else namespaces.discard(key)
            continue
        items: dict[str, Any] = getattr(snapshot, field)
        if value is None:
            items.pop(key, None)
        else:
            items[key] = value
    return Snapshot(
        nodes=snapshot.nodes,
        slices=snapshot.slices,
        claims=snapshot.claims,
        classes=snapshot.classes,
        taint_rules=snapshot.taint_rules,
        pods=snapshot.pods,
        pod_groups=snapshot.pod_groups,
        jobs=snapshot.jobs,
        gang_namespaces=frozenset(namespaces),
    )


async def read_snapshot(api: Api, served: Served) -> Snapshot:
    """The same state read once, for commands that ask and go. Raises ApiError, UnreachableError."""
    changes: list[Change] = []
    kinds: dict[str, Kind[Any] | None] = {
        "nodes": NODES,
        "slices": SLICES,
        "claims": CLAIMS,
        "classes": CLASSES,
        "pods": PODS,
        "jobs": JOBS,
        "pod_groups": served.pod_groups,
        "taint_rules": served.taint_rules,
    }
    for field, kind in kinds.items():
        if kind is not None:
            items, _ = await api.list(kind.path(), kind.type)
            changes += [(field, item.metadata.key, item) for item in items]
    namespaces, _ = await api.list(NAMESPACES.path(), Namespace)
    changes += [("gang_namespaces", ns.metadata.key, True) for ns in namespaces if is_gang(ns)]
    return apply_changes(Snapshot(), changes)
