"""The keeper as a process, with the fake machine's control program: real daemons, mounts, signals and kills."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from kubelet_fakes import FakeModes

from gpunode.hardware.fake.tools import write_tools
from gpunode.kubelet.config import Mps
from gpunode.kubelet.mps import launch
from gpunode.kubelet.mps.control import MpsDaemons
from gpunode.kubelet.mps.daemon import Daemon, Driver, Times, ToolError
from gpunode.kubelet.mps.files import DaemonState, MpsFiles, Phase, Wanted, encode, read
from gpunode.kubelet.mps.keeper import Keeper
from gpunode.model.errors import HardwareError, NotOfferedError
from gpunode.model.injection import DeviceNodes


def may_mount() -> bool:
    """Whether this process may do what the keeper does: mount, in a namespace of its own."""
    code = "import os, ctypes; raise SystemExit(ctypes.CDLL(None).unshare(0x20000) != 0)"
    return os.geteuid() == 0 and subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


pytestmark = [
    pytest.mark.skipif(not may_mount(), reason="needs root and the right to mount"),
    pytest.mark.skipif(sys.executable.startswith("/tmp/"), reason="Python is below /tmp, which daemons do not see"),
]
QUICK = Times(start=3.0, call=2.5, stop=1.0, check=0.3, back_off=(0.1, 0.4))


class Place:
    """A node's MPS directory and a driver, on a file system that daemons see (they have a /tmp of their own)."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.kubelet = base / "kubelet"
        self.files = MpsFiles(self.kubelet / "plugins" / "gpu.gpunode.dev" / "mps")
        self.files.wanted_dir.mkdir(parents=True)
        self.tool = write_tools(base / "bin")
        self.modes = FakeModes(base / "modes")
        self.agent = MpsDaemons(self.files.root, self.modes)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *, tool: str = "") -> "subprocess.Popen[bytes]":
        program = [sys.executable, "-m", "gpunode.kubelet.mps", str(self.files.root), "/", tool or str(self.tool)]
        with (self.base / "keeper.log").open("ab") as log:
            process = subprocess.Popen(program, stderr=log)
        self.processes.append(process)
        until(lambda: getattr(self.files.living_keeper(), "pid", 0) == process.pid, "the keeper to be there")
        return process

    def token(self) -> str:
        return self.agent._keeper()[0]

    def want(self, name: str, **more: object) -> Wanted:
        one = Wanted(devices={name: f"GPU-{name}"}, **more)  # type: ignore[arg-type]
        temporary = self.files.wanted(name).with_suffix(".tmp")
        temporary.write_bytes(encode(one))
        temporary.replace(self.files.wanted(name))
        return one

    def state(self, name: str) -> DaemonState:
        found = read(self.files.state(name), DaemonState)
        return found or DaemonState(phase=Phase.STOPPED, wanted=None, keeper="")

    def ready(self, name: str) -> DaemonState:
        """The state of a daemon once the keeper of now says that it is ready."""
        token = self.token()
        until(lambda: self.state(name).keeper == token and self.state(name).phase is Phase.READY, f"{name} to be ready")
        return self.state(name)

    def faults(self, **faults: str) -> None:
        (self.tool.parent / "mps-faults.json").write_bytes(
            msgspec.json.encode({f"GPU-{name.replace('_', '-')}": fault for name, fault in faults.items()})
        )

    def mounts(self) -> list[str]:
        return [
            line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.base) in line
        ]

    def clean(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for path in self.mounts():
            with suppress(OSError):
                launch.unmount(path)
        shutil.rmtree(self.base)


@pytest.fixture
def place() -> Iterator[Place]:
    one = Place(Path(tempfile.mkdtemp(dir="/var/tmp", prefix="gpunode-mps-")))
    try:
        yield one
    finally:
        one.clean()


@pytest.fixture
def quick(place: Place) -> Iterator[Keeper]:
    """A keeper inside the test, which waits less long."""
    keeper = Keeper(place.files, Driver(Path("/"), str(place.tool)), QUICK)
    thread = threading.Thread(target=keeper.run)
    thread.start()
    until(lambda: place.token() != "", "the keeper to be there")
    try:
        yield keeper
    finally:
        keeper.stop.set()
        thread.join()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_a_daemon_from_the_agents_wish_to_its_end(place: Place) -> None:
    place.start()
    devices = {name: DeviceNodes(uuid=f"GPU-{name}") for name in ("gpu-1", "gpu-0")}
    assert place.agent.refuses({Mps(): devices}) == ""
    given = place.agent.apply("u", Mps(25, 3 * 2**30), devices)
    pid = place.ready("gpu-0").pid
    environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
    assert "CUDA_VISIBLE_DEVICES=GPU-gpu-0,GPU-gpu-1" in environment
    assert "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps" in environment
    # The daemon sees as /tmp/nvidia-mps and /dev/shm what the container is given there.
    for mount in given["gpu-0"].mounts:
        assert Path(mount.host_path).samefile(f"/proc/{pid}/root{mount.container_path}")
        assert not Path(mount.host_path).samefile(mount.container_path) if Path(mount.container_path).exists() else True
    assert (place.files.daemon("gpu-0") / "shm").is_mount()
    log = (place.files.daemon("gpu-0") / "tmp/nvidia-log/control.log").read_text()
    assert "Cmd:set_default_active_thread_percentage 25" in log
    assert "Cmd:set_default_device_pinned_mem_limit 1 3072M" in log
    assert place.modes.set() == {"GPU-gpu-0", "GPU-gpu-1"}
    place.agent.clear("gpu-1")
    assert not runs(pid)
    assert place.modes.set() == set() and place.mounts() == []
    assert list(place.files.daemons_dir.iterdir()) == list(place.files.wanted_dir.iterdir()) == []


def test_a_daemon_that_dies_is_started_again_where_its_clients_look(place: Place) -> None:
    place.start()
    place.want("gpu-0")
    first = place.ready("gpu-0")
    pipes = place.files.daemon("gpu-0") / "tmp/nvidia-mps"
    directory = pipes.stat().st_ino
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: place.state("gpu-0").phase is Phase.FAILED, "the end to be told")
    assert "ended with status -9" in place.state("gpu-0").message
    second = place.ready("gpu-0")
    assert second.pid != first.pid and second.restarts == 1
    assert pipes.stat().st_ino == directory and (pipes / "control").is_socket()


