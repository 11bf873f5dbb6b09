"""Finding a driver that is installed outside this process's own root."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpunode.files import within
from gpunode.hardware.driver import DRIVER_DIRS, LIBRARY, DriverRoot
from gpunode.kubelet.mps.daemon import Driver as MpsDriver

SOURCE = "int nvmlInitWithFlags(unsigned flags) { return 0; }\nint nvmlInit_v2(void) { return 0; }\n"


def put(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("directory", DRIVER_DIRS)
@pytest.mark.parametrize("folder", ["usr/lib64", "usr/lib/x86_64-linux-gnu", "lib64"])
def test_the_library_is_found_where_drivers_are_installed(tmp_path: Path, directory: str, folder: str) -> None:
    root = DriverRoot(tmp_path)
    assert (root.library(), root.installed()) == (None, "")
    library = put(tmp_path / directory.lstrip("/") / folder / LIBRARY)
    assert (root.library(), root.installed()) == (library, directory)


def test_a_directory_that_is_named_is_the_only_one(tmp_path: Path) -> None:
    put(tmp_path / "usr/lib64" / LIBRARY)
    library = put(tmp_path / "opt/driver/lib64" / LIBRARY)
    assert DriverRoot(tmp_path, "/opt/driver").library() == library
    assert DriverRoot(tmp_path, "/nowhere").library() is None


def test_outside_a_container_the_loader_finds_it() -> None:
    assert DriverRoot().library() is None


def test_tools_run_under_the_root_that_they_are_installed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(put(tmp_path / "path/nvidia-smi").parent))
    assert DriverRoot().command("nvidia-smi") == [str(tmp_path / "path/nvidia-smi")]
    host = tmp_path / "host"
    root = DriverRoot(host)
    assert root.command("nvidia-smi") is None, "one of the container's own is not the driver's"
    put(host / "usr/local/nvidia/toolkit/nvidia-ctk")
    put(host / "run/nvidia/driver/usr/bin/nvidia-smi")
    for one in (host / "dev", host / "run/nvidia/driver/dev"):
        one.mkdir()
    assert root.command("nvidia-ctk") == ["chroot", str(host), "/usr/local/nvidia/toolkit/nvidia-ctk"]
    assert root.command("nvidia-smi") == ["chroot", str(host / "run/nvidia/driver"), "/usr/bin/nvidia-smi"]
    assert DriverRoot(host, "/run/nvidia/driver").command("nvidia-ctk") == root.command("nvidia-ctk")


def test_tools_in_a_directory_that_is_no_root_run_in_the_hosts(tmp_path: Path) -> None:
    put(tmp_path / "home/kubernetes/bin/nvidia/bin/nvidia-smi")
    put(tmp_path / "home/kubernetes/bin/nvidia/lib64" / LIBRARY)
    home = "/home/kubernetes/bin/nvidia"
    expected = ["/usr/bin/env", f"LD_LIBRARY_PATH={home}/lib64", f"{home}/bin/nvidia-smi"]
    assert DriverRoot(tmp_path).command("nvidia-smi") == ["chroot", str(tmp_path), *expected]


def link(host: Path, path: str, target: str) -> None:
    (host / path).parent.mkdir(parents=True, exist_ok=True)
    (host / path).symlink_to(target)


@pytest.mark.parametrize("directory", ["", "run/nvidia/driver/"])
def test_absolute_links_lead_to_where_they_do_on_the_host(tmp_path: Path, directory: str) -> None:
    """Debian's packages put the driver behind /etc/alternatives."""
    host, root = tmp_path / "host", tmp_path / "host" / directory
    for name in (LIBRARY, "nvidia-smi", "nvidia-cuda-mps-control"):
        put(root / "usr/lib/nvidia/current" / name)
        link(root, f"etc/alternatives/{name}", f"/usr/lib/nvidia/current/{name}")
    link(root, f"usr/lib/x86_64-linux-gnu/{LIBRARY}", f"/etc/alternatives/{LIBRARY}")
    for name in ("nvidia-smi", "nvidia-cuda-mps-control"):
        link(root, f"usr/bin/{name}", f"/etc/alternatives/{name}")
    for needed in ("dev/shm", "tmp"):
        (root / needed).mkdir(parents=True)
    found = DriverRoot(host)
    assert found.library() == root / "usr/lib/nvidia/current" / LIBRARY
    assert found.installed() == (f"/{directory}".rstrip("/") or "/")
    assert found.command("nvidia-smi") == ["chroot", str(root).rstrip("/"), "/usr/bin/nvidia-smi"]
    assert MpsDriver(found.directory()).find() == "/usr/bin/nvidia-cuda-mps-control"


