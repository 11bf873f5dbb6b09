"""How commands reach a cluster and turn its refusals into one sentence."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from gpunode.cli.output import fail
from gpunode.cluster.paths import default_kubeconfig

T = TypeVar("T")

Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig",
        help="Cluster to talk to. Default: KUBECONFIG, ~/.kube/config, or else the local cluster.",
        show_default=False,
    ),
]
HostRoot = Annotated[Path, typer.Option(help="The host's file system, where this is a container.")]


def chosen(kubeconfig: Path | None) -> Path | None:
    """The file named, else None where the usual places have one, else the local cluster's."""
    if kubeconfig is not None:
        if not kubeconfig.exists():
            fail(f"no such kubeconfig: {kubeconfig}")
        return kubeconfig
    usual = os.environ.get("KUBECONFIG") or Path("~/.kube/config").expanduser().exists()
    if usual:
        return None
    local = default_kubeconfig()
    return local if local.exists() else None


def run(main: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine; errors of the API or of the configuration end the command with one sentence."""
    from gpunode.kube.errors import ApiError, ConfigError, UnreachableError

    async def call() -> T:
        return await main()

    try:
        return asyncio.run(call())
    except (UnreachableError, ApiError, ConfigError) as error:
        fail(sentence(error))


def sentence(error: BaseException) -> str:
    """What an error means for the person at the terminal, and what to do."""
    from gpunode.kube.errors import ApiError, UnreachableError

    match error:
        case UnreachableError():
            return f"{error}: is the cluster up? For the local one see `gpunode cluster status`"
        case ApiError(status=401):
            return f"{error}: the token or certificate is not valid (any more); get a new kubeconfig"
        case ApiError(status=403):
            return f"{error}: the user lacks this right; daemonset/base has those of agent and controller"
        case OSError(filename=str(path), strerror=str(text)):
            return f"{path}: {text}"
        case _:
            return str(error) or type(error).__name__


def sentences(error: BaseException, expected: tuple[type[Exception], ...]) -> str:
    """The same for all errors in a task group's ExceptionGroup, each once. Raises it when one is not expected."""
    causes = list(_leaves(error))
    if not all(isinstance(cause, expected) for cause in causes):
        raise error
    return "; ".join(dict.fromkeys(sentence(cause) for cause in causes))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
