"""A generation's answer: events of the session layer as messages, with a cursor and heartbeats."""

from collections.abc import AsyncIterator

from forkpoint.proto.forkpoint.v1.session_service_pb2 import GenerateResponse, Heartbeat
from forkpoint.server.rpc import responses
from forkpoint.server.rpc.stream import Source, closed_after
from forkpoint.server.session.api import Chunk, Finished, GenerateCall, GenerateEvent, SessionNode, Started


class GenerationSource(Source[GenerateResponse], AsyncIterator[GenerateResponse]):
    """Started, chunks, Finished. The cursor is the position after the last token sent."""

    def __init__(self, node: SessionNode, call: GenerateCall) -> None:
        super().__init__(self._messages(node, call))
        self._position = call.resume_position

    def heartbeat(self) -> GenerateResponse | None:
        """The next position that the stream will send; 0 while the generation waits for its start."""
        return GenerateResponse(heartbeat=Heartbeat(position=self._position or 0))

    def cursor(self) -> int | None:
        """None until the generation started."""
        return self._position

    async def __anext__(self) -> GenerateResponse:
        return await anext(self.messages)

    async def _messages(self, node: SessionNode, call: GenerateCall) -> AsyncIterator[GenerateResponse]:
        async with closed_after(node.generate(call)) as events:
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
