"""One GPU as a DRA device: attribute and capacity names claims select by (design D6, D7)."""

import re
from dataclasses import dataclass

from gpunode.model.hardware import Gpu, Inventory, Nic, device_name
from gpunode.model.quantity import format_bytes
from gpunode.model.resource import Attribute, Capacity, Device

STANDARD = "resource.kubernetes.io"
_TEXT_LIMIT = 64
_VENDOR = re.compile(r"^(nvidia|amd|intel)\s+", re.IGNORECASE)


def text_attribute(value: str) -> Attribute | None:
    """Names come from firmware: unprintable characters go, the API's 64 bytes hold, nothing means no attribute."""
    clean = "".join(c for c in value if c.isprintable()).strip()
    clean = clean.encode()[:_TEXT_LIMIT].decode(errors="ignore").strip()
    return Attribute(string=clean) if clean else None


def version_attribute(value: str) -> Attribute | None:
    """A dotted number as semantic version: 580.95.05 -> 580.95.5, 13.0 -> 13.0.0. Anything else is left out.

    The API server rejects the whole slice for a version that is not semver.
    """
    parts = value.split(".")
    if len(parts) > 3 or not all(p.isascii() and p.isdecimal() and len(p) <= 9 for p in parts):
        return None
    return Attribute(version=".".join(str(int(p)) for p in [*parts, "0", "0"][:3]))


@dataclass(frozen=True)
class NearestNic:
    """The RDMA device a GPU should use; scope says what they share: "pcieRoot" or "numaNode"."""

    nic: Nic
    scope: str


def gpu_device(gpu: Gpu, inventory: Inventory, domain: str | None, nearest: NearestNic | None = None) -> Device:
    """A whole GPU. domain: its NVLink domain, None while the fabric is still coming up."""
    capacity = {"memory": Capacity(value=format_bytes(gpu.memory_bytes))}
    if gpu.multiprocessors is not None:
        capacity["multiprocessors"] = Capacity(value=str(gpu.multiprocessors))
    attributes = {
        "type": Attribute(string="gpu"),
        **_identity(gpu, inventory),
        **_links(gpu, domain),
        **_place(gpu, nearest),
    }
    return Device(name=device_name(gpu.pci), attributes=attributes, capacity=capacity)


def nvlink_domains(inventory: Inventory) -> dict[str, str]:
    """NVLink domain by GPU UUID; a GPU whose fabric is not up yet is absent.

    With a fabric UUID the domain spans nodes. Without one it is named after the lowest GPU UUID of the connected
    component, which no other node can have. A GPU in MIG mode has no peers, but counts as connected through its
    switches: domains keep their names when MIG mode comes and goes with claims, and only whole GPUs show theirs.
    """
    settled = {g.uuid: g for g in inventory.gpus if g.fabric.state not in ("notStarted", "inProgress")}
    spanning = {g.uuid: f"{g.fabric.cluster_uuid}.{g.fabric.clique}" for g in settled.values() if g.fabric.cluster_uuid}
    local = {uuid: gpu for uuid, gpu in settled.items() if uuid not in spanning}
    neighbours: dict[str, set[str]] = {uuid: set() for uuid in local}
    switched = {uuid for uuid, gpu in local.items() if any(link.active and link.peer == "switch" for link in gpu.links)}
    for uuid, gpu in local.items():
        behind = switched if gpu.mig_enabled and uuid in switched else frozenset()
        for peer in (gpu.nvlink_peers | behind) & local.keys():
            neighbours[uuid].add(peer)
            neighbours[peer].add(uuid)
    named: dict[str, str] = {}
    for uuid in sorted(local):
        if uuid not in named:
            named |= dict.fromkeys(_component(uuid, neighbours), "n-" + _hex12(uuid))
    return spanning | named


def nearest_nics(inventory: Inventory) -> dict[str, NearestNic]:
    """By GPU UUID: an RDMA device under the same PCIe root, else on the same NUMA node. GPUs that share a root or
    node are spread over its NICs in PCI order, as NCCL pairs them."""
    rdma = [nic for nic in inventory.nics if nic.rdma]
    found: dict[str, NearestNic] = {}
    for gpu in inventory.gpus:
        for scope, key in (("pcieRoot", _pcie_root), ("numaNode", _numa_node)):
            place = key(gpu)
            nics = [nic for nic in rdma if place is not None and key(nic) == place]
            if nics:
                beside = [g.uuid for g in inventory.gpus if key(g) == place]
                found[gpu.uuid] = NearestNic(nics[beside.index(gpu.uuid) * len(nics) // len(beside)], scope)
                break
    return found


def _pcie_root(device: Gpu | Nic) -> str | int | None:
    return device.pcie_root or None


def _numa_node(device: Gpu | Nic) -> str | int | None:
    return device.numa_node


def _component(start: str, neighbours: dict[str, set[str]]) -> set[str]:
    seen, todo = {start}, [start]
    while todo:
        fresh = neighbours[todo.pop()] - seen
        seen |= fresh
        todo += fresh
    return seen


def _hex12(uuid: str) -> str:
    return uuid.removeprefix("GPU-").replace("-", "").lower()[:12]


def _identity(gpu: Gpu, inventory: Inventory) -> dict[str, Attribute]:
    capability = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else ""
    return _given(
        uuid=text_attribute(gpu.uuid),
        productName=text_attribute(gpu.product),
        model=text_attribute(_VENDOR.sub("", gpu.product)),
        brand=text_attribute(gpu.brand),
        architecture=text_attribute(gpu.architecture),
        cudaComputeCapability=version_attribute(capability),
        driverVersion=version_attribute(inventory.driver_version),
        cudaDriverVersion=version_attribute(inventory.cuda_version),
        migEnabled=Attribute(bool_=gpu.mig_enabled),
    )


def _links(gpu: Gpu, domain: str | None) -> dict[str, Attribute]:
    return _given(
        nvlinkDomain=text_attribute(domain or ""),
        nvlinkLinksActive=Attribute(int_=sum(link.active for link in gpu.links)),
        nvlinkLinksTotal=Attribute(int_=len(gpu.links)),
        fabricState=text_attribute(gpu.fabric.state),
    )


def _place(gpu: Gpu, nearest: NearestNic | None) -> dict[str, Attribute]:
    place = {
        "nearestNic": text_attribute(str(nearest.nic.pci) if nearest else ""),
        "nearestRdma": text_attribute(nearest.nic.rdma if nearest else ""),
        "nearestNicScope": text_attribute(nearest.scope if nearest else ""),
        f"{STANDARD}/pciBusID": Attribute(string=str(gpu.pci)),
        f"{STANDARD}/pcieRoot": text_attribute(gpu.pcie_root),
        f"{STANDARD}/numaNode": Attribute(int_=gpu.numa_node) if gpu.numa_node is not None else None,
    }
    return {name: value for name, value in place.items() if value is not None}


def _given(**attributes: Attribute | None) -> dict[str, Attribute]:
    return {name: value for name, value in attributes.items() if value is not None}
