"""What the documents list is what there is: links, reasons, rights, metrics, make targets, dependencies, decisions."""

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from prometheus_client import CollectorRegistry

from gpunode.cli.main import app
from gpunode.controller.metrics import ControllerMetrics
from gpunode.health.policy import Policy, load_policy
from gpunode.health.rules import WHAT_NOW
from gpunode.model.gang import ReasonCode
from gpunode.model.health import Action
from tests.docs.documents import ROOT, pages, prose
from tests.docs.figures import BEGIN, END, table

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def document(name: str) -> str:
    return (ROOT / name).read_text()


def first_cells(text: str) -> set[str]:
    """Code spans in the first column of every table."""
    return {
        span
        for line in text.splitlines()
        if line.lstrip().startswith("|")
        for span in re.findall(r"`([^`]+)`", line.split("|")[1])
    }


@pytest.mark.parametrize("page", pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(prose(page)):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name}: {link}"
        assert file.is_relative_to(ROOT), f"{page.name}: {link} leaves the repository"
        assert not anchor or anchor in anchors(file.read_text()), f"{page.name}: {link}"


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|daemonset|fake_gpus|tests|docs|scripts)/[\w./-]*)`", prose(page))
    missing = [path for path in named if not (ROOT / path).exists() and not path.endswith("PACKAGE")]
    assert not missing


def test_every_page_is_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        for link in _LINK.findall(page.read_text()):
            target = (page.parent / link.partition("#")[0]).resolve()
            if "://" not in link and target.suffix == ".md":
                todo.append(target)
    assert set(pages()) <= seen


def test_every_reason_is_explained() -> None:
    assert {reason.value for reason in ReasonCode} <= first_cells(document("docs/gangs.md"))


def rules() -> list[tuple[str, str, set[str]]]:
    """(file, resource, verbs) of all RBAC rules."""
    found = []
    for file in (*(ROOT / "daemonset" / "base").glob("rbac-*.yaml"), ROOT / "daemonset" / "fake" / "rbac-faults.yaml"):
        for item in yaml.safe_load_all(file.read_text()):
            for rule in item.get("rules", ()):
                found += [(file.name, resource, set(rule["verbs"])) for resource in rule["resources"]]
    return found


@pytest.mark.parametrize(("file", "resource", "verbs"), rules())
def test_every_right_is_justified(file: str, resource: str, verbs: set[str]) -> None:
    text = document("docs/operations.md").partition("## Rights")[2].partition("\n## ")[0]
    agent, _, controller = text.partition("Controller (")
    rows = [line.split("|") for line in (controller if "controller" in file else agent).splitlines() if "|" in line]
    mine = [row for row in rows if f"`{resource}`" in row[1]]
    assert mine, f"{resource} of {file} has no row"
    told = {verb for row in mine for verb in re.findall(r"[a-z-]+(?::[a-z]+)?", row[2])}
    assert "all" in told or verbs <= told, f"{resource} of {file}: {verbs - told} is not told"


def objects(kind: str) -> set[str]:
    found = set()
    for file in (ROOT / "daemonset" / "base").glob("*.yaml"):
        found |= {o["metadata"]["name"] for o in yaml.safe_load_all(file.read_text()) if o["kind"] == kind}
    return found


def test_every_policy_is_told() -> None:
    policies = objects("MutatingAdmissionPolicy") | objects("ValidatingAdmissionPolicy")
    assert policies <= first_cells(document("docs/operations.md"))


@pytest.mark.parametrize("name", ["base", "mps"])
def test_every_manifest_is_applied(name: str) -> None:
    folder = ROOT / "daemonset" / name
    listed: dict[str, Any] = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(listed["resources"]) == {f.name for f in folder.glob("*.yaml")} - {"kustomization.yaml"}


def test_the_example_of_a_health_policy_is_one() -> None:
    """load_policy raises for what the agent would not take."""
    assert load_policy(ROOT / "daemonset" / "examples" / "health-policy" / "policy.yaml") != Policy()


def test_every_directory_of_manifests_is_told() -> None:
    (row,) = [line for line in document("README.md").splitlines() if line.startswith("| `daemonset/` |")]
    folders = {folder.name for folder in (ROOT / "daemonset").iterdir()}
    assert folders == set(re.findall(r"`([a-z-]+)`", row))


def test_every_module_beside_the_packages_is_told() -> None:
    modules = {f.stem for f in (ROOT / "src" / "gpunode").glob("*.py") if not f.stem.startswith("_")}
    assert modules <= set(re.findall(r"`(\w+)` \(", document("docs/architecture.md")))


def test_every_metric_of_the_controller_is_told() -> None:
    registry = CollectorRegistry()
    ControllerMetrics(registry)
    names = {m.name + ("_total" if m.type == "counter" else "") for m in registry.collect()}
    assert names <= first_cells(document("docs/operations.md"))


def test_what_a_fault_asks_for_is_explained() -> None:
    """Each sentence that says what to do has a row whose words are in it."""
    text = document("docs/operations.md").partition("| the sentence says |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1].strip() for line in text.splitlines()[2:]]
    assert len(rows) == 6
    for action, sentence in WHAT_NOW.items():
        assert (action is Action.NONE) == (not any(row in sentence for row in rows)), sentence


def told_reasons() -> set[str]:
    """The constant reasons of Events in the source: second argument of `emit`, first of `Notice` and `complain`."""
    found = set()
    for file in (ROOT / "src" / "gpunode").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            place = {"emit": 1, "Notice": 0, "complain": 0, "_complain": 0}.get(name)
            if place is not None and len(node.args) > place and isinstance(node.args[place], ast.Constant):
                found.add(str(ast.literal_eval(node.args[place])))
    return found


def test_every_event_is_told() -> None:
    reasons = told_reasons() | {"GpuUnhealthy", "GpuDegraded", "GpuNotice", "GpuRecovered"}
    assert len(reasons) > 18, "the places where Events are told are not found any more"
    events = document("docs/operations.md").partition("\n## Events\n")[2].partition("\n## ")[0]
    assert reasons == first_cells(events)


def workloads() -> list[tuple[str, list[str]]]:
    """(file, arguments) of every container of ours."""
    found = []
    for file in (ROOT / "daemonset").glob("*/*.yaml"):
        for item in yaml.safe_load_all(file.read_text()):
            if item["kind"] in ("DaemonSet", "Deployment"):
                found += [(file.name, one["args"]) for one in item["spec"]["template"]["spec"]["containers"]]
    return found


@pytest.mark.parametrize(("file", "arguments"), workloads())
def test_every_argument_in_the_manifests_is_an_option(file: str, arguments: list[str]) -> None:
    command, *rest = arguments
    known = {name for parameter in COMMANDS[command].params for name in parameter.opts}
    assert {word for word in rest if word.startswith("-")} <= known, file


def test_every_argument_in_the_overlays_is_an_option_of_its_command() -> None:
    """Each `--option=` in a fenced block belongs to the workload that its patch names."""
    owners = {"gpunode-agent": "agent", "gpunode-controller": "controller", "gpunode-mps-keeper": "mps-keeper"}
    files = [*(ROOT / "daemonset").rglob("kustomization.yaml"), ROOT / "docs" / "operations.md"]
    checked = 0
    for part in (part for file in files for part in file.read_text().split("- target: ")[1:]):
        named = re.match(r"\{kind: \w+, name: ([\w.-]+)\}", part)
        for option in re.findall(r"value: (--[\w-]+)=", part.partition("```")[0]):
            assert named is not None and named[1] in owners, part
            assert option in {n for p in COMMANDS[owners[named[1]]].params for n in p.opts}, (named[1], option)
            checked += 1
    assert checked > 4


