"""Files of a cluster and the one value that is stored: its plan. Also the locks that keep two commands apart."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from gpunode.cluster.errors import ClusterError
from gpunode.cluster.paths import state_root
from gpunode.cluster.processes import replace_text
from gpunode.cluster.spec import ClusterSpec, NodePlan, Plan


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """Directories of one node on the host. In the node's mount namespace they appear at the standard paths."""

    root: Path

    @property
    def kmsg(self) -> Path:
        """The node's kernel log, a regular file that is only appended to; /dev/kmsg in the namespace."""
        return self.root / "kmsg"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def socket(self) -> Path:
        """containerd's socket as seen from outside the namespace."""
        return self.run / "containerd" / "containerd.sock"

    @property
    def binds(self) -> tuple[tuple[Path, Path], ...]:
        """(source on the host, target in the namespace) of every bind mount."""
        return (
            (self.run, Path("/run")),
            (self.root / "log", Path("/var/log")),
            (self.root / "var-lib-kubelet", Path("/var/lib/kubelet")),
            (self.root / "var-lib-cni", Path("/var/lib/cni")),
            (self.kmsg, Path("/dev/kmsg")),
            # Last: state directories usually lie in here, see NodeRunner.
            (self.root / "var-lib-gpunode", Path("/var/lib/gpunode")),
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths under the state directory of one cluster."""

    state: Path

    @property
    def plan_file(self) -> Path:
        return self.state / "cluster.json"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def images(self) -> Path:
        return self.state / "images"

    def kubeconfig(self, user: str) -> Path:
        return self.state / "kubeconfig" / user

    def node(self, node: NodePlan) -> NodeFiles:
        return NodeFiles(self.state / "nodes" / node.name)

    def read_plan(self) -> Plan | None:
        """The stored plan; None if there is none.

        Raises ClusterError if it is there but cannot be used.
        """
        try:
            data = json.loads(self.plan_file.read_text())
            return Plan(ClusterSpec(**data["spec"]), int(data["slot"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ClusterError(
                f"{self.plan_file} cannot be read ({error}): `gpunode cluster down --name {self.state.name}` clears it"
            ) from error

    def write_plan(self, plan: Plan) -> None:
        self.state.mkdir(parents=True, exist_ok=True)
        replace_text(self.plan_file, json.dumps({"spec": asdict(plan.spec), "slot": plan.slot}))


def layout(name: str) -> Layout:
    return Layout(state_root() / name)


def saved_settings() -> Path:
    """File that keeps the host's own kernel settings while any cluster is up (see host)."""
    return state_root() / ".host.json"


def plans() -> tuple[Plan, ...]:
    """The readable plans of all clusters on this machine."""
    found: list[Plan] = []
    for file in sorted(state_root().glob("*/cluster.json")):
        with contextlib.suppress(ClusterError):
            plan = Layout(file.parent).read_plan()
            if plan is not None:
                found.append(plan)
    return tuple(found)


@contextlib.contextmanager
def locked(name: str, *, wait: bool) -> Iterator[None]:
    """Holds the lock file of that name under the state root.

    Raises ClusterError if it is held by another command and `wait` is false.
    """
    root = state_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / f".{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ClusterError(f"{root} cannot be written ({error.strerror}): set GPUNODE_STATE or run as root") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise ClusterError(f"another gpunode command is working on cluster {name}: wait for it") from error
        yield
    finally:
        os.close(descriptor)
