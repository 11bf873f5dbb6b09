"""Running the two long-lived processes: until a signal, with one sentence when they cannot go on."""

import asyncio
import signal
from collections.abc import Awaitable, Callable

from gpunode.cli.connect import sentences
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
    except Exception as error:  # only what is expected becomes a sentence
        fail(sentences(error, expected))