def test_a_tool_that_fails_is_quoted_tried_again_and_costs_no_other_claim(place: Place, quick: Keeper) -> None:
    place.faults(gpu_0="refuse", gpu_1="mute", gpu_2="die")
    for n in range(4):
        place.want(f"gpu-{n}")
    good = place.ready("gpu-3")
    words = {"gpu-0": "in use by another client", "gpu-1": "does not answer", "gpu-2": "uncorrectable ECC error"}
    for name, part in words.items():
        until(lambda name=name, part=part: part in place.state(name).message, f"{name} to say {part}")  # type: ignore[misc]
        assert not place.state(name).refused
    with pytest.raises(HardwareError, match="failed: it ended with status 1: CUDA error"):
        until(lambda: place.state("gpu-0").phase is Phase.FAILED, "gpu-0 to fail")
        place.agent.confirm(["gpu-0"])
    place.faults()
    for name in words:
        assert place.ready(name).restarts > 0
    assert place.state("gpu-3").pid == good.pid


def test_settings_that_the_daemon_does_not_take_are_nobodys_fault(place: Place, quick: Keeper) -> None:
    """A tool that knows no memory limits."""
    text = place.tool.read_text()
    place.tool.write_text(text.replace('case ["set_default_device_pinned_mem_limit"', 'case ["something_else"'))
    with pytest.raises(NotOfferedError, match=r"does not take the settings|did not take the memory limit"):
        place.agent.apply("u", Mps(None, 2**30), {"gpu-0": DeviceNodes(uuid="GPU-0")})
    place.agent.clear("gpu-0")
    assert list(place.files.daemons_dir.iterdir()) == []


