"""A gate that bounds how much is in flight: calls and bytes at once."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Lets holders in, first come, first served, while they are at most `calls_max` and `bytes_max` bytes in all.
    One that is larger than `bytes_max` goes in alone."""

    def __init__(self, calls_max: int, bytes_max: int) -> None:
        if calls_max < 1 or bytes_max < 1:
            raise ValueError(f"a gate lets in at least one call and one byte, got {calls_max} and {bytes_max}")
        self._calls_max, self._bytes_max = calls_max, bytes_max
        self._calls = self._bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def hold(self, nbytes: int = 0) -> AsyncIterator[None]:
        """Inside: one holder of `nbytes`."""
        await self._enter(nbytes)
        try:
            yield
        finally:
            self._leave(nbytes)

    async def _enter(self, nbytes: int) -> None:
        if not self._waiting and self._fits(nbytes):
            self._take(nbytes)
            return
        place = (nbytes, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        try:
            await place[1]
        except asyncio.CancelledError:
            if place[1].cancelled():
                with contextlib.suppress(ValueError):  # passed over already
                    self._waiting.remove(place)
                self._admit()
            else:  # let in and cancelled in one turn of the loop
                self._leave(nbytes)
            raise

    def _fits(self, nbytes: int) -> bool:
        return self._calls == 0 or (self._calls < self._calls_max and self._bytes + nbytes <= self._bytes_max)

    def _take(self, nbytes: int) -> None:
        self._calls += 1
        self._bytes += nbytes

    def _leave(self, nbytes: int) -> None:
        self._calls -= 1
        self._bytes -= nbytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            nbytes, entry = self._waiting.popleft()
            if not entry.done():
                self._take(nbytes)
                entry.set_result(None)
