"""Which device nodes a container needs for a device, and where they are on this machine."""

import logging
import os
import re
import stat
from pathlib import Path

from gpunode.hardware.roots import Roots
from gpunode.hardware.sysfs import read_small
from gpunode.model.errors import HardwareError
from gpunode.model.hardware import Gpu, Inventory, device_name, mig_device_name
from gpunode.model.injection import DeviceNode, DeviceNodes

logger = logging.getLogger(__name__)

# Nodes that every CUDA process opens, as far as the driver made them.
_CONTROL = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
_CAPS = "nvidia-caps"
_IMEX = "nvidia-caps-imex-channels"
_CHANNEL_0 = f"{_IMEX}/channel0"


def device_nodes(inventory: Inventory, roots: Roots, dynamic: frozenset[str] = frozenset()) -> dict[str, DeviceNodes]:
    """What containers are given, by device name, for whole GPUs, existing MIG instances and, on the GPUs named in
    `dynamic`, every partition that could be made (its nodes and UUID are known only once it is)."""
    found: dict[str, DeviceNodes] = {}
    for gpu in inventory.gpus:
        name = device_name(gpu.pci)
        if name in dynamic and gpu.mig_profiles:
            placed = [(p.name, start) for p in gpu.mig_profiles for start in p.starts]
            names = [mig_device_name(gpu.pci, profile, start) for profile, start in placed]
            made = DeviceNodes(uuid="", pci=str(gpu.pci), product=gpu.product, parent=name, dynamic=True)
            found |= dict.fromkeys(names, made)
            found[name] = DeviceNodes(uuid=gpu.uuid, pci=str(gpu.pci), product=gpu.product, dynamic=True)
            continue
        found[name] = whole_gpu(gpu, roots)
        for instance in gpu.mig:
            partition = mig_device_name(gpu.pci, instance.profile, instance.placement_start)
            if partition in found:
                partition = f"{partition}-ci{instance.compute_instance}"
            try:
                found[partition] = mig_device(
                    gpu, partition, instance.uuid, instance.gpu_instance, instance.compute_instance, roots
                )
            except HardwareError as error:
                logger.warning("%s cannot be given to containers: %s", partition, error)
    return found


def whole_gpu(gpu: Gpu, roots: Roots) -> DeviceNodes:
    """A GPU that is not divided. Containers always see /dev/nvidia<minor>, wherever the node is on the host."""
    return DeviceNodes(
        uuid=gpu.uuid,
        pci=str(gpu.pci),
        product=gpu.product,
        nodes=(_node(roots, f"nvidia{gpu.minor}"),),
        control=(*_control(roots), *_imex_channel(gpu, roots)),
        env={_variable(device_name(gpu.pci)): gpu.uuid},
    )


def mig_device(gpu: Gpu, name: str, uuid: str, gi: int, ci: int, roots: Roots) -> DeviceNodes:
    """A MIG device: its GPU's node and the two that grant access to its instances, made here where they are missing
    (the driver only lists them). Raises HardwareError."""
    mig = roots.proc / f"driver/nvidia/capabilities/gpu{gpu.minor}/mig/gi{gi}"
    access = [_capability(mig / "access", roots), _capability(mig / f"ci{ci}/access", roots)]
    return DeviceNodes(
        uuid=uuid,
        pci=str(gpu.pci),
        product=gpu.product,
        nodes=(_node(roots, f"nvidia{gpu.minor}"), *access),
        control=_control(roots),
        env={_variable(name): uuid},
        parent=device_name(gpu.pci),
    )


def _node(roots: Roots, name: str) -> DeviceNode:
    return DeviceNode(host_path=str(roots.dev / name), container_path=f"/dev/{name}")


def _control(roots: Roots) -> tuple[DeviceNode, ...]:
    return tuple(_node(roots, name) for name in _CONTROL if (roots.dev / name).exists())


def _imex_channel(gpu: Gpu, roots: Roots) -> tuple[DeviceNode, ...]:
    """IMEX channel 0, for a GPU whose NVLink fabric spans nodes, where there is one.

    Who has a channel can import the memory that others on it export, on all nodes of the IMEX domain, so a channel is
    a tenant. Channel 0 is there only where an administrator made it (NVreg_CreateImexChannel0=1 or mknod), which
    NVIDIA's IMEX guide describes as for nodes of one user. Others are somebody's to share out, and never given here.
    """
    if not gpu.fabric.cluster_uuid or gpu.mig_enabled:
        return ()
    path = roots.dev / _CHANNEL_0
    try:
        found = path.stat()
    except OSError:
        return ()
    if stat.S_ISCHR(found.st_mode) and found.st_rdev != (wanted := _device_number(roots, _IMEX, 0)):
        numbers = f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
        logger.warning("%s is not IMEX channel 0 (%s, not %s) and is given to nobody", path, numbers, wanted)
        return ()
    return (_node(roots, _CHANNEL_0),)


def _device_number(roots: Roots, driver: str, minor: int) -> int | None:
    """As /proc/devices lists the driver; None where it does not."""
    listed = re.search(rf"(?m)^ *(\d{{1,7}}) {driver}$", read_small(roots.proc / "devices"))
    return os.makedev(int(listed[1]), minor) if listed else None


def _variable(device: str) -> str:
    """Of this device alone, so that a container with several keeps all."""
    return "GPUNODE_" + re.sub(r"[^A-Z0-9]", "_", device.upper())


def _capability(access: Path, roots: Roots) -> DeviceNode:
    match = re.search(r"DeviceFileMinor: (\d{1,7})\b", read_small(access))
    if match is None:
        raise HardwareError(f"{access} does not name a device minor; is the instance there?")
    name = f"{_CAPS}/nvidia-cap{match[1]}"
    if not (roots.dev / name).exists():
        _make_capability(roots, roots.dev / name, int(match[1]))
    return _node(roots, name)


def _make_capability(roots: Roots, path: Path, minor: int) -> None:
    number = _device_number(roots, _CAPS, minor)
    if number is None:
        raise HardwareError(f"{roots.proc / 'devices'} lists no {_CAPS}: the driver does not offer MIG capabilities")
    try:
        path.parent.mkdir(mode=0o755, exist_ok=True)
        os.mknod(path, 0o444 | stat.S_IFCHR, number)
        path.chmod(0o444)
    except FileExistsError:
        return
    except OSError as error:
        raise HardwareError(f"{path} cannot be made: {error.strerror}") from error
