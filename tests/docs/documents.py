"""The project's pages: what commands they show, and where each of those is run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_SHELL = ("sh", "console")


@dataclass(frozen=True)
class Command:
    """One line of a fenced `sh` or `console` block. page: path below the repository root."""

    page: str
    line: int
    text: str


@dataclass(frozen=True)
class Bound:
    """A command that something else runs: a test (`file::function`) or a target of the Makefile (`Makefile:target`)."""

    by: str
    why: str


def pages() -> tuple[Path, ...]:
    return (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "fake_gpus" / "README.md")


def commands(page: Path) -> Iterator[Command]:
    text = page.read_text()
    for fence in _FENCE.finditer(text):
        if fence["language"] not in _SHELL:
            continue
        first = text[: fence.start("body")].count("\n") + 1
        for number, line in enumerate(fence["body"].splitlines()):
            shown = line.strip().removeprefix("$ ")
            if shown and not shown.startswith("#"):
                yield Command(str(page.relative_to(ROOT)), first + number, shown)


def all_commands() -> list[Command]:
    return [command for page in pages() for command in commands(page)]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


# Run by test_docs_commands.py as they stand: they need nothing but the checkout.
HERE = frozenset(
    {
        "gpunode --install-completion",
        "gpunode --show-completion",
        "gpunode devices --profile fake_gpus/boards/l4.yaml",
        "gpunode devices --profile hgx-h100 --tree",
        "gpunode fake list",
        "gpunode fake validate fake_gpus/boards/l4.yaml",
        "gpunode faults scenarios",
        "gpunode health policy --explain 79",
        "gpunode health policy --explain 94",
        "gpunode health policy --policy daemonset/examples/health-policy/policy.yaml",
        "gpunode health replay tests/health/ordinary_kernel_lines.txt",
        "gpunode slices --profile hgx-h100 --mode dynamic -o yaml",
        "gpunode slices --profile l4 -o yaml",
        "gpunode topology --profile dgx-a100-80",
    }
)

# Run by test_docs_e2e.py on a cluster as they stand, in the order of their page.
ON_CLUSTER = (
    "gpunode claims --node ",
    "gpunode explain ",
    "gpunode faults inject ",
    "gpunode faults recover ",
    "gpunode faults play ",
    "gpunode quarantine ",
    "kubectl get ",
    "kubectl wait ",
    "kubectl label ",
    "kubectl apply -f daemonset/examples/",
    "kubectl delete -f daemonset/examples/",
)

_E2E = "tests/docs/test_docs_e2e.py"
_DRY = Bound(f"{_E2E}::test_installing_and_removing_is_accepted", "asked of the API server without doing it")
_STORY = "tests/e2e/test_e2e_story.py::test_a_gang_is_placed_broken_and_put_back_together"
_UP = Bound(
    "tests/cluster/test_cluster_e2e.py::test_up_again_leaves_running_processes_alone", "a cluster of its own comes up"
)
_DOWN = Bound("tests/cluster/test_cluster_e2e.py::test_down_leaves_nothing", "a cluster of its own goes")
_OLD = Bound(
    "tests/e2e/test_e2e_old_kubernetes.py::test_a_gang_is_placed_broken_and_put_back_together",
    "builds, starts and ends a cluster of that release; its control plane takes minutes to compile",
)
_PATH = Bound(f"{_E2E}::test_the_environment_is_as_documented", "the test takes the cache from the cluster")

BOUND = {
    "make demo": Bound(_STORY, "the same story, by the same code, on the cluster of the test run"),
    "make test": Bound("Makefile:test", "is what runs this test; .ci/run is nothing else"),
    ".venv/bin/pytest -q tests/gang": Bound("Makefile:unit", "part of it"),
    '.venv/bin/pytest -q tests/docs -m "not e2e"': Bound("Makefile:unit", "part of it, and this very test"),
    "make proto": Bound(
        "tests/kubelet/test_kubelet_proto.py::test_generated_code_is_up_to_date", "the same into another directory"
    ),
    "docker build -t gpunode:0.1.0 .": Bound(
        "tests/docs/test_docs_image.py::test_the_image_builds_and_runs", "with buildah, where it is installed"
    ),
    "export PATH=$PWD/.venv/bin:$HOME/.cache/gpunode/kubernetes-1.37.2:$PATH": _PATH,
    "export KUBECONFIG=$(gpunode cluster kubeconfig --path)": _PATH,
    "gpunode cluster build": Bound("Makefile:e2e", "before the tests on a cluster"),
    "gpunode cluster up --nodes 9": _UP,
    "gpunode cluster status": Bound(f"{_E2E}::test_the_environment_is_as_documented", "of the cluster there is"),
    "gpunode cluster down": _DOWN,
    "gpunode cluster build --kubernetes 1.36.3": _OLD,
    "gpunode cluster up --name old --kubernetes 1.36.3 --port 17443": _OLD,
    "gpunode cluster status --name old": _OLD,
    "gpunode cluster down --name old": _OLD,
    "gpunode demo --name old --kubernetes 1.36.3 --port 17443": _OLD,
    "nsenter --mount --target PID ls /var/run/cdi": Bound(
        f"{_E2E}::test_a_nodes_namespace_can_be_entered", "with the pid that it looks up"
    ),
    "kubectl apply -k daemonset/base": _DRY,
    "kubectl delete -k daemonset/base --ignore-not-found": _DRY,
    "kubectl apply -k daemonset/mps": _DRY,
    "kubectl delete -k daemonset/mps --ignore-not-found": _DRY,
    "kubectl apply -k daemonset/examples/health-policy": _DRY,
    "kubectl delete mutatingadmissionpolicybindings --ignore-not-found gate.gpunode.dev claim-finalizer.gpunode.dev": (
        _DRY
    ),
    "kubectl delete deployment -n gpunode-system --ignore-not-found gpunode-controller": _DRY,
    "kubectl delete devicetaintrules --ignore-not-found gpunode-managed-gpu.gpunode.dev": _DRY,
    "gpunode cluster install": Bound(
        f"{_E2E}::test_installing_once_more_changes_nothing", "on the cluster there is, which has it already"
    ),
}
OPEN_A_GATE = "kubectl patch pod -n team-a POD "
IN_AGENT = ("AGENT=$(kubectl get pods ", "kubectl exec -n gpunode-system $AGENT -- ")


def runs_on_cluster(command: Command) -> bool:
    return command.text.startswith(ON_CLUSTER) and command.text not in BOUND


def bound(command: Command) -> Bound | None:
    if command.text.startswith(OPEN_A_GATE):
        return Bound(f"{_E2E}::test_a_gate_can_be_opened_by_hand", "with the name of a pod of its own")
    if command.text.startswith(IN_AGENT):
        return Bound("tests/e2e/test_e2e_pods.py::test_the_commands_of_a_node_run_in_its_agents_pod", "needs pods")
    return BOUND.get(command.text)
