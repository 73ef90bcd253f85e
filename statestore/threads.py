"""Work in threads whose buffers belong to somebody else: it is over before its call ends."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

CODEC_THREADS_MAX: Final = 8
"""Hashing and compressing at a few GB/s; more would only take processors from the engine."""
CODEC_THREADS: Final = ThreadPoolExecutor(min(CODEC_THREADS_MAX, len(os.sched_getaffinity(0))), "forkpoint-codec")
"""The process's threads for hashing, compressing and their opposites; they begin with the first use."""


async def run_in(threads: Executor, work: Callable[[], T], lent: bool = True) -> T:
    """The result of `work`, run in one of `threads`. A call that is cancelled drops work that has not begun and waits
    for work that has, so that nothing reads the caller's memory afterwards; when none was `lent` it leaves it to it."""
    submitted = threads.submit(work)
    running = asyncio.wrap_future(submitted)
    if not lent:
        return await running
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
