"""The health state on disk: written atomically, read with suspicion. The only I/O of this package."""

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpunode.health.state import STATE_VERSION, HealthState

_MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class Loaded:
    """A state and, where it is not simply what was saved last, a sentence that says why not."""

    state: HealthState
    note: str = ""


def load(path: Path) -> Loaded:
    """The saved state; a fresh one where there is none or where it cannot be used.

    Never raises: a damaged file, or one of another version, is set aside as <name>.damaged for a person to look
    at and the note says so.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return Loaded(HealthState())
    except OSError as error:
        return Loaded(HealthState(), f"health state {path} cannot be read, starting without it: {error}")
    try:
        if len(data) > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES} bytes")
        state = msgspec.json.decode(data, type=HealthState)
        if state.version != STATE_VERSION:
            raise ValueError(f"version {state.version}, this program reads {STATE_VERSION}")
    except (ValueError, RecursionError) as error:
        return Loaded(HealthState(), f"health state {path} is not usable ({error}); {_set_aside(path)}")
    return Loaded(state)


def save(path: Path, state: HealthState) -> str:
    """Replace the saved state; the file is at every moment either the old or the new one.

    Returns "" or, where it could not be written (a full disk), a sentence that says so: health goes on from
    memory, and only a restart would lose what is new.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(msgspec.json.encode(state))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        return f"health state {path} could not be saved, a restart would lose the latest faults: {error}"
    return ""


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _set_aside(path: Path) -> str:
    aside = path.with_name(f"{path.name}.damaged")
    try:
        path.replace(aside)
    except OSError as error:
        return f"it could not be set aside either: {error}"
    return f"it was set aside as {aside} and health starts afresh"
