"""What every command promises: help with an example, completion, a version, output for programs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer.main

from gpunode.cli.main import app


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))


def gpunode(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    program = [str(Path(sys.executable).parent / "gpunode"), *arguments]
    return subprocess.run(program, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_has_a_sentence_and_an_example_of_this_command(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    text = f"{command.help or ''}\n{command.epilog or ''}"
    assert text.strip().split("\n")[0].rstrip().endswith((".", ":")), text
    assert "Example" in text
    assert f"gpunode {' '.join(path)}" in text
    for parameter in command.params:
        hidden = parameter.name in ("help", "install_completion", "show_completion")
        assert hidden or getattr(parameter, "help", None), f"{parameter.name} is not explained"


def test_the_version_is_that_of_the_package() -> None:
    assert gpunode("--version").stdout == f"gpunode {version('gpunode')}\n"


def test_help_without_arguments() -> None:
    shown = gpunode()
    assert "Usage" in shown.stdout + shown.stderr
    assert "gpunode: " not in shown.stderr


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("gpunode clu", {"cluster"}),
        ("gpunode cluster ", {"build", "up", "install", "status", "kubeconfig", "down"}),
        ("gpunode faults in", {"inject"}),
        ("gpunode devices --outp", {"--output"}),
        ("gpunode devices --output ", {"table", "json", "yaml"}),
        ("gpunode agent --backend ", {"nvml", "fake"}),
    ],
)
def test_completion_offers_what_fits(words: str, offered: set[str]) -> None:
    parts = words.split(" ")
    done = gpunode(_GPUNODE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(parts) - 1))
    assert set(done.stdout.split()) == offered, done
