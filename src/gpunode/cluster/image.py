"""Container images from nothing but a static busybox, as archives in the format of `docker save`."""

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Final

from gpunode.cluster.errors import ClusterError

BUSYBOX_IMAGE: Final = "localhost/busybox:1"
PAUSE_IMAGE: Final = "localhost/pause:1"

# What tests and examples in a pod call; the rest of busybox is there as `busybox APPLET`.
_APPLETS: Final = """
    awk basename cat chmod cp cut date dd df dirname du echo env expr false find free grep head hostname
    id ip kill ln ls md5sum mkdir mount mv nc nproc nslookup od ping printf ps pwd readlink rm sed seq
    sh sha256sum sleep sort stat sync tail tar tee test time timeout top touch tr true uname uniq uptime
    vi wc wget which xargs yes
"""
# Go's names for the architectures of uname -m.
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


def write_images(busybox: Path, directory: Path) -> tuple[Path, Path]:
    """Writes busybox.tar and pause.tar into `directory` and returns their paths; existing ones are kept.

    Raises ClusterError on an architecture without a name in Go.
    """
    architecture = _ARCHITECTURES.get(platform.machine())
    if architecture is None:
        raise ClusterError(f"no container images for {platform.machine()}: a cluster needs x86_64 or aarch64")
    directory.mkdir(parents=True, exist_ok=True)
    targets = (directory / "busybox.tar", directory / "pause.tar")
    entries = ((BUSYBOX_IMAGE, ["/bin/sh"]), (PAUSE_IMAGE, ["/bin/sleep", "2147483647"]))
    for target, (name, entry) in zip(targets, entries, strict=True):
        if not target.exists():
            temporary = target.with_name(f".{target.name}")
            temporary.write_bytes(archive(name, busybox.read_bytes(), entry, architecture))
            temporary.replace(target)
    return targets


def archive(name: str, busybox: bytes, entrypoint: list[str], architecture: str) -> bytes:
    """A one-layer image: /bin/busybox, a link for every applet, /tmp, and users root and nobody.

    name  repository and tag, such as "localhost/busybox:1"
    """
    layer = _layer(busybox)
    digest = hashlib.sha256(layer).hexdigest()
    config = json.dumps(
        {
            "architecture": architecture,
            "os": "linux",
            "config": {"Entrypoint": entrypoint, "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    layer_name = f"{digest}/layer.tar"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [name], "Layers": [layer_name]}]).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, data in ((layer_name, layer), (config_name, config), ("manifest.json", manifest)):
            _file(tar, path, data, 0o644)
    return buffer.getvalue()


def _layer(busybox: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, mode in (("bin", 0o755), ("etc", 0o755), ("tmp", 0o1777)):
            directory = tarfile.TarInfo(path)
            directory.type, directory.mode = tarfile.DIRTYPE, mode
            tar.addfile(directory)
        _file(tar, "bin/busybox", busybox, 0o755)
        _file(tar, "etc/passwd", b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n", 0o644)
        _file(tar, "etc/group", b"root:x:0:\nnogroup:x:65534:\n", 0o644)
        for applet in _APPLETS.split():
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname, link.mode = tarfile.SYMTYPE, "busybox", 0o777
            tar.addfile(link)
    return buffer.getvalue()


def _file(tar: tarfile.TarFile, path: str, data: bytes, mode: int) -> None:
    info = tarfile.TarInfo(path)
    info.size, info.mode = len(data), mode
    tar.addfile(info, io.BytesIO(data))
