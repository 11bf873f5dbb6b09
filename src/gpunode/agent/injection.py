"""What a container is given with each GPU: the one place that knows device nodes and environment."""

from pathlib import Path

from gpunode.hardware.roots import Roots
from gpunode.model.hardware import Gpu, Inventory, device_name
from gpunode.model.injection import DeviceNode, DeviceNodes

# Nodes that every CUDA process opens, as far as the driver made them.
_CONTROL = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")


def device_nodes(inventory: Inventory, roots: Roots) -> dict[str, DeviceNodes]:
    """Injection of every full GPU, by device name.

    Containers always see /dev/nvidia<minor>; on the host the node is in `roots.dev`, which is elsewhere for fakes.
    """
    control = tuple(
        DeviceNode(host_path=str(roots.dev / name), container_path=f"/dev/{name}")
        for name in _CONTROL
        if (roots.dev / name).exists()
    )
    return {device_name(gpu.pci): _nodes(gpu, roots.dev, control) for gpu in inventory.gpus}


def _nodes(gpu: Gpu, dev: Path, control: tuple[DeviceNode, ...]) -> DeviceNodes:
    node = f"nvidia{gpu.minor}"
    variable = "GPUNODE_GPU_" + str(gpu.pci).replace(":", "_").replace(".", "_").upper()
    return DeviceNodes(
        uuid=gpu.uuid,
        pci=str(gpu.pci),
        product=gpu.product,
        nodes=(DeviceNode(host_path=str(dev / node), container_path=f"/dev/{node}"),),
        control=control,
        env={variable: gpu.uuid},
    )
