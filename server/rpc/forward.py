"""Any node takes any call: what another node has to answer is sent there, over one hop.

A call is tried here first. That look into the catalog is what finds the owner, and what takes a session whose owner is
gone; when it ends in SessionRelocatingError the same request goes to the node that the error names. A node that turns
it down, or is out of reach, sends us back to the catalog, until FORWARD_SECONDS_MAX are over.
"""

from __future__ import annotations  # grpc's classes are generic in their stubs only

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from forkpoint.clock import Clock
from forkpoint.errors import SessionRelocatingError, UnavailableError
from forkpoint.limits import FORWARD_BACKOFF_SECONDS, FORWARD_BACKOFF_SECONDS_MAX, FORWARD_SECONDS_MAX
from forkpoint.proto.forkpoint.v1.session_pb2 import Session
from forkpoint.server.rpc.channels import Channels
from forkpoint.server.rpc.remote import TRANSPORT, error_info
from forkpoint.server.rpc.routes import FORWARDED, GET_SESSION, answer_class, with_request_id
from forkpoint.server.rpc.status import DETAILS_KEY, PUSHBACK_KEY
from forkpoint.server.rpc.stream import LOOK_SECONDS
from forkpoint.server.session.changes import Signal
from forkpoint.server.session.tasks import survive
from forkpoint.server.session.whereabouts import free_call
from forkpoint.statestore.records import NodeRow

M = TypeVar("M", bound=Message)
Context = Any
"""grpc.aio.ServicerContext, which is generic in its stubs only."""
LOG = logging.getLogger("forkpoint.rpc")
PASSED_ON: Final = frozenset({DETAILS_KEY, PUSHBACK_KEY})
"""Trailers of a peer that its caller is told."""
LIVE_FACTS_SECONDS: Final = 0.25
"""How long a session's owner may take to tell what it knows beside the row."""


class Directory(Protocol):
    """The nodes as this one sees them. Implemented by server/session/membership.py."""

    changed: Signal

    def living(self) -> list[NodeRow]:
        """All that are not known to be dead."""
        ...

    def named(self, name: str) -> NodeRow | None:
        """The newest incarnation of a node."""
        ...


class PeerStatusError(Exception):
    """What another node answered, for the caller as it is."""

    def __init__(self, failure: grpc.aio.AioRpcError) -> None:
        super().__init__(failure.details())
        self.code = failure.code()
        self.text = failure.details() or ""
        self.trailers = tuple((key, value) for key, value in failure.trailing_metadata() or () if key in PASSED_ON)
        self.is_transport = error_info(failure) is None and self.code in TRANSPORT
        """Whether it was the connection that broke, not the node that refused."""


def may_pass_here(error: UnavailableError) -> bool:
    """Whether a refusal of this node is one to try again after another look into the catalog: it says who has the
    session, or that nobody knows yet. That it drains, or has no store, is for the caller to know."""
    return isinstance(error, SessionRelocatingError) or type(error) is UnavailableError


class Tries:
    """Of one call: how long it has been going nowhere, and which nodes did not answer it."""

    def __init__(self, clock: Clock) -> None:
        self.call = free_call()
        self._clock = clock
        self._began = clock.monotonic()
        self._failing_since: float | None = None
        self._backoff = FORWARD_BACKOFF_SECONDS

    def got_on(self) -> None:
        """A part of the answer came."""
        self._failing_since, self._backoff = None, FORWARD_BACKOFF_SECONDS
        self.call.without.clear()

    async def wait(self, failure: Exception) -> None:
        """Before another try; raises `failure` when there have been enough. A try that lasted for longer than these may
        take was none of them."""
        now = self._clock.monotonic()
        if self._failing_since is None or now - self._began >= FORWARD_SECONDS_MAX:
            self._failing_since = now
        if now - self._failing_since >= FORWARD_SECONDS_MAX:
            raise failure
        await asyncio.sleep(self._backoff)
        self._backoff = min(2 * self._backoff, FORWARD_BACKOFF_SECONDS_MAX)
        self._began = self._clock.monotonic()


