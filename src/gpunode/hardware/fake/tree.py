"""The sysfs, /proc and /dev of a fake machine, as the Linux kernel and the NVIDIA driver lay them out."""

import os
import shutil
import stat
from pathlib import Path

from gpunode.hardware.fake.state import FakeState
from gpunode.hardware.roots import Roots
from gpunode.hardware.sysfs import parse_pci

# Character device numbers of the NVIDIA driver: /proc/devices, major 195; uvm's major is dynamic, 510 is common.
_NVIDIA_MAJOR = 195
_UVM_MAJOR = 510
_CAPS_MAJOR = 511
_IMEX_MAJOR = 509
_IMEX = "nvidia-caps-imex-channels"
_ACCESS = "DeviceFileMinor: {}\nDeviceFileMode: 292\nDeviceFileModify: 1"
_CONTROL = {
    "nvidiactl": (_NVIDIA_MAJOR, 255),
    "nvidia-modeset": (_NVIDIA_MAJOR, 254),
    "nvidia-uvm": (_UVM_MAJOR, 0),
    "nvidia-uvm-tools": (_UVM_MAJOR, 1),
}
# PCI class codes: 3D controller, InfiniBand controller, Ethernet controller.
_GPU_CLASS, _INFINIBAND_CLASS, _ETHERNET_CLASS = "0x030200", "0x020700", "0x020000"


def build(state: FakeState, roots: Roots) -> None:
    """Writes the trees anew; the kernel log is not touched."""
    for root in (roots.sys, roots.proc, roots.dev):
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
    for gpu, spec in zip(state.gpus, state.board.gpus, strict=True):
        vendor = state.board.pci_device_id
        device = _pci_function(roots.sys, spec.pci, spec.root, spec.numa, _GPU_CLASS)
        _write(device / "device", f"0x{vendor[2:6].lower()}")
        character_device(roots.dev / f"nvidia{gpu.index}", _NVIDIA_MAJOR, gpu.index)
    for nic in state.board.nics:
        device = _pci_function(
            roots.sys, nic.pci, nic.root, nic.numa, _INFINIBAND_CLASS if nic.rdma else _ETHERNET_CLASS
        )
        if nic.rdma:
            (device / "infiniband" / nic.rdma).mkdir(parents=True)
    for name, (major, minor) in _CONTROL.items():
        character_device(roots.dev / name, major, minor)
    _write(roots.proc / "sys/kernel/random/boot_id", state.saved.boot_id)
    version = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {state.saved.driver_version}"
    _write(roots.proc / "driver/nvidia/version", version)
    majors = {"nvidia": _NVIDIA_MAJOR, "nvidiactl": _NVIDIA_MAJOR, "nvidia-uvm": _UVM_MAJOR, "nvidia-caps": _CAPS_MAJOR}
    if state.board.fabric.cluster_uuid:  # as with the driver's option NVreg_CreateImexChannel0=1
        majors[_IMEX] = _IMEX_MAJOR
        character_device(roots.dev / _IMEX / "channel0", _IMEX_MAJOR, 0)
    listing = "\n".join(f"{major:3} {name}" for name, major in majors.items())
    _write(roots.proc / "devices", f"Character devices:\n{listing}\n\nBlock devices:\n  8 sd")
    write_capabilities(state, roots)


def write_capabilities(state: FakeState, roots: Roots) -> None:
    """/proc/driver/nvidia/capabilities: an `access` file for each GPU and compute instance that exists.

    Minor numbers as in /proc/driver/nvidia-caps/mig-minors: 3 on, nine for each of 15 GPU instances of each GPU.
    """
    top = roots.proc / "driver/nvidia/capabilities"
    shutil.rmtree(top, ignore_errors=True)
    for gpu in state.gpus:
        mig = top / f"gpu{gpu.index}" / "mig"
        for instance in gpu.saved.instances:
            minor = 3 + 9 * (15 * gpu.index + instance.gi)
            _write(mig / f"gi{instance.gi}" / "access", _ACCESS.format(minor))
            if instance.compute:
                _write(mig / f"gi{instance.gi}" / "ci0" / "access", _ACCESS.format(minor + 1))


def character_device(path: Path, major: int, minor: int) -> None:
    """A real character device where this process may make one, else an empty file of the same name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
        path.chmod(0o666)
    except PermissionError:
        path.touch()


def _pci_function(sys: Path, address: str, root: str | None, numa: int, class_code: str) -> Path:
    """devices/<root>/<bridge>/<address>, and the link to it from bus/pci/devices."""
    pci = parse_pci(address)
    bridge = f"{pci.domain:04x}:{(root or 'pci0000:00').rpartition(':')[2]}:01.1"
    device = sys / "devices" / (root or f"pci{pci.domain:04x}:{pci.bus:02x}") / bridge / str(pci)
    device.mkdir(parents=True)
    _write(device / "numa_node", str(numa))
    _write(device / "class", class_code)
    _write(device / "vendor", "0x10de" if class_code == _GPU_CLASS else "0x15b3")
    link = sys / "bus/pci/devices" / str(pci)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(device, link.parent))
    return device


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
