"""Where clusters and binaries are kept: never in the checkout, always overridable."""

import os
from pathlib import Path


def state_root() -> Path:
    """Directory with one sub-directory a cluster: `$GPUNODE_STATE`, by default /var/lib/gpunode/clusters."""
    return Path(os.environ.get("GPUNODE_STATE") or "/var/lib/gpunode/clusters").absolute()


def cache_root() -> Path:
    """Directory of compiled binaries, one sub-directory a version: `$GPUNODE_CACHE`, by default ~/.cache/gpunode."""
    configured = os.environ.get("GPUNODE_CACHE")
    return Path(configured).absolute() if configured else Path.home() / ".cache" / "gpunode"


def default_kubeconfig(name: str = "default") -> Path:
    """The administrator's kubeconfig of the local cluster of that name, whether or not it exists."""
    return state_root() / name / "kubeconfig" / "admin"
