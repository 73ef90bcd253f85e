"""Whether a node's work gets on: what has been under way for too long."""

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from forkpoint.clock import Clock

BEATS: Final = 8
"""How often the event loop shows in the time of a stall that it turns."""


class Progress:
    """Marks of what is under way, set on the event loop and on the engine's thread, read from any thread.

    A process that lives and computes nothing must not look well: others would send it work, and wait.
    """

    def __init__(self, clock: Clock, stall_seconds: float) -> None:
        """`stall_seconds` 0: nothing ever takes too long."""
        self._clock = clock
        self._stall_seconds = stall_seconds
        self._marks: dict[int, tuple[float, str]] = {}
        self._numbers = itertools.count(1)

    @contextmanager
    def under_way(self, what: str) -> Iterator[None]:
        """Mark the block."""
        number = next(self._numbers)
        self._marks[number] = (self._clock.monotonic(), what)
        try:
            yield
        finally:
            del self._marks[number]

    @property
    def stalled(self) -> str:
        """What has been under way for too long; "" while all gets on."""
        if self._stall_seconds == 0:
            return ""
        # Another thread may change the marks meanwhile: `list` copies them in one go.
        began, what = min(list(self._marks.values()), default=(self._clock.monotonic(), ""))
        return what if self._clock.monotonic() - began > self._stall_seconds else ""

    async def beat(self) -> None:
        """Show that the event loop turns, for ever."""
        if self._stall_seconds == 0:
            return
        while True:
            with self.under_way("the event loop"):
                await asyncio.sleep(self._stall_seconds / BEATS)
