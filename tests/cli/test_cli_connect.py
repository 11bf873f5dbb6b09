"""Errors as sentences, and which kubeconfig a command takes."""

from pathlib import Path

import pytest
import typer

from gpunode.cli.connect import chosen, sentence, sentences
from gpunode.cli.output import tell
from gpunode.kube.errors import ApiError, ConfigError, UnreachableError


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (UnreachableError("no answer from https://x"), "no answer from https://x: is the cluster up?"),
        (ApiError("GET", "/x", 401, "Unauthorized", "who?"), "not valid"),
        (ApiError("GET", "/x", 403, "Forbidden", "no"), "403 Forbidden: no: the user lacks this right"),
        (ApiError("GET", "/x", 404, "NotFound", "none"), "GET /x: 404 NotFound: none"),
        (ConfigError("as it is"), "as it is"),
        (PermissionError(13, "Permission denied", "/x"), "/x: Permission denied"),
        (OSError("port 1 is taken"), "port 1 is taken"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_sentence(error: Exception, says: str) -> None:
    assert says in sentence(error)


def test_errors_of_a_task_group_are_told_once_each() -> None:
    inner = ExceptionGroup("inner", [ConfigError("a"), ConfigError("b")])
    assert sentences(ExceptionGroup("outer", [ConfigError("a"), inner]), (ConfigError,)) == "a; b"


def test_what_is_not_expected_stays_an_error() -> None:
    group = ExceptionGroup("outer", [ConfigError("a"), KeyError("a fault of ours")])
    with pytest.raises(ExceptionGroup) as raised:
        sentences(group, (ConfigError,))
    assert raised.value is group


def test_many_lines_become_one(capsys: pytest.CaptureFixture[str]) -> None:
    tell("first\n  second\n\tthird")
    assert capsys.readouterr().err == "gpunode: first second third\n"


def test_the_kubeconfig_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, state = tmp_path / "home", tmp_path / "state"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GPUNODE_STATE", str(state))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert chosen(None) is None, "there is none at all"
    local = state / "default" / "kubeconfig" / "admin"
    local.parent.mkdir(parents=True)
    local.touch()
    assert chosen(None) == local
    (home / ".kube").mkdir(parents=True)
    (home / ".kube" / "config").touch()
    assert chosen(None) is None, "the client finds the usual one itself"
    assert chosen(local) == local
    with pytest.raises(typer.Exit):
        chosen(tmp_path / "none")
