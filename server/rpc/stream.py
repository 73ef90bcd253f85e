"""Answers that are streams: a relay that reads ahead by one, keeps the line alive, and ends on drain.

A relay frees its source when the client goes away, however it goes. gRPC cancels a handler whose client closed or
died, as soon as the transport tells it; versions differ in whether a stream that nobody reads is told. So a relay also
asks for itself, every second, and its heartbeats make a dead transport fail.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, Self, TypeVar

from forkpoint.errors import NodeDrainingError
from forkpoint.limits import HEARTBEAT_SECONDS
from forkpoint.server.rpc.errors import StreamAgeError

T = TypeVar("T")
U = TypeVar("U")
LOOK_SECONDS = 1.0
"""How often a relay looks whether its client is still there."""


class Drain:
    """One-way switch: the node is going away."""

    def __init__(self, node: str) -> None:
        self.node = node
        self._started = asyncio.Event()

    @property
    def started(self) -> bool:
        """Whether the node is draining."""
        return self._started.is_set()

    def start(self) -> None:
        """Refuse new calls and end streams. Idempotent."""
        self._started.set()

    async def wait(self) -> None:
        """Return when the drain starts."""
        await self._started.wait()


class Call(Protocol):
    """What a relay needs of gRPC's servicer context."""

    def done(self) -> bool:
        """Whether the call is over."""
        ...


class Source(Generic[T]):
    """Messages of one stream, with what the relay sends or says while there are none. Subclasses override what comes
    after the first."""

    def __init__(self, messages: AsyncIterator[T]) -> None:
        self.messages = messages

    def heartbeat(self) -> T | None:
        """A message that says the stream is alive; None: this stream has no such message."""
        return None

    def cursor(self) -> int | None:
        """The position to resume from; None: this stream can't be resumed."""
        return None

    def let_go(self) -> bool:
        """The stream is old: whether its client can open it again and go on. When True, the relay ends it next, and
        it is not the client that left."""
        return False


@asynccontextmanager
async def closed_after(messages: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close an iterator, if it can be closed, at the block's end: what it holds is free then, not some time later."""
    try:
        yield messages
    finally:
        close = getattr(messages, "aclose", None)
        if close is not None:
            await close()


async def _next(messages: AsyncIterator[T]) -> T:
    return await anext(messages)


async def relay(
    source: Source[T],
    write: Callable[[T], Awaitable[None]],
    call: Call,
    drain: Drain,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    age_seconds: float | None = None,
) -> None:
    """Write the source's messages until it ends or the client is gone. Raises what the source raises, and
    NodeDrainingError, with the source's cursor, when the node drains or the stream is as old as `age_seconds` and can
    be resumed. The source is closed in every case."""
    loop = asyncio.get_running_loop()
    idle_since = loop.time()
    old_at = math.inf if age_seconds is None else idle_since + age_seconds
    look = min(LOOK_SECONDS, heartbeat_seconds)
    async with closed_after(source.messages) as messages, _Tasks() as tasks:
        draining = tasks.start(drain.wait())
        pending: asyncio.Task[T] | None = None
        while True:
            if pending is None:
                pending = tasks.start(_next(messages))
            wait = min(look, max(0.0, old_at - loop.time()))
            await asyncio.wait((pending, draining), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            if pending.done():
                finished, pending = pending, None
                try:
                    message = finished.result()
                except StopAsyncIteration:
                    return
                await write(message)
                idle_since = loop.time()
            if draining.done():
                raise NodeDrainingError(drain.node, source.cursor())
            if loop.time() >= old_at:
                if source.let_go():
                    raise StreamAgeError(drain.node, source.cursor())
                old_at = math.inf
            if pending is None:
                continue
            if call.done():
                return
            if loop.time() - idle_since >= heartbeat_seconds:
                beat = source.heartbeat()
                if beat is not None:
                    await write(beat)
                idle_since = loop.time()


class _Tasks:
    """Tasks of one relay: those that still run at the block's end are cancelled and waited for.

    Not a TaskGroup, whose errors come wrapped: a relay raises what its source raised.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        left = list(self._running)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def start(self, work: Coroutine[Any, Any, U]) -> asyncio.Task[U]:
        """Run `work` until the block ends."""
        task = asyncio.get_running_loop().create_task(work)  # owner: this block
        self._running.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen: a relay that is cancelled in this very moment does not look at it again