def test_every_make_target_is_told() -> None:
    targets = set(re.findall(r"^([a-z0-9]+):.*##", document("Makefile"), re.MULTILINE))
    assert {f"make {target}" for target in targets} <= first_cells(document("docs/development.md"))


def test_every_dependency_earns_its_place() -> None:
    project = tomllib.loads(document("pyproject.toml"))
    wanted = [
        *project["project"]["dependencies"],
        *(one for extra in project["project"]["optional-dependencies"].values() for one in extra),
        *project["dependency-groups"]["dev"],
    ]
    names = {re.split(r"[<>=\[;~! ]", one)[0] for one in wanted}
    assert names == first_cells(document("docs/decisions/0012-dependencies.md"))


def test_decisions_are_numbered_and_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    files = sorted(f.name for f in folder.glob("0*.md"))
    assert [int(name[:4]) for name in files] == list(range(1, len(files) + 1))
    for name in files:
        text = (folder / name).read_text()
        title = text.splitlines()[0].removeprefix(f"# {int(name[:4])}. ")
        assert f"({name}) | {title} |" in (folder / "README.md").read_text(), name
        assert all(f"**{part}.**" in text for part in ("Context", "Decision", "Consequences")), name


def test_the_readme_names_measured_figures_only() -> None:
    text = document("README.md")
    block = text[text.index(BEGIN) : text.index(END)]
    assert table({}) in block or re.search(r"^\| `\w+\.\w+` \| [\d.e+-]+ \| .* \| \d+ \| \w+ \|$", block, re.MULTILINE)


def test_figures_are_shown_with_unit_count_and_summary() -> None:
    shown = table({"story.evicted_s": {"value": 1.25, "unit": "s", "n": 3, "summary": "max", "commit": "0123456789ab"}})
    assert "| `story.evicted_s` | 1.25 | s | 3 | max |" in shown
    assert "commit 0123456789ab" in shown