def test_damaged_files_start_nothing_and_end_nothing(place: Place) -> None:
    place.start()
    place.want("gpu-0")
    pid = place.ready("gpu-0").pid
    place.files.wanted("gpu-0").write_bytes(b"\0" * 100)
    secret = place.base / "secret"
    secret.write_bytes(encode(Wanted(devices={"gpu-6": "GPU-6"})))
    for name, content in {"gpu-1": b"", "gpu-2": b"x" * 70_000, "gpu-3": b"[" * 60_000, "gpu-4": b"{}"}.items():
        place.files.wanted(name).write_bytes(content)
    place.files.wanted("gpu-5").mkdir()
    place.files.wanted("gpu-6").symlink_to(secret)
    os.mkfifo(place.files.wanted("gpu-7"))
    place.files.wanted("gpu-8").write_bytes(encode(Wanted(devices={"gpu-9": "GPU-9"})))
    (place.files.wanted_dir / "..json").write_bytes(b"")
    for n in range(1, 9):
        until(lambda n=n: "cannot be read" in place.state(f"gpu-{n}").message, f"gpu-{n} to be told")  # type: ignore[misc]
    place.want("gpu-a")
    place.ready("gpu-a")
    assert runs(pid)
    place.files.wanted("gpu-1").unlink()
    until(lambda: not place.files.daemon("gpu-1").exists(), "what was said about gpu-1 to be gone")


def test_many_daemons_at_once(place: Place) -> None:
    place.start()
    names = [f"gpu-{n:02d}" for n in range(16)]
    for name in names:
        place.want(name, thread_percentage=10)
    pids = {place.ready(name).pid for name in names}
    assert len(pids) == len(names)
    for name in names:
        place.files.wanted(name).unlink()
    until(lambda: not any(place.files.daemons_dir.iterdir()), "all directories to be gone")
    assert not any(runs(pid) for pid in pids)


def test_a_killed_keeper_leaves_no_daemon_and_the_next_one_starts_them_again(place: Place) -> None:
    keeper = place.start()
    place.want("gpu-0")
    place.want("gpu-1")
    first = place.ready("gpu-0")
    (place.files.daemon("gpu-0") / "shm" / "of-a-pod").write_text("x")
    keeper.kill()
    keeper.wait()
    until(lambda: not runs(first.pid), "the daemon to end with its keeper")
    assert "no MPS keeper" in place.agent.troubles()["gpu-0"]
    place.files.wanted("gpu-1").unlink()
    place.start()
    assert place.ready("gpu-0").pid != first.pid
    assert (place.files.daemon("gpu-0") / "shm" / "of-a-pod").exists()
    until(lambda: not place.files.daemon("gpu-1").exists(), "what nobody wants to be gone")


def test_sigterm_ends_all_daemons_and_says_so(place: Place) -> None:
    keeper = place.start()
    names = ["gpu-0", "gpu-1", "gpu-2"]
    for name in names:
        place.want(name)
    pids = [place.ready(name).pid for name in names]
    keeper.terminate()
    assert keeper.wait(20) == 0
    assert not any(runs(pid) for pid in pids)
    assert place.files.living_keeper() is None
    assert {place.state(name).phase for name in names} == {Phase.STOPPED}
    # Containers have these mounted; the next keeper goes on with them.
    assert all((place.files.daemon(name) / "shm").is_mount() for name in names)


def test_one_keeper_a_node(place: Place) -> None:
    first = place.start()
    program = [sys.executable, "-m", "gpunode", "mps-keeper", "--kubelet-dir", str(place.kubelet), "--tool", "no-such"]
    second = subprocess.run(program, capture_output=True, text=True, timeout=30, check=False)
    assert second.returncode == 1 and second.stderr.count("\n") == 1, second.stderr
    assert "another keeper holds" in second.stderr
    assert first.poll() is None


def test_a_driver_without_the_tool_is_told_to_every_claim(place: Place) -> None:
    place.start(tool="no-such-tool")
    why = place.agent.refuses({Mps(): {"gpu-0": DeviceNodes(uuid="GPU-0")}})
    assert "no no-such-tool below /" in why and "--driver-root" in why


def test_a_driver_root_without_what_a_daemon_needs_is_told(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="tmp is no directory; name the driver's root"):
        Driver(tmp_path).find()
    for name in ("tmp", "dev/shm", "usr/bin"):
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(ToolError, match="there is no nvidia-cuda-mps-control below"):
        Driver(tmp_path).find()
    for place in ("usr/bin/nvidia-cuda-mps-control", "tmp/tool"):
        (tmp_path / place).touch(0o755)
    assert Driver(tmp_path).find() == "/usr/bin/nvidia-cuda-mps-control"
    with pytest.raises(ToolError, match="below /tmp"):
        Driver(tmp_path, "/tmp/tool").find()


