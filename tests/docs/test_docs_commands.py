"""Every command in the documents is run: here, on a cluster, or by the test or target it is bound to."""

import ast
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from gpunode.cli.main import app
from tests.docs.documents import HERE, ROOT, Command, all_commands, bound, pages, prose, runs_on_cluster

COMMANDS = all_commands()
_SPAN = re.compile(r"`(gpunode(?: |\n)[^`]+)`")


def test_the_documents_have_commands() -> None:
    assert len(COMMANDS) > 40, "the fences are not found any more"


@pytest.mark.parametrize("text", sorted(HERE))
def test_a_command_runs(text: str, tmp_path: Path) -> None:
    assert any(command.text == text for command in COMMANDS), f"no document shows {text!r} any more"
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}"}
    # The second line keeps the shell there, which completion asks for its name.
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{text}\ntrue"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it says nothing"


def test_completion_is_installed_in_the_home_directory(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}"}
    subprocess.run(
        ["bash", "-c", "gpunode --install-completion\ntrue"],
        env=environment,
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert "gpunode" in (tmp_path / ".bashrc").read_text()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: f"{c.page}:{c.line}")
def test_a_command_is_run_somewhere(command: Command) -> None:
    where = bound(command)
    ways = [command.text in HERE, where is not None, runs_on_cluster(command)]
    assert sum(ways) == 1, f"{command}: bind it in tests/docs/documents.py"
    if where is not None:
        file, _, name = where.by.replace("::", ":").partition(":")
        names = _targets(ROOT / file) if file == "Makefile" else _tests(ROOT / file)
        assert name in names, f"{command.text!r} is bound to {where.by}, which does not exist"


def _tests(file: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _targets(file: Path) -> set[str]:
    return set(re.findall(r"^([a-z0-9]+):", file.read_text(), re.MULTILINE))


def _mentions() -> list[tuple[str, str]]:
    """(where, command line) of every gpunode command in blocks and in the text."""
    found = [(f"{c.page}:{c.line}", c.text) for c in COMMANDS if c.text.startswith("gpunode ")]
    for page in pages():
        name = str(page.relative_to(ROOT))
        found += [(name, " ".join(match.split())) for match in _SPAN.findall(prose(page))]
        found += [(name, line) for line in re.findall(r"^ {4}(gpunode .*?)(?: {2,}.*)?$", prose(page), re.MULTILINE)]
    return found


@pytest.mark.parametrize(("where", "line"), sorted(set(_mentions())))
def test_a_command_that_is_shown_exists(where: str, line: str) -> None:
    command: Any = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    known = _options(command)
    while words and (inner := getattr(command, "commands", None)) and not words[0].startswith("-"):
        name = words.pop(0)
        if not re.fullmatch(r"[a-z-]+", name):
            break  # "gpunode COMMAND", "gpunode …"
        assert name in inner, f"{where}: {line!r}: there is no command {name}"
        command = inner[name]
        known |= _options(command)
    unknown = {word.partition("=")[0] for word in words if word.startswith("-") and word != "-"} - known
    assert not unknown, f"{where}: {line!r}: no option {unknown}"


def _options(command: Any) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
