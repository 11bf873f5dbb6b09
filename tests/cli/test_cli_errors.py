"""What a person can mend is told in one sentence, with an exit code that is not zero and nothing half done."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.cli.answers import DEVICE, NODE, api_server, write_kubeconfig

from gpunode.cluster import build, packages
from gpunode.cluster.errors import ClusterError
from gpunode.cluster.layout import Layout
from gpunode.cluster.spec import DEFAULT_KUBERNETES, ClusterSpec, Plan

_DROP = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
# Where Python itself lies in root's home directory, nobody may at least read.
_DROP_BUT_READ = (*_DROP, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
TIMEOUT_S = 90
# Progress and log lines may come before the sentence.
_BEFORE = re.compile(r"\[ *\d+%\] |\d{4}-\d\d-\d\d ")
_AGENT = ("agent", "--node-name", NODE, "--backend", "fake", "--fake-root", "{base}/fake",
          "--kubelet-dir", "{base}/kubelet", "--cdi-dir", "{base}/cdi", "--state-dir", "{base}/health")  # fmt: skip
_INJECT = ("faults", "inject", "--xid", "79")


@dataclass(frozen=True)
class Situation:
    """A command that cannot work. {base}, {port} (in use) and kubeconfigs {allow}, {forbid}, {down} are filled in.

    needs: root, nobody (a user without root's rights), stranger (one who cannot read root's files either), go,
    packages (those a cluster takes).
    """

    name: str
    command: tuple[str, ...]
    says: tuple[str, ...]
    code: int = 1
    needs: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


NO_GO = {"PATH": "/nonexistent", "PYTHONPATH": "{base}/no-go"}
NO_NETWORK = {"GOPROXY": "off", "GOFLAGS": "-mod=mod", "GOMODCACHE": "{base}/modules", "GOTOOLCHAIN": "local"}
DEAD_PROXY = {**NO_NETWORK, "GOPROXY": "http://127.0.0.1:9", "GOFLAGS": ""}

SITUATIONS = (
    Situation("up without root", ("cluster", "up"), ("needs root", "sudo"), needs=("nobody",)),
    Situation("down without root", ("cluster", "down"), ("needs root", "sudo"), needs=("nobody",)),
    Situation("demo without root", ("demo",), ("needs root", "sudo"), needs=("nobody",)),
    Situation("status of root's cluster", ("cluster", "status", "--name", "roots"), ("run this as root",),
              needs=("root", "stranger")),
    Situation("kubeconfig of root's cluster", ("cluster", "kubeconfig", "--name", "roots"), ("run this as root",),
              needs=("root", "stranger")),
    Situation("build without Go", ("cluster", "build"), ("no Go 1.26 or newer", "pip install"), env=NO_GO),
    Situation("demo without Go", ("demo",), ("no Go 1.26 or newer", "pip install"), env=NO_GO, needs=("root",)),
    Situation("build without network", ("cluster", "build"), ("fetching kubernetes", "is there a network?"),
              env=NO_NETWORK, needs=("go", "packages")),
    Situation("build with a dead proxy", ("cluster", "build"), ("fetching kubernetes", "is there a network?"),
              env=DEAD_PROXY, needs=("go", "packages")),
    Situation("cache that cannot be written", ("cluster", "build"), ("/dev/null/cache cannot be written",
              "set GPUNODE_CACHE"), env={"GPUNODE_CACHE": "/dev/null/cache"}, needs=("go", "packages")),
    Situation("up before build", ("cluster", "up"), ("not built", "kube-apiserver", "gpunode cluster build"),
              needs=("root",)),
    Situation("port in use", ("cluster", "up", "--port", "{port}"), ("port {port} on 127.0.0.1 is in use", "--port"),
              env={"GPUNODE_CACHE": "{base}/built"}, needs=("root", "packages")),
    Situation("state that cannot be written", ("cluster", "up"), ("/dev/null/state cannot be written",
              "set GPUNODE_STATE"), env={"GPUNODE_CACHE": "{base}/built", "GPUNODE_STATE": "/dev/null/state"},
              needs=("root", "packages")),
    Situation("install without root", ("cluster", "install"), ("needs root", "sudo"), needs=("nobody",)),
    Situation("install on no cluster", ("cluster", "install"), ("there is no cluster default", "gpunode cluster up"),
              needs=("root",)),
    Situation("install an unknown board", ("cluster", "install", "--name", "roots", "--profile", "h900"),
              ("no board profile 'h900'",), code=2, needs=("root",)),
    Situation("install no such policy", ("cluster", "install", "--name", "roots", "--health-policy", "{base}/none"),
              ("{base}/none: cannot be read: No such file or directory",), code=2, needs=("root",)),
    Situation("unknown version", ("cluster", "up", "--kubernetes", "1.30.1"), ("1.30.1", "use 1.37.2 or 1.36.3")),
    Situation("bad name", ("cluster", "up", "--name", "../x"), ("cluster name '../x'", "use at most 30 of")),
    Situation("too many nodes", ("cluster", "up", "--nodes", "65"), ("65 nodes", "use 1 to 64")),
    Situation("status of no cluster", ("cluster", "status"), ("there is no cluster default", "gpunode cluster up")),
    Situation("kubeconfig of no cluster", ("cluster", "kubeconfig"), ("gpunode cluster up",)),
    Situation("explain nothing", ("explain",), ("Missing argument", "gpunode explain --help"), code=2),
    Situation("explain a Job", ("explain", "job/train"), ("'job/train' is not podgroup/NAME or pod/NAME",), code=2),
    Situation("explain no name", ("explain", "podgroup/"), ("is not podgroup/NAME",), code=2),
    Situation("explain without any cluster", ("explain", "pod/a"), ("gpunode cluster up", "--kubeconfig")),
    Situation("explain with no such file", ("explain", "pod/a", "--kubeconfig", "/none"), ("/none",)),
    Situation("explain with a broken file", ("explain", "pod/a", "--kubeconfig", "{base}/broken.yaml"),
              ("{base}/broken.yaml", "line 1", "--kubeconfig")),
    Situation("explain with another kind of file", ("explain", "pod/a", "--kubeconfig", "{base}/list.yaml"),
              ("no cluster configuration in {base}/list.yaml",)),
    Situation("explain while the cluster is down", ("explain", "pod/a", "--kubeconfig", "{down}"),
              ("Connection refused", "is the cluster up?", "gpunode cluster status")),
    Situation("explain an unknown gang", ("explain", "podgroup/x", "-n", "y", "--kubeconfig", "{allow}"),
              ("there is no podgroup x in namespace y", "kubectl get podgroups -n y")),
    Situation("explain without rights", ("explain", "pod/a", "--kubeconfig", "{forbid}"), ("forbidden", "right")),
    Situation("inject while the cluster is down", (*_INJECT, "--node", NODE, "--device", DEVICE, "--kubeconfig",
              "{down}"), ("Connection refused", "gpunode cluster status")),
    Situation("inject on an unknown node", (*_INJECT, "--node", "away", "--device", DEVICE, "--kubeconfig", "{allow}"),
              ("there is no node away", "kubectl get resourceslices")),
    Situation("inject on an unknown device", (*_INJECT, "--node", NODE, "--device", "gpu-9", "--kubeconfig", "{allow}"),
              (f"node {NODE} has no device gpu-9", DEVICE)),
    Situation("inject no XID", ("faults", "inject", "--node", NODE, "--device", "d"), ("--xid", "--help"), code=2),
    Situation("inject XID 0", (*_INJECT[:2], "--node", NODE, "--device", "d", "--xid", "0"), ("--xid",), code=2),
    Situation("controller while the cluster is down", ("controller", "--kubeconfig", "{down}", "--metrics-port", "0"),
              ("Connection refused", "gpunode cluster status")),
    Situation("controller without rights", ("controller", "--kubeconfig", "{forbid}", "--metrics-port", "0"),
              ("403 Forbidden", "leases", "daemonset/base")),
    Situation("controller's metrics port in use", ("controller", "--kubeconfig", "{allow}", "--metrics-port", "{port}"),
              ("port {port}", "Address already in use", "--metrics-port")),
    Situation("agent without kubelet", (*_AGENT, "--kubelet-dir", "{base}/none", "--kubeconfig", "{allow}"),
              ("kubelet absent", "{base}/none", "start the kubelet")),
    Situation("agent of an unknown profile", (*_AGENT, "--profile", "h900", "--kubeconfig", "{allow}"),
              ("no board profile 'h900'", "dgx-a100-80")),
    Situation("agent of a broken profile", (*_AGENT, "--profile", "{base}/broken.yaml", "--kubeconfig", "{allow}"),
              ("{base}/broken.yaml", "not YAML", "line 1")),
    Situation("agent of another kind of file", (*_AGENT, "--profile", "{base}/list.yaml", "--kubeconfig", "{allow}"),
              ("{base}/list.yaml:1", "mapping")),
    Situation("agent with a broken policy", (*_AGENT, "--health-policy", "{base}/broken.yaml", "--kubeconfig",
              "{allow}"), ("{base}/broken.yaml", "not YAML")),
    Situation("agent of an unknown node", (*_AGENT, "--node-name", "away", "--kubeconfig", "{allow}"),
              ("has no Node away", "--node-name")),
    Situation("agent without rights", (*_AGENT, "--kubeconfig", "{forbid}"), ("403 Forbidden", "daemonset/base")),
    Situation("agent while the cluster is down", (*_AGENT, "--kubeconfig", "{down}"), ("gpunode cluster status",)),
    Situation("agent's metrics port in use", (*_AGENT, "--metrics-port", "{port}", "--kubeconfig", "{allow}"),
              ("port {port}", "Address already in use", "--metrics-port")),
    Situation("agent whose fake cannot be written", (*_AGENT, "--fake-root", "/dev/null/fake", "--kubeconfig",
              "{allow}"), ("/dev/null/fake", "Not a directory")),
    Situation("devices of an unknown profile", ("devices", "--profile", "h900"), ("no board profile 'h900'",), code=2),
    Situation("board that is not there", ("fake", "validate", "{base}/none.yaml"),
              ("{base}/none.yaml: cannot be read: No such file or directory",), code=2),
    Situation("lint of no file", ("claim", "lint", "{base}/none.yaml"),
              ("{base}/none.yaml cannot be read: No such file or directory",), code=2),
    Situation("lint of what is no claim", ("claim", "lint", "{base}/list.yaml"), ("nothing was checked",)),
    Situation("policy that is not there", ("health", "policy", "--policy", "{base}/none"),
              ("{base}/none: cannot be read: No such file or directory",), code=2),
    Situation("catalogue that is not there", ("health", "policy", "--catalogue", "{base}/none"),
              ("{base}/none: cannot be read: No such file or directory",), code=2),
    Situation("claims of an unknown node", ("claims", "--node", "away", "--kubeconfig", "{allow}"),
              ("there is no node away", "kubectl get nodes")),
    Situation("claims of a node without rights", ("claims", "--node", NODE, "--kubeconfig", "{forbid}"),
              ("forbidden", "right")),
    Situation("claims of a node while the cluster is down", ("claims", "--node", NODE, "--kubeconfig", "{down}"),
              ("Connection refused", "gpunode cluster status")),
    Situation("claims of this node by another's word", ("claims", "--kubeconfig", "{allow}"),
              ("--kubeconfig goes with --node",), code=2),
    Situation("health where no agent ran", ("health", "status", "--state", "/none"), ("/none does not exist",)),
    Situation("replay of no file", ("health", "replay", "/none"), ("/none cannot be read: No such file or directory",)),
    Situation("unknown command", ("explode",), ("No such command 'explode'", "gpunode --help"), code=2),
    Situation("unknown option", ("demo", "--gpus", "8"), ("--gpus", "gpunode demo --help"), code=2),
)  # fmt: skip


@dataclass(frozen=True)
class Ground:
    """Where the commands run: an empty home, files that they need, ports and servers."""

    base: Path
    values: dict[str, str]

    def env(self, more: dict[str, str]) -> dict[str, str]:
        own = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.base / "home"),
            "TMPDIR": str(self.base / "tmp"),
            "GPUNODE_STATE": str(self.base / "state"),
            "GPUNODE_CACHE": str(self.base / "cache"),
            "GPUNODE_TEST": str(self.base),
        }
        return own | {name: value.format(**self.values) for name, value in more.items()}

    def argv(self, command: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "gpunode", *(part.format(**self.values) for part in command)]

    def files(self) -> set[str]:
        """All that a command could leave: not locks, and not what Go itself keeps for next time."""
        found = {str(path.relative_to(self.base)) for path in self.base.rglob("*") if not path.name.endswith(".lock")}
        return {name for name in found if not name.startswith(("home/.c", "modules/"))}

    def processes(self) -> list[str]:
        """Command lines of what runs with this ground's environment."""
        mark = f"GPUNODE_TEST={self.base}\0".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:  # ended meanwhile, or somebody else's
                continue
        return found


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    with tempfile.TemporaryDirectory(prefix="gpunode-test-") as made, api_server() as server, socket.socket() as taken:
        base = Path(made)
        base.chmod(0o755)  # pytest's own directories are closed to other users
        for name in ("home", "tmp", "state", "cache", "kubelet", "modules", "no-go/go"):
            (base / name).mkdir(parents=True)
            (base / name).chmod(0o777)
        (base / "no-go" / "go" / "__init__.py").touch()
        (base / "broken.yaml").write_text("a: [1\n")
        (base / "list.yaml").write_text("[1, 2]\n")
        for module in build.modules(DEFAULT_KUBERNETES):
            directory = base / "built" / f"{module.name}-{module.version}"
            directory.mkdir(parents=True)
            for part in module.components:
                (directory / part.name).touch()
        roots = Layout(base / "state" / "roots")
        roots.write_plan(Plan(ClusterSpec("roots"), 9))
        roots.kubeconfig("admin").parent.mkdir()
        roots.kubeconfig("admin").touch(0o600)
        taken.bind(("", 0))
        taken.listen(1)
        values = {"base": str(base), "port": str(taken.getsockname()[1])}
        for mood, address in (("allow", server), ("forbid", server), ("down", "http://127.0.0.1:9")):
            values[mood] = str(base / f"{mood}.json")
            write_kubeconfig(base / f"{mood}.json", f"{address}/{mood}")
            (base / f"{mood}.json").chmod(0o644)
        yield Ground(base, values)


