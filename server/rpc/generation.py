"""Streams of tokens: events of the session layer as messages, with a cursor, and heartbeats where there are such."""

from collections.abc import AsyncIterator

from forkpoint.proto.forkpoint.v1.session_service_pb2 import GenerateResponse, Heartbeat, TokenChunk
from forkpoint.server.rpc import responses
from forkpoint.server.rpc.stream import Source, closed_after
from forkpoint.server.session.api import Chunk, Finished, GenerateCall, GenerateEvent, Reader, SessionNode, Started


class GenerationSource(Source[GenerateResponse], AsyncIterator[GenerateResponse]):
    """Started, chunks, Finished. The cursor is the position after the last token sent."""

    def __init__(self, node: SessionNode, call: GenerateCall) -> None:
        super().__init__(self._messages(node, call))
        self._position = call.resume_position
        self._reader = Reader()

    def heartbeat(self) -> GenerateResponse | None:
        """The next position that the stream will send; 0 while the generation waits for its start."""
        return GenerateResponse(heartbeat=Heartbeat(position=self._position or 0))

    def cursor(self) -> int | None:
        """None until the generation started."""
        return self._position

    def let_go(self) -> bool:
        """The request id opens it again, also before it started."""
        self._reader.sent_away = True
        return True

    async def __anext__(self) -> GenerateResponse:
        return await anext(self.messages)

    async def _messages(self, node: SessionNode, call: GenerateCall) -> AsyncIterator[GenerateResponse]:
        async with closed_after(node.generate(call, self._reader)) as events:
            async for event in events:
                yield self._message(event)

    def _message(self, event: GenerateEvent) -> GenerateResponse:
        match event:
            case Started():
                self._position = max(self._position or 0, event.row.start)
                return GenerateResponse(started=responses.started(event, self._position))
            case Chunk():
                self._position = event.start + len(event.token_ids)
                return GenerateResponse(chunk=responses.chunk(event))
            case Finished():
                return GenerateResponse(finished=responses.finished(event))


class TokensSource(Source[TokenChunk], AsyncIterator[TokenChunk]):
    """Committed tokens. The cursor is the position after the last token sent."""

    def __init__(self, chunks: AsyncIterator[Chunk], start: int) -> None:
        super().__init__(self._messages(chunks))
        self._position = start

    def cursor(self) -> int | None:
        """Where a next call begins."""
        return self._position

    def let_go(self) -> bool:
        """It can begin anywhere."""
        return True

    async def __anext__(self) -> TokenChunk:
        return await anext(self.messages)

    async def _messages(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[TokenChunk]:
        async with closed_after(chunks):
            async for chunk in chunks:
                self._position = chunk.start + len(chunk.token_ids)
                yield responses.chunk(chunk)