def test_what_containers_leave_in_the_pipes_directory_hurts_nobody(place: Place, quick: Keeper) -> None:
    victim = place.base / "victim"
    victim.write_text("untouched")
    place.want("gpu-0")
    first = place.ready("gpu-0")
    pipes = place.files.daemon("gpu-0") / "tmp/nvidia-mps"
    (pipes / "link").symlink_to(victim)
    (pipes / "up").symlink_to("/")
    deep = pipes
    with suppress(OSError):  # ends at the limit of a path's length
        for _ in range(2000):
            deep /= "d"
            deep.mkdir()
    with suppress(OSError), (pipes / "large").open("wb") as file:  # ends when it is full
        for _ in range(200):
            file.write(b"\0" * 2**20)
    assert (pipes / "large").stat().st_size < 100 * 2**20
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: place.state("gpu-0").restarts > 0, "the daemon to be started again")
    place.ready("gpu-0")
    assert not (pipes / "link").is_symlink()
    place.files.wanted("gpu-0").unlink()
    until(lambda: not place.files.daemon("gpu-0").exists(), "its directory to be gone")
    assert victim.read_text() == "untouched" and place.mounts() == []


def test_links_in_place_of_its_directories_lead_the_keeper_nowhere(place: Place) -> None:
    victim, other = place.base / "victim", place.base / "other"
    for path in (victim / "tmp", other):
        path.mkdir(parents=True)
    launch.mount_tmpfs(str(victim / "tmp"), "size=1m")
    (victim / "tmp/file").touch()
    kept = place.files.daemons_dir
    for name in ("gpu-1", "gpu-2"):
        (kept / name).mkdir(parents=True)
    for link, target in (("gpu-0", victim), ("gpu-1/tmp", victim / "tmp"), ("gpu-2/tmp", other), ("gpu-3", other)):
        (kept / link).symlink_to(target)
    for name in ("gpu-2", "gpu-3"):
        place.want(name)
    place.start()
    for name in ("gpu-2", "gpu-3"):
        place.ready(name)
    until(lambda: sorted(path.name for path in kept.iterdir()) == ["gpu-2", "gpu-3"], "what nobody wants to be gone")
    assert (victim / "tmp/file").exists(), "it was unmounted"
    assert list(other.iterdir()) == []
    ours = {str(kept / name / part) for name in ("gpu-2", "gpu-3") for part in ("tmp", "shm")}
    assert set(place.mounts()) == {str(victim / "tmp"), *ours}


def test_a_daemon_that_cannot_have_a_thread_ends_no_other(
    place: Place, quick: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.want("gpu-0")
    first = place.ready("gpu-0")
    tries: list[str] = []
    start = Daemon.start

    def no_thread(daemon: Daemon) -> None:
        tries.append(daemon.wanted.name)
        if len(tries) < 3:
            raise RuntimeError("can't start new thread")
        start(daemon)

    monkeypatch.setattr(Daemon, "start", no_thread)
    place.want("gpu-1")
    place.ready("gpu-1")
    assert tries == ["gpu-1"] * 3
    assert runs(first.pid) and place.state("gpu-0").pid == first.pid


def test_an_endless_answer_is_cut(place: Place, quick: Keeper) -> None:
    """A container that puts its own socket in place of the daemon's."""
    place.want("gpu-0")
    place.ready("gpu-0")
    control = place.files.daemon("gpu-0") / "tmp/nvidia-mps/control"
    control.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        descriptor = os.open(control.parent, os.O_PATH)
        server.bind(f"/proc/self/fd/{descriptor}/control")
        os.close(descriptor)
        server.listen(8)
        threading.Thread(target=_flood, args=(server,), daemon=True).start()
        until(lambda: place.state("gpu-0").phase is Phase.FAILED, "the answer to be found wrong")
        assert "does not answer" in place.state("gpu-0").message
        assert len(place.state("gpu-0").message) < 500
        server.shutdown(socket.SHUT_RDWR)


def _flood(server: socket.socket) -> None:
    while True:
        try:
            link, _ = server.accept()
        except OSError:
            return
        with link, suppress(OSError):
            while True:
                link.sendall(b"lies " * 10_000)


def test_the_keeper_is_small(place: Place) -> None:
    """It lies on every node that offers MPS: without the libraries of agent and command line."""
    keeper = place.start()
    loaded = Path(f"/proc/{keeper.pid}/maps").read_text()
    assert not any(name in loaded for name in ("grpc", "aiohttp", "_ssl", "_asyncio"))
