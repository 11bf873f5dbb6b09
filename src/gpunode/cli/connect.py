"""How commands reach a cluster and turn its refusals into one sentence."""

import asyncio
import os
from collections.abc import Awaitable, Callable
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
    except UnreachableError as error:
        fail(f"{error}. Is the cluster up? For the local one: gpunode cluster status")
    except (ApiError, ConfigError) as error:
        fail(str(error))
