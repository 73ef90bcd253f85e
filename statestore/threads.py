"""Work in threads whose buffers belong to somebody else: it is over before its call ends."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def run_in(threads: Executor, work: Callable[[], T]) -> T:
    """The result of `work`, run in one of `threads`. A call that is cancelled drops work that has not begun and waits
    for work that has, so that nothing reads the caller's memory afterwards."""
    submitted = threads.submit(work)
    running = asyncio.wrap_future(submitted)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        submitted.cancel()
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue
        if not running.cancelled():
            running.exception()
        raise