def test_links_never_lead_out_of_a_root(tmp_path: Path) -> None:
    outside = put(tmp_path / "outside/secret")
    host = tmp_path / "host"
    put(host / "a/b/file")
    for name, target in (
        ("up", "../../../../outside/secret"),
        ("away", str(outside)),
        ("loop", "/loop"),
        ("dir", "/a/./b/../b"),
    ):
        link(host, f"l/{name}" if name != "loop" else name, target)
    for path in ("l/up", "l/away", "../outside/secret", "none/at/all"):
        assert not within(host, path).exists()
    with pytest.raises(OSError, match="symbolic links"):
        within(host, "loop/x")
    link(host, "usr/sbin/in-circles", "/loop")
    assert DriverRoot(host).command("in-circles") is None
    assert within(host, "/l/dir/file") == host / "a/b/file"
    put(host / "usr/bin/nvidia-smi").unlink()
    link(host, "usr/bin/nvidia-smi", str(outside))
    assert DriverRoot(host).command("nvidia-smi") is None


def test_the_container_toolkit_speaks_of_the_hosts_paths(tmp_path: Path) -> None:
    """With the driver's directory as its root it would print paths that are elsewhere on the host."""
    driver = tmp_path / "run/nvidia/driver"
    put(driver / "usr/bin/nvidia-ctk")
    put(driver / "usr/lib64" / LIBRARY)
    (driver / "dev").mkdir()
    expected = ["chroot", str(tmp_path), "/usr/bin/env", "LD_LIBRARY_PATH=/run/nvidia/driver/usr/lib64"]
    for root in (DriverRoot(tmp_path), DriverRoot(tmp_path, "/run/nvidia/driver")):
        assert root.command("nvidia-ctk", host_paths=True) == [*expected, "/run/nvidia/driver/usr/bin/nvidia-ctk"]
    put(tmp_path / "usr/local/nvidia/toolkit/nvidia-ctk")
    assert DriverRoot(tmp_path, "/run/nvidia/driver").command("nvidia-ctk", host_paths=True) == [
        "chroot", str(tmp_path), "/usr/local/nvidia/toolkit/nvidia-ctk",
    ]  # fmt: skip


def test_the_directory_of_a_driver(tmp_path: Path) -> None:
    assert DriverRoot(tmp_path).directory() == tmp_path
    put(tmp_path / "run/nvidia/driver/usr/lib64" / LIBRARY)
    assert DriverRoot(tmp_path).directory() == tmp_path / "run/nvidia/driver"
    assert DriverRoot(tmp_path, "/opt/driver").directory() == tmp_path / "opt/driver"
    assert DriverRoot().directory() == Path("/")


def test_pynvml_uses_the_library_that_was_found_there(tmp_path: Path) -> None:
    """In a process of its own: a library that is loaded stays loaded."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make a stand-in for the driver's library")
    library = put(tmp_path / "run/nvidia/driver/usr/lib64" / LIBRARY)
    source = put(tmp_path / "nvml.c", SOURCE)
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    program = (
        "import sys; from pathlib import Path; from gpunode.hardware.driver import DriverRoot, load_nvml\n"
        "load_nvml(DriverRoot(Path(sys.argv[1]))).nvmlInit(); print('opened')"
    )
    for host, expected in ((tmp_path, "opened"), (tmp_path / "empty", "NVMLError_LibraryNotFound")):
        done = subprocess.run(
            [sys.executable, "-c", program, str(host)], capture_output=True, text=True, timeout=60, check=False
        )
        assert expected in done.stdout + done.stderr
