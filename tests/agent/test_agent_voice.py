"""What the agent tells people, when the API server does not listen or the agent has ended."""

import asyncio
from typing import Any

import pytest

from gpunode.agent import voice
from gpunode.agent.voice import Voice
from gpunode.kube.events import ObjectRef

NODE = ObjectRef("v1", "Node", "n")


class Deaf:
    """Takes Events when it is let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.heard: list[str] = []

    async def emit(self, _about: ObjectRef, reason: str, *_: Any) -> None:
        await self.go.wait()
        self.heard.append(reason)


async def test_what_waits_for_the_api_server_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voice, "_MAX_WAITING", 3)
    deaf = Deaf()
    one = Voice(deaf, NODE)  # type: ignore[arg-type]
    for n in range(10):
        one.complain(f"R{n}", "something")
    await asyncio.sleep(0)
    one.health([])
    assert len(one._tasks) == 3
    deaf.go.set()
    while one._tasks:
        await asyncio.sleep(0)
    assert deaf.heard == ["R0", "R1", "R2"]


def test_a_thread_that_outlives_the_agent_may_complain() -> None:
    async def begin() -> Voice:
        return Voice(Deaf(), NODE)  # type: ignore[arg-type]

    asyncio.run(begin()).complain("DriverLibrariesUnknown", "late")
