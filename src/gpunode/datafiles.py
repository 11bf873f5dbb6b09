"""Where the data that ships with the program lies: board profiles, fault scenarios, manifests.

In a wheel they are package data under gpunode/data; in a checkout they are the top-level directories of that name.
"""

from pathlib import Path


def data_dir(name: str) -> Path:
    """Directory `name` ("fake_gpus" or "daemonset"). Raises FileNotFoundError when neither place has it."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "data" / name, package.parent.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"the directory {name} is missing from this installation of gpunode; install it again")
