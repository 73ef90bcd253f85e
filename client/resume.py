"""Server streams that survive the server: reconnect, elsewhere if need be, and go on where they were."""

from __future__ import annotations  # grpc's classes are generic in their stubs only

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar, cast

import grpc
from google.protobuf.message import Message

from forkpoint.client.errors import RemoteError, remote_error
from forkpoint.client.wire import Connection, Wire
from forkpoint.clock import Clock, SystemClock
from forkpoint.limits import HEARTBEAT_SECONDS

M = TypeVar("M", bound=Message)
BACKOFF_FIRST_SECONDS: Final = 0.1
BACKOFF_MOST_SECONDS: Final = 1.0
ANSWERED_SECONDS: Final = 30.0
"""No connection takes so long to fail: a call that lasted longer was answered, if only by silence."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a stream tries. `total_s`: without any message, before it gives up. `idle_s`: a connection that says
    nothing for so long is taken for dead (None: this stream has no heartbeats)."""

    total_s: float = 60.0
    idle_s: float | None = 3 * HEARTBEAT_SECONDS
    clock: Clock = field(default_factory=SystemClock)


async def resumed(
    wire: Wire,
    open_call: Callable[[Connection], grpc.aio.UnaryStreamCall[Message, M]],
    route: str,
    patience: Patience,
    reconnected: Callable[[RemoteError], None],
) -> AsyncGenerator[M, None]:
    """Messages of a call that is opened again whenever its connection fails. `open_call` must ask for what is missing.

    Ends when the server ends the stream. Raises RemoteError for a refusal, or when patience is over (with the last
    failure). Closing this iterator cancels the call.
    """
    heard_at = patience.clock.monotonic()
    backoff = BACKOFF_FIRST_SECONDS
    while True:
        began_at = patience.clock.monotonic()
        connection = wire.connection(route)
        call = open_call(connection)
        try:
            while (message := await _read(wire, call, patience.idle_s)) is not None:
                heard_at, backoff = patience.clock.monotonic(), BACKOFF_FIRST_SECONDS
                yield message
            return
        except grpc.aio.AioRpcError as failure:
            error = remote_error(failure)
        except TimeoutError:
            error = RemoteError("UNAVAILABLE", "", f"{connection.address} said nothing for {patience.idle_s} s", {})
        finally:
            call.cancel()
        if not error.is_transport:
            raise error
        now = patience.clock.monotonic()
        if patience.idle_s is None and now - began_at > ANSWERED_SECONDS:
            heard_at, backoff = now, BACKOFF_FIRST_SECONDS
        if now - heard_at > patience.total_s:
            error.add_note(f"gave up after {patience.total_s} s without a message")
            raise error
        reconnected(error)
        moved = wire.follow(error, route, connection)
        await asyncio.sleep(min(backoff, error.retry_after_s or backoff) if moved else backoff)
        backoff = min(2 * backoff, BACKOFF_MOST_SECONDS)


class Messages(Generic[M]):
    """The messages of a stream whose reader may stop waiting, or leave, and come back. `start` makes an iterator of
    those that are missing, such as `resumed`."""

    def __init__(self, start: Callable[[], AsyncGenerator[M, None]]) -> None:
        self._start = start
        self._messages: AsyncGenerator[M, None] | None = None

    async def next(self) -> M | None:
        """The next message, None when the server has ended the stream. After a failure, a cancelled wait or `close` it
        starts anew."""
        if self._messages is None:
            self._messages = self._start()
        try:
            return await anext(self._messages)
        except StopAsyncIteration:
            return None
        except BaseException:
            self._messages = None
            raise

    async def close(self) -> None:
        """Close the stream. Idempotent."""
        messages, self._messages = self._messages, None
        if messages is not None:
            await messages.aclose()


async def _read(wire: Wire, call: grpc.aio.UnaryStreamCall[Message, M], idle_s: float | None) -> M | None:
    """The next message, None at the end. Raises TimeoutError, AioRpcError, ClientClosedError."""
    async with asyncio.timeout(idle_s):
        with wire.closing_told():
            message = await call.read()
    return None if message is grpc.aio.EOF else cast(M, message)
