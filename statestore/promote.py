"""Promoter: brings frames into faster tiers behind the calls that read or wrote them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

PENDING_BYTES_MAX: Final = 128 * 1024 * 1024
"""Frames that wait to be brought somewhere; beyond it they are not brought."""
PARALLEL_MAX: Final = 4


class Promoter:
    """Runs jobs in the background, a few at a time, within a memory bound. A job raises nothing of the store's."""

    def __init__(self) -> None:
        self._pending: dict[str, asyncio.Task[None]] = {}
        self._bytes = 0
        self._turns = asyncio.Semaphore(PARALLEL_MAX)
        self._closed = False
        self.skipped = 0
        """Frames that were left where they are, because too much was waiting."""

    def promote(self, digest: str, nbytes: int, job: Callable[[], Awaitable[None]]) -> None:
        """Begin a job that holds `nbytes`, unless this digest is on its way already."""
        if self._closed or digest in self._pending:
            return
        if self._pending and self._bytes + nbytes > PENDING_BYTES_MAX:
            self.skipped += 1
            return
        self._bytes += nbytes
        # owner: settle() and close() await it
        task = self._pending[digest] = asyncio.create_task(self._run(job))
        task.add_done_callback(lambda _: self._ended(digest, nbytes))  # also of one that never began

    async def settle(self) -> None:
        """Until all that was begun has ended."""
        while self._pending:
            await asyncio.wait(self._pending.values())
            await asyncio.sleep(0)  # let what ended be noted

    async def close(self) -> None:
        """Drop what has not ended. Idempotent."""
        self._closed = True
        for task in self._pending.values():
            task.cancel()
        await self.settle()

    async def _run(self, job: Callable[[], Awaitable[None]]) -> None:
        async with self._turns:
            await job()

    def _ended(self, digest: str, nbytes: int) -> None:
        del self._pending[digest]
        self._bytes -= nbytes
