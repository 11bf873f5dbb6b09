"""A blocking source in a thread of its own, read as an async iterator."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")

Put = Callable[[T], None]
# A source calls put for each item, returns soon after the event is set, and raises nothing.
Source = Callable[[Put[T], threading.Event], None]


class ThreadStream(Generic[T]):
    """Items of `source` in order. At most `limit` wait; beyond that the oldest are dropped and `dropped` counts them.

    Use `async with`, or call aclose(); cancelling the reader is safe. One reader at a time.
    """

    def __init__(self, name: str, source: Source[T], limit: int = 1024) -> None:
        self.dropped = 0
        self._items: deque[T] = deque()
        self._limit = limit
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._ended = False
        self._wake = asyncio.Event()
        self._woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, args=(source,), name=name, daemon=True)

    def start(self) -> "ThreadStream[T]":
        """Begins reading; needs a running loop. Called by the first read as well."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._thread.start()
        return self

    def __aiter__(self) -> "ThreadStream[T]":
        return self.start()

    async def __anext__(self) -> T:
        self.start()
        while True:
            with self._lock:
                if self._items:
                    return self._items.popleft()
                self._wake.clear()
                self._woken = False
                if self._ended:
                    raise StopAsyncIteration
            await self._wake.wait()

    async def __aenter__(self) -> "ThreadStream[T]":
        return self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Tells the source to stop and waits for its thread."""
        self._stopped.set()
        if self._loop is not None:
            await asyncio.to_thread(self._thread.join, 5.0)

    def _work(self, source: Source[T]) -> None:
        try:
            source(self._put, self._stopped)
        except Exception:
            logger.exception("%s stopped by an error of its own", self._thread.name)
        finally:
            with self._lock:
                self._ended = True
                self._notify()

    def _put(self, item: T) -> None:
        with self._lock:
            if len(self._items) >= self._limit:
                self._items.popleft()
                self.dropped += 1
            self._items.append(item)
            self._notify()

    def _notify(self) -> None:
        """Once until the reader has taken everything, so that a replay of many items does not flood the loop."""
        if self._loop is None or self._woken:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:
            self._stopped.set()  # the loop is closed: nobody will read any more
