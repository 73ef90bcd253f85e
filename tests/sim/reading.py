"""One generation, read to its end over any number of connections."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from forkpoint.errors import ForkpointError, SessionPausedError
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import Chunk, Finished, GenerateCall, GenerateEvent
from forkpoint.server.session.node import Node
from forkpoint.statestore.records import FinishReason
from tests.sim.book import Book, ResyncError
from tests.sim.fleet import HiccupError, Seat
from tests.sim.watch import Violation
from tests.sim.wire import Wire


class Caller(Protocol):
    """The client that reads."""

    generated: int
    wire: Wire

    def seat(self, book: Book | None) -> Seat:
        """Where to call next."""
        ...

    async def after(self, book: Book | None, error: ForkpointError | HiccupError) -> None:
        """What follows from a failed attempt."""
        ...

    async def resync(self, book: Book) -> None:
        """Take what is left of a session after a loss."""
        ...

    async def while_paused(self, book: Book) -> None:
        """What follows from a generation that is told the session is paused."""
        ...


class Reading:
    """One generation, read to its end over any number of connections."""

    def __init__(self, client: "Caller", book: Book, call: GenerateCall) -> None:
        self._client = client
        self._book = book
        self._call = call
        self._sample = Sample(
            call.temperature,
            call.top_k,
            call.top_p,
            call.min_p,
            book.seed if call.seed is None else call.seed,
            call.logprobs,
        )
        self.begun = asyncio.Event()
        self.off = False
        """The store lost it."""
        self._finished: Finished | None = None

    async def run(self) -> None:
        """Until its end is known."""
        tokens = self._call.input.token_ids or ()
        start = self._book.head + len(tokens)
        position = start
        synced = self._book.synced_at_loss
        try:
            while self._finished is None or self._book.synced_at_loss != synced:
                if self._book.synced_at_loss != synced:
                    # Something else found out what the store lost, and began this session's book anew.
                    await self._client.resync(self._book)
                    raise ResyncError
                call = replace(self._call, resume_position=position)
                try:
                    seat = self._client.seat(self._book)
                    async with aclosing(self._client.wire.stream(seat, _generates(call))) as events:
                        async for event in events:
                            if self._book.synced_at_loss != synced:
                                break
                            position = self._take(event, start, position, tokens)
                except SessionPausedError:
                    await self._client.while_paused(self._book)
                except (ForkpointError, HiccupError) as error:
                    if self._book.synced_at_loss == synced:
                        await self._client.after(self._book, error)
        except ResyncError:
            self.off = True
            raise
        finally:
            self.begun.set()
        self._check_end(start, position)

    def _take(self, event: GenerateEvent, start: int, position: int, tokens: tuple[int, ...]) -> int:
        book = self._book
        if isinstance(event, Chunk):
            if event.token_ids and event.start != position:
                raise Violation(f"{book.name}: a chunk begins at {event.start}, {position} was due")
            book.grow(event.token_ids, self._sample)
            self._client.generated += len(event.token_ids)
            return position + len(event.token_ids)
        if isinstance(event, Finished):
            self._finished = event
        elif not self.begun.is_set():
            if event.row.start != start:
                raise Violation(f"{book.name}: a generation starts at {event.row.start}, not at {start}")
            book.grow(tokens, None)
            self.begun.set()
        return position

    def _check_end(self, start: int, position: int) -> None:
        found, book = self._finished, self._book
        assert found is not None
        if found.head != position or found.head_hash != book.head_hash():
            raise Violation(
                f"{book.name}: a generation ended at {found.head}, {position} tokens came, or hashes differ"
            )
        if found.reason is FinishReason.LENGTH and position - start != self._call.max_tokens:
            raise Violation(f"{book.name}: {position - start} tokens of {self._call.max_tokens}")


def _generates(call: GenerateCall) -> Callable[[Node], AsyncIterator[GenerateEvent]]:
    return lambda node: node.generate(call)
