"""Connections to the other nodes: one multiplexed channel for each address, shared by all calls that go there."""

from __future__ import annotations  # grpc's classes are generic in their stubs only

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar, cast

import grpc
from google.protobuf.message import Message

from forkpoint.errors import UnavailableError
from forkpoint.limits import MESSAGE_BYTES_MAX, PEER_CONNECT_SECONDS, PEER_IDLE_SECONDS

Q = TypeVar("Q", bound=Message)
R = TypeVar("R")

OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_retries", 0),  # who calls decides, and looks into the catalog first
    ("grpc.use_local_subchannel_pool", 1),  # a channel that is given up takes its connection along
    ("grpc.keepalive_time_ms", 5_000),  # a node whose machine died, or is cut off, is found out after these two
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", int(PEER_CONNECT_SECONDS * 1000)),  # also how long one attempt may take
    ("grpc.max_reconnect_backoff_ms", int(PEER_CONNECT_SECONDS * 1000)),
)


class Open(Protocol):
    """A call under way."""

    def cancel(self) -> bool:
        """End it."""
        ...


@dataclass(eq=False, slots=True)
class Link:
    """A channel and the calls on it. `lost`: the node at its end is taken for dead."""

    address: str
    channel: grpc.aio.Channel
    calls: set[Open] = field(default_factory=set)
    users: int = 0
    unused_since: float = 0.0
    look: asyncio.TimerHandle | None = None
    """When it is to be looked at whether anybody uses it still."""
    lost: bool = False

    async def answer(self, call: grpc.aio.UnaryUnaryCall[Any, R] | grpc.aio.StreamUnaryCall[Any, R]) -> R:
        """The answer of a call on this channel. Raises what it raises, and UnavailableError when the node is lost;
        cancelling this cancels the call."""
        self.calls.add(call)
        try:
            return await _own_cancellation_only(call, self)
        finally:
            self.calls.discard(call)
            call.cancel()

    async def messages(self, call: grpc.aio.UnaryStreamCall[Any, R]) -> AsyncGenerator[R, None]:
        """A call's messages, one at a time: none is asked for before the one before it was taken. As `answer`."""
        self.calls.add(call)
        try:
            while (message := await _own_cancellation_only(call.read(), self)) is not grpc.aio.EOF:
                yield cast(R, message)
        finally:
            self.calls.discard(call)
            call.cancel()


async def _own_cancellation_only(work: Awaitable[R], link: Link) -> R:
    """`work`, whose CancelledError means that this task is cancelled. A call that somebody else ended raises it too:
    that becomes an UnavailableError."""
    try:
        return await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        why = "is taken for dead" if link.lost else "ended the call"
        raise UnavailableError(f"the node at {link.address} {why}") from None


class Channels:
    """One channel an address, made when it is first used and closed when nobody used it for a while."""

    def __init__(self, idle_seconds: float = PEER_IDLE_SECONDS) -> None:
        self._idle_seconds = idle_seconds
        self._links: dict[str, Link] = {}
        self._closed = False
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def addresses(self) -> Collection[str]:
        """Where channels are open to."""
        return self._links.keys()

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[Link]:
        """The channel to `address`, kept open until the block's end. Raises UnavailableError after `close`."""
        if self._closed:
            raise UnavailableError("this node calls no others any more")
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = Link(address, grpc.aio.insecure_channel(address, options=OPTIONS))
        link.users += 1
        try:
            yield link
        finally:
            link.users -= 1
            if link.users == 0:
                link.unused_since = asyncio.get_running_loop().time()
                self._look_later(link, self._idle_seconds)

    @asynccontextmanager
    async def streaming(
        self, address: str, start: Callable[[grpc.aio.Channel], grpc.aio.UnaryStreamCall[Any, R]]
    ) -> AsyncIterator[AsyncGenerator[R, None]]:
        """The messages of a call to `address`, which ends with the block."""
        async with self.use(address) as link, aclosing(link.messages(start(link.channel))) as messages:
            yield messages

    def give_up(self, address: str) -> None:
        """The node there is dead or gone: its open calls end, with UnavailableError, and its channel is closed. A later
        call makes a new one."""
        link = self._links.pop(address, None)
        if link is None:
            return
        link.lost = True
        for call in tuple(link.calls):
            call.cancel()
        self._close(link)

    async def close(self) -> None:
        """Give up all, for good. Idempotent."""
        self._closed = True
        for address in tuple(self._links):
            self.give_up(address)
        while self._closing:
            await asyncio.gather(*self._closing)

    def _look_later(self, link: Link, seconds: float) -> None:
        if link.look is None:
            link.look = asyncio.get_running_loop().call_later(seconds, self._close_unused, link)

    def _close_unused(self, link: Link) -> None:
        link.look = None
        if link.users or self._links.get(link.address) is not link:
            return
        left = link.unused_since + self._idle_seconds - asyncio.get_running_loop().time()
        if left > 0:
            self._look_later(link, left)
            return
        del self._links[link.address]
        self._close(link)

    def _close(self, link: Link) -> None:
        if link.look is not None:
            link.look.cancel()
        # owner: _closing, which close() waits for
        task = asyncio.get_running_loop().create_task(link.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