class Forwarder:
    """Sends calls on behalf of the node `sender`, which serves at `address`. `token_bytes`: text of one token of the
    served model."""

    def __init__(
        self,
        channels: Channels,
        directory: Directory,
        sender: str,
        address: str,
        clock: Clock,
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self.token_bytes = token_bytes
        self._channels = channels
        self._directory = directory
        self._address = address
        self._clock = clock
        self._metadata = ((FORWARDED, sender),)
        self._work: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self) -> None:
        """Begin to look after the nodes that calls are sent to."""
        self.spawn(self._watch(), "looking after connections to nodes")

    async def close(self) -> None:
        """End what runs in the background, and close the channels: nothing is sent any more. Idempotent."""
        self._closed = True
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        await self._channels.close()

    def spawn(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Do something that no caller waits for, until it is done or the node stops."""
        if self._closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(survive(work, what))  # owner: _work, which close() waits for
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def tries(self) -> Tries:
        """For one call, made in the task that answers it."""
        return Tries(self._clock)

    async def unary(
        self, method: str, request: Message, local: Callable[[], Awaitable[Message]], context: Context
    ) -> Message:
        """The answer to a call, from whoever has it."""
        with_request_id(request)
        answer = await self._answered(local, lambda channel: self._call(channel, method, request, context))
        if method == GET_SESSION and isinstance(answer, Session):
            return await self._told_by_owner(request, answer)
        return answer

    async def upload(
        self,
        method: str,
        requests: AsyncIterator[Message],
        local: Callable[[AsyncIterator[Message]], Awaitable[Message]],
        context: Context,
    ) -> Message:
        """As `unary`, for a call whose request is a stream: what came of it is kept, to be sent again."""
        kept: list[Message] = []

        async def again() -> AsyncIterator[Message]:
            for request in kept:
                yield request
            async for request in requests:
                with_request_id(request)
                kept.append(request)
                yield request

        def there(channel: grpc.aio.Channel) -> grpc.aio.StreamUnaryCall[Any, Message]:
            send: Any = channel.stream_unary(method, _serialized, answer_class(method).FromString)
            call: grpc.aio.StreamUnaryCall[Any, Message] = send(
                again(), metadata=self._metadata, timeout=context.time_remaining()
            )
            return call

        return await self._answered(lambda: local(again()), there)

    def stream(
        self, address: str, method: str, request: Message, timeout_seconds: float | None
    ) -> AbstractAsyncContextManager[AsyncGenerator[Message, None]]:
        """What the node at `address` answers."""

        def start(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall[Any, Message]:
            send: Any = channel.unary_stream(method, _serialized, answer_class(method).FromString)
            call: grpc.aio.UnaryStreamCall[Any, Message] = send(
                request, metadata=self._metadata, timeout=timeout_seconds
            )
            return call

        return self._channels.streaming(address, start)

    def elsewhere(self, failure: Exception) -> str:
        """Where a failure sends us; "" when it names no other node."""
        address = failure.address if isinstance(failure, SessionRelocatingError) else ""
        return "" if address == self._address else address

    def refused(self, failure: grpc.aio.AioRpcError, sent_by: Exception) -> Exception:
        """What to tell the caller if no try gets further: the other node's word, or where that node is when it can't
        be reached from here. Raises what no other try can cure."""
        status = PeerStatusError(failure)
        if status.is_transport:
            return sent_by
        if status.code is grpc.StatusCode.UNAVAILABLE:
            return status
        raise status from failure

    async def _answered(
        self,
        local: Callable[[], Awaitable[Message]],
        there: Callable[
            [grpc.aio.Channel], grpc.aio.UnaryUnaryCall[Any, Message] | grpc.aio.StreamUnaryCall[Any, Message]
        ],
    ) -> Message:
        tries = self.tries()
        while True:
            try:
                return await local()
            except UnavailableError as error:
                if not may_pass_here(error):
                    raise
                failure: Exception = error
            address = self.elsewhere(failure)
            if address:
                try:
                    async with self._channels.use(address) as link:
                        return await link.answer(there(link.channel))
                except grpc.aio.AioRpcError as error:
                    failure = self.refused(error, failure)
                except UnavailableError as error:
                    LOG.info("a call is tried again: %s", error)
                tries.call.without.add(address)
            await tries.wait(failure)

    def _call(
        self, channel: grpc.aio.Channel, method: str, request: Message, context: Context
    ) -> grpc.aio.UnaryUnaryCall[Any, Message]:
        send: Any = channel.unary_unary(method, _serialized, answer_class(method).FromString)
        call: grpc.aio.UnaryUnaryCall[Any, Message] = send(
            request, metadata=self._metadata, timeout=context.time_remaining()
        )
        return call

    async def _told_by_owner(self, request: Message, row: Session) -> Session:
        """The session as its owner sees it, when it can be asked quickly; else as the store knows it."""
        node = self._directory.named(row.node.removeprefix("nodes/")) if row.node else None
        if node is None or not self.elsewhere(SessionRelocatingError(row.name, node.node, node.address)):
            return row
        try:
            async with asyncio.timeout(LIVE_FACTS_SECONDS), self._channels.use(node.address) as link:
                send: Any = link.channel.unary_unary(GET_SESSION, _serialized, Session.FromString)
                told: Session = await link.answer(send(request, metadata=self._metadata))
        except (TimeoutError, UnavailableError, grpc.aio.AioRpcError):
            return row
        return told if told.epoch >= row.epoch else row

    async def _watch(self) -> None:
        """Give up nodes that died or left: whoever waits for them looks for the new owner."""
        known = set[str]()
        while True:
            living = {node.address for node in self._directory.living()}
            for address in known - living:
                self._channels.give_up(address)
            known = living
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._directory.changed.wait()
            except TimeoutError:
                continue


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()
