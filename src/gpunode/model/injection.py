"""What a container is given together with a device: device nodes, mounts and environment.

Backends of `gpunode.hardware` say it, `gpunode.kubelet` writes it into CDI files. Frozen structs, because they
are also kept in the kubelet plugin's checkpoint.
"""

import msgspec


class DeviceNode(msgspec.Struct, frozen=True):
    """A character device: where it is on the host, and where the container sees it."""

    host_path: str
    container_path: str


class Mount(msgspec.Struct, frozen=True):
    """A bind mount of a host file or directory."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ("ro", "nosuid", "nodev", "bind")


class DeviceNodes(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one published device is handed to a container.

    uuid: what CUDA calls the device (a GPU's or MIG instance's UUID).
    pci: PCI address, "" if it has none. nodes: its own device nodes. control: nodes every GPU container needs
    once, however many devices it has. env: variables of this device alone, so names must differ between devices.
    parent: device name of the GPU this is a partition of, "" for a whole GPU.
    dynamic: made when a claim is prepared (a MIG instance that may not exist yet); nodes and uuid are then
    those of `Partitioner.create`, and of what stands here only `parent` counts.
    """

    uuid: str
    pci: str = ""
    product: str = ""
    nodes: tuple[DeviceNode, ...] = ()
    control: tuple[DeviceNode, ...] = ()
    env: dict[str, str] = {}
    mounts: tuple[Mount, ...] = ()
    parent: str = ""
    dynamic: bool = False
