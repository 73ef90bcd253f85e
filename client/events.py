"""Long calls that tell how far they are."""

from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import Generic, Self, TypeVar

from forkpoint.client.errors import RemoteError

M = TypeVar("M")


class Events(AsyncIterator[M], Generic[M]):
    """Iterate over it for events as they come, or await `result()` for the last one. Raises RemoteError.

    The work lasts as long as the call: `cancel`, leaving the block of `async with`, or cancelling the task that reads
    ends both.
    """

    def __init__(self, events: AsyncGenerator[M, None]) -> None:
        self._events = events
        self.last: M | None = None
        """The newest event, None before the first."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> M:
        self.last = await anext(self._events)
        return self.last

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cancel()

    async def result(self) -> M:
        """Read to the end; returns the last event."""
        async for _ in self:
            continue
        if self.last is None:
            raise RemoteError("UNKNOWN", "", "the call ended without an answer", {})
        return self.last

    async def cancel(self) -> None:
        """End the call, and the work with it. Idempotent."""
        await self._events.aclose()