def obstacle(needs: tuple[str, ...]) -> str | None:
    """Why a situation cannot be made on this machine."""
    root = os.geteuid() == 0
    if "root" in needs and not root:
        return "needs root"
    if dropping(needs) is None:
        return "another user cannot run this Python"
    if "packages" in needs and (missing := packages.missing()):
        return f"not installed: {', '.join(missing)}"
    if "go" in needs:
        try:
            build.find_go()
        except ClusterError as error:
            return str(error)
    return None


def dropping(needs: tuple[str, ...]) -> tuple[str, ...] | None:
    """What to put before a command so that it runs without root's rights; None where that does not work."""
    ways = {"nobody": (_DROP, _DROP_BUT_READ), "stranger": (_DROP,)}
    wanted = [way for need, ways_ in ways.items() if need in needs for way in ways_]
    if os.geteuid() != 0 or not wanted:
        return ()
    for way in wanted:
        with contextlib.suppress(OSError):
            if (
                subprocess.run([*way, sys.executable, "-c", ""], cwd="/", capture_output=True, check=False).returncode
                == 0
            ):
                return way
    return None


def sentence(stderr: str) -> str:
    """The one line that begins with the program's name; the last, with only progress and log lines before it."""
    *before, last = stderr.splitlines() or [""]
    assert last.startswith("gpunode: "), stderr
    assert all(_BEFORE.match(line) for line in before), stderr
    return last


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda s: s.name)
def test_one_sentence_and_nothing_half_done(ground: Ground, situation: Situation) -> None:
    if why := obstacle(situation.needs):
        pytest.skip(why)
    before = ground.files()
    done = subprocess.run(
        [*(dropping(situation.needs) or ()), *ground.argv(situation.command)],
        env=ground.env(situation.env),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    said = sentence(done.stderr)
    assert done.returncode == situation.code, said
    for words in situation.says:
        assert words.format(**ground.values) in said
    assert not done.stdout
    assert ground.processes() == []
    left = ground.files() - before
    # What belongs to the machine and not to the attempt: the fake machine itself, the plugin's empty directories.
    harmless = re.compile(r"(fake|kubelet/plugins|kubelet/plugins_registry)(/|$)")
    assert {name for name in left if not harmless.match(name)} == set()
    assert not [name for name in left if name.endswith(".sock")]


def start(ground: Ground, command: tuple[str, ...], env: dict[str, str]) -> "subprocess.Popen[str]":
    """In a process group of its own, as a terminal's foreground job: a background job's children ignore Ctrl-C."""
    return subprocess.Popen(
        ground.argv(command), env=ground.env(env), cwd="/", text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads here
    )  # fmt: skip


def test_ctrl_c_ends_a_build_and_its_compiler(ground: Ground) -> None:
    if why := obstacle(("packages",)):
        pytest.skip(why)
    program = ground.base / "bin" / "go"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n[ "$1" = version ] && echo go version go1.99.0 linux/amd64 && exit\nexec sleep 99\n')
    program.chmod(0o755)
    before = ground.files()
    with start(ground, ("cluster", "build"), {"PATH": f"{program.parent}:{os.environ['PATH']}"}) as process:
        wait_for(lambda: any("sleep 99" in line for line in ground.processes()))
        assert list((ground.base / "tmp").iterdir()), "nothing to clean up"
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert sentence(stderr) == "gpunode: interrupted"
    assert process.returncode == 130
    assert ground.processes() == []
    assert ground.files() == before


def test_ctrl_c_ends_a_command_whose_server_does_not_answer(ground: Ground) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        config = ground.base / "mute.json"
        write_kubeconfig(config, f"http://127.0.0.1:{mute.getsockname()[1]}")
        with start(ground, ("explain", "pod/a", "--kubeconfig", str(config)), {}) as process:
            connection, _ = mute.accept()
            os.killpg(process.pid, signal.SIGINT)
            _, stderr = process.communicate(timeout=TIMEOUT_S)
            connection.close()
        config.unlink()
    assert (sentence(stderr), process.returncode) == ("gpunode: interrupted", 130)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_service_ends_in_peace_when_it_is_told_to(ground: Ground, number: signal.Signals) -> None:
    command = ("controller", "--kubeconfig", "{forbid}", "--metrics-port", "0")
    with start(ground, command, {}) as process:
        assert process.stderr is not None
        assert "cannot take the lease" in process.stderr.readline()
        process.send_signal(number)
        _, rest = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert "Traceback" not in rest


def wait_for(true: Callable[[], bool]) -> None:
    """Until a condition holds; a test that waits longer than the time allowed has failed."""
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
