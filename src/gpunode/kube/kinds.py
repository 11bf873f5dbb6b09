"""The API kinds this project reads and writes, with the paths they live at.

Group versions differ between Kubernetes 1.36 and 1.37 for PodGroup and DeviceTaintRule; which one is served is
found by discovery, never by version arithmetic.
"""

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from gpunode.kube.client import Api
from gpunode.kube.errors import ApiError
from gpunode.model.core import Job, Node, Pod, PodGroup
from gpunode.model.meta import ApiStruct, ObjectMeta
from gpunode.model.resource import DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice

T = TypeVar("T")


class ConfigMap(ApiStruct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    data: dict[str, str] = {}


class Namespace(ApiStruct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()


@dataclass(frozen=True)
class Kind(Generic[T]):
    """One resource type: `group_version` as in apiVersion ("v1", "resource.k8s.io/v1")."""

    group_version: str
    plural: str
    kind: str
    type: type[T]

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """URL path of the collection, one object or its subresource."""
        root = "/api" if "/" not in self.group_version else "/apis"
        parts = [root, self.group_version]
        if namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part]
        return "/".join(parts)

    def path_of(self, key: str, subresource: str = "") -> str:
        """Path of an object by its `namespace/name` or `name` key."""
        namespace, _, name = key.rpartition("/")
        return self.path(namespace, name, subresource)


NODES: Final = Kind("v1", "nodes", "Node", Node)
PODS: Final = Kind("v1", "pods", "Pod", Pod)
NAMESPACES: Final = Kind("v1", "namespaces", "Namespace", Namespace)
CONFIG_MAPS: Final = Kind("v1", "configmaps", "ConfigMap", ConfigMap)
JOBS: Final = Kind("batch/v1", "jobs", "Job", Job)
SLICES: Final = Kind("resource.k8s.io/v1", "resourceslices", "ResourceSlice", ResourceSlice)
CLAIMS: Final = Kind("resource.k8s.io/v1", "resourceclaims", "ResourceClaim", ResourceClaim)
CLASSES: Final = Kind("resource.k8s.io/v1", "deviceclasses", "DeviceClass", DeviceClass)


@dataclass(frozen=True)
class Served:
    """The kinds whose version, or existence, depends on the cluster."""

    pod_groups: Kind[PodGroup] | None
    taint_rules: Kind[DeviceTaintRule] | None


async def discover(api: Api) -> Served:
    """Ask the API server which versions of PodGroup and DeviceTaintRule it serves, newest first."""
    group = await _first(api, "scheduling.k8s.io", ("v1beta1", "v1alpha2"), "podgroups")
    rule = await _first(api, "resource.k8s.io", ("v1", "v1beta2"), "devicetaintrules")
    return Served(
        pod_groups=Kind(group, "podgroups", "PodGroup", PodGroup) if group else None,
        taint_rules=Kind(rule, "devicetaintrules", "DeviceTaintRule", DeviceTaintRule) if rule else None,
    )


class _ApiResource(ApiStruct, frozen=True):
    name: str


class _ApiResourceList(ApiStruct, frozen=True):
    resources: tuple[_ApiResource, ...] = ()


async def _first(api: Api, group: str, versions: tuple[str, ...], plural: str) -> str | None:
    for version in versions:
        try:
            served = await api.get(f"/apis/{group}/{version}", _ApiResourceList)
        except ApiError as error:
            if error.not_found:
                continue
            raise
        if any(resource.name == plural for resource in served.resources):
            return f"{group}/{version}"
    return None
