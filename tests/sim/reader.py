"""Readers: they look at sessions that others write, from any node, and remember what they were shown."""

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass

from forkpoint.errors import ForkpointError, LogCorruptError
from tests.sim.book import Book
from tests.sim.client import Client
from tests.sim.fleet import Seat
from tests.sim.watch import Violation
from tests.sim.wire import Wire


@dataclass(frozen=True)
class Sight:
    """Tokens of one connection from `start` on. Eras: of the book before and after."""

    book: Book
    start: int
    tokens: list[int]
    first_era: int
    last_era: int
    losses: int

    def problem(self) -> str | None:
        """Whatever was shown must have been, and be, in the log: on the branch of then or of a rewind since."""
        for era in self.book.eras[self.first_era : self.last_era + 1]:
            if era[self.start : self.start + len(self.tokens)] == self.tokens:
                return None
        return f"{self.book.name}: a reader was shown tokens at {self.start} that the log does not hold: {self.tokens}"


class LogReader:
    """Follows sessions for a while each."""

    def __init__(self, clients: list[Client], seats: list[Seat], wire: Wire, rng: random.Random) -> None:
        self._clients = clients
        self._seats = seats
        self._wire = wire
        self._rng = rng
        self.sights: list[Sight] = []
        self.stopping = False

    async def run(self) -> None:
        """Until told to stop."""
        while not self.stopping:
            await asyncio.sleep(self._rng.uniform(0.01, 0.3))
            books = [book for client in self._clients for book in client.books if not book.deleted]
            if books:
                await self._look(self._rng.choice(books))

    async def _look(self, book: Book) -> None:
        start = self._rng.randint(0, book.head)
        follow = self._rng.random() < 0.5
        first, seen, losses = len(book.eras) - 1, list[int](), book.synced_at_loss
        seat = self._rng.choice(self._seats)
        try:
            async with (
                asyncio.timeout(self._rng.uniform(0.05, 0.5)),
                aclosing(
                    self._wire.stream(seat, lambda node: node.read_tokens(book.name, start, None, follow))
                ) as chunks,
            ):
                async for chunk in chunks:
                    if chunk.token_ids and chunk.start != start + len(seen):
                        raise Violation(f"{book.name}: a follower got {chunk.start} after {start + len(seen)}")
                    seen += chunk.token_ids
        except LogCorruptError as error:
            raise Violation(f"a reader of {book.name}: {error}") from error
        except (ForkpointError, TimeoutError):
            pass  # what it was shown before counts
        # A rewind may have taken effect whose client has not been told.
        self.sights.append(Sight(book, start, seen, first, len(book.eras), losses))
