"""Several calls at once, and their answers as they come."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


@asynccontextmanager
async def together(works: Iterable[Callable[[], Awaitable[T]]], at_once: int) -> AsyncIterator[AsyncIterator[T]]:
    """The results of `works`, at most so many of which run at a time, in the order in which they end; raises what one
    of them raises. What still runs at the block's end is cancelled and waited for."""
    turns = asyncio.Semaphore(at_once)

    async def run(work: Callable[[], Awaitable[T]]) -> T:
        async with turns:
            return await work()

    tasks = [asyncio.get_running_loop().create_task(run(work)) for work in works]  # owner: this block

    async def results() -> AsyncIterator[T]:
        for ended in asyncio.as_completed(tasks):
            yield await ended

    try:
        yield results()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
