"""decide() in a process of its own, so that no search ever delays a lease renewal or a watch.

The parent sends pickled (changes, now, config) frames on standard input, each with a 4-byte length; the worker
keeps the snapshot, applies the changes and answers with a pickled tuple of actions, or with the exception's text.
Only the parent, which started it, is at the other end of the pipe.
"""

import asyncio
import contextlib
import pickle
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import BinaryIO

from gpunode.controller.world import Change, apply_changes
from gpunode.gang.decide import Decider
from gpunode.model.gang import Action, Config, Snapshot

_HEADER = struct.Struct("!I")


@dataclass(frozen=True)
class Question:
    changes: list[Change]
    now: datetime
    config: Config


@dataclass(frozen=True)
class Answer:
    actions: tuple[Action, ...] = ()
    error: str = ""


class DecideError(Exception):
    """decide() raised: a bug, reported with the worker's traceback."""


class Worker:
    """The parent's end. A worker that died is started again with the whole state."""

    def __init__(self, everything: Callable[[], list[Change]]) -> None:
        self._everything = everything
        self._process: asyncio.subprocess.Process | None = None

    async def decide(self, changes: list[Change], now: datetime, config: Config) -> tuple[Action, ...]:
        """Actions for the state after `changes`. Raises DecideError; a worker killed from outside is replaced."""
        for _ in range(2):
            if self._process is None or self._process.returncode is not None:
                await self.close()
                self._process = await self._start()
                changes = self._everything()
            try:
                answer = await _ask(self._process, Question(changes, now, config))
            except (asyncio.IncompleteReadError, OSError):
                await self.close()
                continue
            if answer.error:
                raise DecideError(answer.error)
            return answer.actions
        raise DecideError("the decision worker died twice in a row")

    async def close(self) -> None:
        if self._process is None:
            return
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()
        self._process = None

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gpunode.controller.worker_main",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )


async def _ask(process: asyncio.subprocess.Process, question: Question) -> Answer:
    if process.stdin is None or process.stdout is None:
        raise OSError("the worker has no pipes")
    data = pickle.dumps(question, protocol=pickle.HIGHEST_PROTOCOL)
    process.stdin.write(_HEADER.pack(len(data)) + data)
    await process.stdin.drain()
    (size,) = _HEADER.unpack(await process.stdout.readexactly(_HEADER.size))
    answer = pickle.loads(await process.stdout.readexactly(size))  # noqa: S301 - our own child
    if not isinstance(answer, Answer):
        raise OSError("the worker answered with something else")
    return answer


def serve(stdin: BinaryIO, stdout: BinaryIO) -> None:
    """The worker's loop: until end of input."""
    snapshot, decider = Snapshot(), Decider()
    while header := stdin.read(_HEADER.size):
        (size,) = _HEADER.unpack(header)
        data = stdin.read(size)
        if len(data) < size:
            return  # the parent was killed while it wrote
        question = pickle.loads(data)  # noqa: S301 - our own parent
        snapshot = apply_changes(snapshot, question.changes)
        try:
            answer = Answer(decider.decide(snapshot, question.now, question.config))
        except Exception:  # a bug must reach the parent's log, not end the worker silently
            import traceback

            answer = Answer(error=traceback.format_exc())
        data = pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            stdout.write(_HEADER.pack(len(data)) + data)
            stdout.flush()
        except BrokenPipeError:
            return  # the parent was killed while it waited
