"""A generation as the client sees it: one unbroken sequence of positions, whatever happens to connections."""

from collections.abc import AsyncIterator

import grpc
from google.protobuf.message import Message

from forkpoint.client.errors import PositionGapError, RemoteError
from forkpoint.client.resume import Messages, Patience, resumed
from forkpoint.client.wire import Connection, Wire
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb


class Generation(AsyncIterator[pb.TokenChunk]):
    """Iterate over it for chunks of tokens, or await `result()`.

    Each position comes exactly once, in order, however often the connection broke; anything else is PositionGapError.
    Leaving the iteration (or `detach`) leaves the generation running, unless it was asked to cancel on disconnect. A
    wait that was cancelled, by a timeout say, has lost nothing: iterate on.
    """

    def __init__(self, wire: Wire, request: pb.GenerateRequest, patience: Patience) -> None:
        self.request = request
        self.started: pb.Started | None = None
        """The stream's first answer (the latest, when it was opened again); None before it came."""
        self.finished: pb.Finished | None = None
        """Last answer, None before it came."""
        self.position: int | None = request.resume_position if request.HasField("resume_position") else None
        """Position of the next token, None before the generation started."""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.reconnects: list[RemoteError] = []
        """Why the stream was opened again, once for each time."""
        self._text = bytearray()
        self._messages = Messages(lambda: resumed(wire, self._open, request.name, patience, self.reconnects.append))

    @property
    def text(self) -> bytes:
        """The text so far: whole UTF-8 characters."""
        return bytes(self._text)

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> pb.TokenChunk:
        if self.finished is not None:
            raise StopAsyncIteration
        while (message := await self._messages.next()) is not None:
            match message.WhichOneof("event"):
                case "started":
                    if self.started is None:
                        self.position = message.started.resume_position
                    self.started = message.started
                case "chunk":
                    self._take(message.chunk)
                    return message.chunk
                case "finished":
                    self.finished = message.finished
                    await self.detach()
                    raise StopAsyncIteration
        raise RemoteError("UNKNOWN", "", "the stream ended before the generation did", {})

    async def result(self) -> "Generation":
        """Read to the end."""
        async for _ in self:
            continue
        return self

    async def detach(self) -> None:
        """Close the stream; iterating on opens it again. Idempotent."""
        await self._messages.close()

    def _take(self, chunk: pb.TokenChunk) -> None:
        expected = chunk.start if self.position is None else self.position
        if chunk.start != expected:
            raise PositionGapError(expected, chunk.start)
        self.position = chunk.start + len(chunk.token_ids)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self._text += chunk.text_utf8

    def _open(self, connection: Connection) -> "grpc.aio.UnaryStreamCall[Message, pb.GenerateResponse]":
        request = pb.GenerateRequest()
        request.CopyFrom(self.request)
        if self.position is not None:
            request.resume_position = self.position
        # The stub's request type is invariant.
        return connection.sessions.Generate(request, metadata=connection.metadata)  # type: ignore[return-value]


class TokenReader(AsyncIterator[pb.TokenChunk]):
    """Committed tokens by position, each exactly once. With `follow`, those to come as well."""

    def __init__(self, wire: Wire, request: pb.ReadTokensRequest, patience: Patience) -> None:
        self.request = request
        self.position = request.start
        self.token_ids: list[int] = []
        self.reconnects: list[RemoteError] = []
        self._text = bytearray()
        quiet = Patience(patience.total_s, None, patience.clock)
        self._messages = Messages(lambda: resumed(wire, self._open, request.name, quiet, self.reconnects.append))

    @property
    def text(self) -> bytes:
        """The text read so far."""
        return bytes(self._text)

    def __aiter__(self) -> "TokenReader":
        return self

    async def __anext__(self) -> pb.TokenChunk:
        chunk = await self._messages.next()
        if chunk is None:
            raise StopAsyncIteration
        if chunk.start != self.position:
            raise PositionGapError(self.position, chunk.start)
        self.position += len(chunk.token_ids)
        self.token_ids += chunk.token_ids
        self._text += chunk.text_utf8
        return chunk

    async def result(self) -> "TokenReader":
        """Read to the end."""
        async for _ in self:
            continue
        return self

    async def detach(self) -> None:
        """Close the stream; iterating on opens it again. Idempotent."""
        await self._messages.close()

    def _open(self, connection: Connection) -> "grpc.aio.UnaryStreamCall[Message, pb.TokenChunk]":
        request = pb.ReadTokensRequest()
        request.CopyFrom(self.request)
        request.start = self.position
        # The stub's request type is invariant.
        return connection.sessions.ReadTokens(request, metadata=connection.metadata)  # type: ignore[return-value]
