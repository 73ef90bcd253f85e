"""Streams relayed from another node, whose messages the test makes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from forkpoint.clock import SystemClock
from forkpoint.errors import SessionRelocatingError, UnavailableError
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from forkpoint.server.rpc.channels import Channels
from forkpoint.server.rpc.forward import Forwarder
from forkpoint.server.rpc.relayed import RelayedGeneration
from forkpoint.server.rpc.stream import Drain, relay
from forkpoint.server.session.changes import Signal


class Elsewhere(Forwarder):
    """Sends streams to a node whose messages the test makes."""

    def __init__(self, messages: Callable[[], AsyncIterator[Any]]) -> None:
        directory: Any = type("Nobody", (), {"changed": Signal(), "living": list, "named": lambda *_: None})()
        super().__init__(Channels(), directory, "b", "here:1", SystemClock(), lambda _: b"")
        self._messages = messages

    @asynccontextmanager
    async def stream(self, *_: Any) -> AsyncIterator[Any]:
        yield self._messages()


def owned_elsewhere(_: pb.GenerateRequest) -> Any:
    raise SessionRelocatingError("workflows/w/sessions/s", "a", "there:1")


def relayed_from(messages: Callable[[], AsyncIterator[Any]]) -> RelayedGeneration:
    """A generation that another node answers so."""
    request = pb.GenerateRequest(name="workflows/w/sessions/s", request_id="g")
    return RelayedGeneration(
        Elsewhere(messages), Drain("b"), "/forkpoint.v1.SessionService/Generate", request, owned_elsewhere, lambda: None
    )


def chunk(start: int, count: int, text: bytes = b"") -> pb.GenerateResponse:
    return pb.GenerateResponse(chunk=pb.TokenChunk(start=start, token_ids=[97] * count, text_utf8=text or b"a" * count))


class Here:
    """A call whose client is there."""

    def done(self) -> bool:
        return False


async def test_a_client_that_reads_slowly_makes_the_owner_wait() -> None:
    pulled = 0

    async def endless() -> AsyncIterator[pb.GenerateResponse]:
        nonlocal pulled
        yield pb.GenerateResponse(started=pb.Started(start=5, resume_position=5))
        while True:
            pulled += 1
            yield chunk(4 + pulled, 1)

    async def never(_: object) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await relay(relayed_from(endless), never, Here(), Drain("b"))
    assert pulled == 0, "nothing is taken while the message before it is not sent"


async def test_text_that_came_without_a_token_is_not_sent_twice() -> None:
    """The stream breaks between the last of its text and its end."""
    opened = 0

    async def breaks() -> AsyncIterator[pb.GenerateResponse]:
        nonlocal opened
        opened += 1
        yield pb.GenerateResponse(started=pb.Started(start=5, resume_position=5 if opened == 1 else 7))
        if opened == 1:
            yield chunk(5, 2, b"a")
        yield chunk(7, 0, b"rest")
        if opened == 1:
            raise UnavailableError("broken")
        yield pb.GenerateResponse(finished=pb.Finished(head=7))

    kinds = [(one.WhichOneof("event"), one.chunk.text_utf8) async for one in relayed_from(breaks).messages]
    assert kinds == [("started", b""), ("chunk", b"a"), ("chunk", b"rest"), ("finished", b"")]


@pytest.mark.parametrize("second", [4, 6, 8])
async def test_a_position_twice_or_left_out_is_never_passed_on(second: int) -> None:
    async def wrong() -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(started=pb.Started(start=5, resume_position=5))
        yield chunk(5, 2)
        yield chunk(second, 1)

    with pytest.raises(RuntimeError):
        _ = [one async for one in relayed_from(wrong).messages]
