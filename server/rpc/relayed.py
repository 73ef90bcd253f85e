"""Streams that are answered here or by another node, and go on wherever their session goes."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from forkpoint.errors import ForkpointError, UnavailableError
from forkpoint.limits import FORWARD_SECONDS_MAX, HEARTBEAT_SECONDS
from forkpoint.proto.forkpoint.v1.session_service_pb2 import (
    GenerateRequest,
    GenerateResponse,
    Heartbeat,
    ReadTokensRequest,
    TokenChunk,
)
from forkpoint.server.rpc.forward import LOG, Forwarder, PeerStatusError, may_pass_here
from forkpoint.server.rpc.routes import with_request_id
from forkpoint.server.rpc.stream import Drain, Source, closed_after
from forkpoint.server.session.text import TextTrail

Q = TypeVar("Q", bound=Message)
SILENCE_SECONDS: Final = 3 * HEARTBEAT_SECONDS
"""A node that is to send heartbeats and says nothing for so long does not answer."""


class Relayed(Source[Any], Generic[Q]):
    """One stream of a client. It is opened here first; when that sends us to another node it is opened there. One that
    breaks off after its first message is not opened again, unless a subclass knows how (`resumes`).

    `open_here` may raise, as the method itself may. `timeout`: seconds that the client gives the call from now on.
    """

    resumes = False
    silence_seconds: float | None = None
    """Without a message for so long another node is taken to be out of reach."""

    def __init__(
        self,
        forwarder: Forwarder,
        method: str,
        request: Q,
        open_here: Callable[[Q], Any],
        timeout: Callable[[], float | None],
    ) -> None:
        super().__init__(self._messages())
        with_request_id(request)
        self.forwarder = forwarder
        self.method = method
        self.request = request
        self.open_here = open_here
        self.tries = forwarder.tries()
        self.here: Source[Any] | None = None
        """What is read, while it is read here."""
        self._timeout = timeout

    def heartbeat(self) -> Any:
        return None if self.here is None else self.here.heartbeat()

    def cursor(self) -> int | None:
        return None if self.here is None else self.here.cursor()

    def let_go(self) -> bool:
        return self.here is not None and self.here.let_go()

    def request_now(self, is_here: bool) -> Q:
        """What to ask for when the stream is opened (again)."""
        return self.request

    def taken(self, message: Any) -> list[Any]:
        """What the client is sent of a message."""
        self.tries.got_on()
        return [message]

    def ended(self) -> list[Any]:
        """What the client is sent when all has been taken."""
        return []

    def left(self) -> None:
        """The client is gone, or is sent away, while the stream is not read here."""

    async def _messages(self) -> AsyncGenerator[Any, None]:
        address, begun = "", False
        sent_by: Exception = UnavailableError("nobody was asked yet")
        try:
            while True:
                try:
                    async with aclosing(self._from_there(address) if address else self._from_here()) as messages:
                        async for message in messages:
                            begun = True
                            for one in self.taken(message):
                                yield one
                    for one in self.ended():
                        yield one
                    return
                except grpc.aio.AioRpcError as error:
                    failure = self.forwarder.refused(error, sent_by)
                except UnavailableError as error:
                    if not address:
                        if not may_pass_here(error):
                            raise
                        sent_by = error
                    failure = sent_by
                self.here = None
                if begun and not self.resumes:
                    raise failure
                address = await self._next(address, failure)
        except (asyncio.CancelledError, GeneratorExit):
            if self.here is None:
                self.left()
            raise

    async def _next(self, address: str, failure: Exception) -> str:
        """Where to open it after a failure at `address`; "": here."""
        if not address and (elsewhere := self.forwarder.elsewhere(failure)):
            return elsewhere
        if address:
            self.tries.call.without.add(address)
        await self.tries.wait(failure)
        return ""

    async def _from_here(self) -> AsyncGenerator[Any, None]:
        answer = self.open_here(self.request_now(True))
        self.here = answer if isinstance(answer, Source) else Source(answer)
        async with closed_after(self.here.messages) as messages:
            async for message in messages:
                yield message

    async def _from_there(self, address: str) -> AsyncGenerator[Any, None]:
        """Raises UnavailableError when the other node falls silent."""
        request = self.request_now(False)
        async with self.forwarder.stream(address, self.method, request, self._timeout()) as messages:
            while True:
                try:
                    async with asyncio.timeout(self.silence_seconds):
                        message = await anext(messages)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise UnavailableError(f"{address} said nothing for {self.silence_seconds} s") from None
                yield message


class RelayedGeneration(Relayed[GenerateRequest]):
    """Goes on behind the last token sent: the request id attaches it again.

    Another node is not told cancel_on_disconnect: it could not tell a client that left from a node that drains or
    died. A client that leaves is made known there by attaching once more with it, and closing that.
    """

    resumes = True
    silence_seconds = SILENCE_SECONDS

    def __init__(
        self,
        forwarder: Forwarder,
        drain: Drain,
        method: str,
        request: GenerateRequest,
        open_here: Callable[[GenerateRequest], Any],
        timeout: Callable[[], float | None],
    ) -> None:
        super().__init__(forwarder, method, request, open_here, timeout)
        self._drain = drain
        self._position = request.resume_position if request.HasField("resume_position") else None
        self._started = self._finished = self._sent_away = False
        self._rest = b""
        """Text that was sent without a token behind the last one."""

    def heartbeat(self) -> GenerateResponse:
        return GenerateResponse(heartbeat=Heartbeat(position=self._position or 0))

    def cursor(self) -> int | None:
        return self._position

    def let_go(self) -> bool:
        self._sent_away = True
        if self.here is not None:
            self.here.let_go()
        return True

    def request_now(self, is_here: bool) -> GenerateRequest:
        request = GenerateRequest()
        request.CopyFrom(self.request)
        if self._position is not None:
            request.resume_position = self._position
        if not is_here:
            request.cancel_on_disconnect = False
        return request

    def taken(self, message: GenerateResponse) -> list[GenerateResponse]:
        kind = message.WhichOneof("event")
        if kind == "started":
            if self._started:
                return []
            self._started = True
            self._position = message.started.resume_position
            return [message]
        self.tries.got_on()
        if kind == "chunk":
            return self._chunk(message)
        self._finished = kind == "finished"
        return [message] if self._finished else []

    def _chunk(self, message: GenerateResponse) -> list[GenerateResponse]:
        chunk = message.chunk
        check_position(self._position, chunk)
        if not chunk.token_ids and chunk.text_utf8 == self._rest:
            return []  # sent before the stream broke off
        self._position = chunk.start + len(chunk.token_ids)
        self._rest = b"" if chunk.token_ids else chunk.text_utf8
        return [message]

    def left(self) -> None:
        sent_away = self._sent_away or self._drain.started
        if self.request.cancel_on_disconnect and not self._finished and not sent_away:
            self.forwarder.spawn(self._disconnect(), f"cancelling a generation of {self.request.name}")

    async def _disconnect(self) -> None:
        """Attach as a client that leaves at once."""
        request = self.request_now(True)
        again = Relayed(self.forwarder, self.method, request, self.open_here, lambda: FORWARD_SECONDS_MAX)
        try:
            async with closed_after(again.messages) as messages:
                await anext(messages, None)
        except (ForkpointError, PeerStatusError) as error:
            LOG.warning("%s: the client left, and its generation goes on: %s", request.name, error)


class RelayedTokens(Relayed[ReadTokensRequest]):
    """ReadTokens that follows a session. Its text is made here: a node that goes on in the middle of a character does
    not know how that began."""

    resumes = True

    def __init__(
        self,
        forwarder: Forwarder,
        method: str,
        request: ReadTokensRequest,
        open_here: Callable[[ReadTokensRequest], Any],
        timeout: Callable[[], float | None],
    ) -> None:
        super().__init__(forwarder, method, request, open_here, timeout)
        self._position = request.start
        self._trail = TextTrail(request.start, forwarder.token_bytes)

    def cursor(self) -> int | None:
        return self._position

    def let_go(self) -> bool:
        return True

    def request_now(self, is_here: bool) -> ReadTokensRequest:
        request = ReadTokensRequest()
        request.CopyFrom(self.request)
        request.start = self._position
        return request

    def taken(self, message: TokenChunk) -> list[TokenChunk]:
        self.tries.got_on()
        if not message.token_ids:
            return []  # text that is made here
        check_position(self._position, message)
        self._position = message.start + len(message.token_ids)
        message.text_utf8 = b"".join([self._trail.feed(token_id) for token_id in message.token_ids])
        return [message]

    def ended(self) -> list[TokenChunk]:
        rest = self._trail.flush()
        return [TokenChunk(start=self._position, text_utf8=rest)] if rest else []


def check_position(expected: int | None, chunk: TokenChunk) -> None:
    """A position that came twice or is missing is a bug of ours, and never passed on."""
    if chunk.start != expected:
        raise RuntimeError(f"position {chunk.start} follows, expected {expected}")


def relayed(
    forwarder: Forwarder,
    drain: Drain,
    method: str,
    request: Any,
    open_here: Callable[[Any], Any],
    timeout: Callable[[], float | None],
) -> Source[Any]:
    """The source that answers a stream which may be another node's."""
    if isinstance(request, GenerateRequest):
        return RelayedGeneration(forwarder, drain, method, request, open_here, timeout)
    if isinstance(request, ReadTokensRequest):
        return RelayedTokens(forwarder, method, request, open_here, timeout)
    return Relayed(forwarder, method, request, open_here, timeout)
