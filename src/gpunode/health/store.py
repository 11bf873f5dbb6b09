"""The health state on disk: written atomically, read with suspicion. The only I/O of this package."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import msgspec

from gpunode.files import write_atomic
from gpunode.health.signals import OperatorClear
from gpunode.health.state import STATE_VERSION, HealthState

_MAX_BYTES = 16 << 20
_MAX_REQUESTS = 100
_MAX_REQUEST_BYTES = 64 << 10


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
        return Loaded(read(path))
    except FileNotFoundError:
        return Loaded(HealthState())
    except OSError as error:
        return Loaded(HealthState(), f"health state {path} cannot be read, starting without it: {error}")
    except (ValueError, RecursionError) as error:
        return Loaded(HealthState(), f"health state {path} is not usable ({error}); {_set_aside(path)}")


def read(path: Path) -> HealthState:
    """The saved state, for onlookers: touches nothing. Raises OSError, or ValueError for a damaged file."""
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"larger than {_MAX_BYTES} bytes")
    state = msgspec.json.decode(data, type=HealthState)
    if state.version != STATE_VERSION:
        raise ValueError(f"version {state.version}, this program reads {STATE_VERSION}")
    return state


def request_clear(path: Path, request: OperatorClear) -> None:
    """Leave an operator's word for the agent that owns the state at `path`. Raises OSError."""
    directory = _requests(path)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / f"{uuid4().hex}.json", msgspec.json.encode(request), durable=True)


def take_requests(path: Path) -> tuple[tuple[OperatorClear, ...], str]:
    """The operator's words left so far, oldest first, each given once; and a sentence about those that are unusable.

    Cheap when there are none. Never raises.
    """
    taken, problems = [], []
    try:
        waiting = sorted(_requests(path).glob("*.json"), key=lambda file: (file.stat().st_mtime_ns, file.name))
    except OSError:
        return (), ""
    for file in waiting[:_MAX_REQUESTS]:
        try:
            with file.open("rb") as opened:
                taken.append(msgspec.json.decode(opened.read(_MAX_REQUEST_BYTES), type=OperatorClear))
        except (OSError, ValueError) as error:
            problems.append(f"{file}: {error}")
        with contextlib.suppress(OSError):
            file.unlink()
    return tuple(taken), "; ".join(problems)


def _requests(path: Path) -> Path:
    return path.with_name(f"{path.name}.requests")


def save(path: Path, state: HealthState) -> str:
    """Replace the saved state; the file is at every moment either the old or the new one.

    Returns "" or, where it could not be written (a full disk), a sentence that says so: health goes on from
    memory, and only a restart would lose what is new.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, msgspec.json.encode(state), durable=True)
    except OSError as error:
        return f"health state {path} could not be saved, a restart would lose the latest faults: {error}"
    return ""


def _set_aside(path: Path) -> str:
    aside = path.with_name(f"{path.name}.damaged")
    try:
        path.replace(aside)
    except OSError as error:
        return f"it could not be set aside either: {error}"
    return f"it was set aside as {aside} and health starts afresh"
