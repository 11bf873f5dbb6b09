"""Running the two long-lived processes: until a signal, with one sentence when they cannot go on."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator

from gpunode.cli.connect import sentence
from gpunode.cli.output import fail


def serve(main: Callable[[], Awaitable[None]], expected: tuple[type[Exception], ...]) -> None:
    """Run `main` until SIGTERM or SIGINT. Expected errors end the process with exit code 1 and one sentence."""

    async def until_stopped() -> None:
        async def call() -> None:
            await main()

        task = asyncio.create_task(call())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            return

    try:
        asyncio.run(until_stopped())
    except Exception as error:  # sorted out below: only what is expected becomes a sentence
        causes = list(_leaves(error))
        if not all(isinstance(cause, expected) for cause in causes):
            raise
        fail("; ".join(dict.fromkeys(sentence(cause) for cause in causes)))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors inside a task group's ExceptionGroup, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
