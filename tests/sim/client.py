"""Clients: each does one thing after the other, and again and again until it is told how it went."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar, cast

from forkpoint.errors import (
    AbortedError,
    ForkpointError,
    NodeCapacityError,
    PositionConflictError,
    SessionPausedError,
    SessionRelocatingError,
    UnavailableError,
)
from forkpoint.ids import SessionName
from forkpoint.server.session.api import (
    AppendCall,
    CreateSession,
    ForkCall,
    GenerateCall,
    Input,
    ResumeResult,
    SessionView,
)
from forkpoint.server.session.node import Node
from forkpoint.server.session.seeds import child_seed
from forkpoint.statestore.records import CheckpointPolicy, RequestKey, SessionState
from tests.sim.book import Book, ResyncError
from tests.sim.fleet import HiccupError, Seat
from tests.sim.reading import Reading
from tests.sim.store import SimStore
from tests.sim.trace import Trace
from tests.sim.watch import Violation
from tests.sim.wire import Wire

T = TypeVar("T")
WORKFLOW: Final = "w"
BACK_OFF_SECONDS: Final = (0.005, 0.06)
HEAD_MAX: Final = 220
"""A session that long only gets children, rewinds and looks."""


class Client:
    """Owns its sessions: nobody else writes to them, so it knows their logs exactly."""

    def __init__(
        self, number: int, seats: Sequence[Seat], wire: Wire, store: SimStore, rng: random.Random, trace: Trace
    ) -> None:
        self.number = number
        self.books: list[Book] = []
        self.doing = "nothing"
        self.operations = 0
        self.generated = 0
        self.resyncs = 0
        self._seats = seats
        self.wire = wire
        self._store = store
        self._rng = rng
        self._trace = trace
        self._requests = 0
        self._hints: dict[SessionName, str] = {}

    # --- reaching a node ---------------------------------------------------------------------------------------
    def key(self, what: str) -> RequestKey:
        """A request id of its own for every operation."""
        self._requests += 1
        return RequestKey(f"client-{self.number}", WORKFLOW, f"r{self._requests}", what.encode())

    async def insist(self, book: Book | None, method: Callable[[Node], Awaitable[T]]) -> T:
        """Call until there is an answer. Raises what only the store's loss can explain as ResyncError, also when it was
        another call that found the loss out: this one is of what the client knew before."""
        synced = None if book is None else book.synced_at_loss
        while True:
            try:
                return await self.wire.call(self.seat(book), method)
            except (ForkpointError, HiccupError) as error:
                if book is not None and book.synced_at_loss != synced:
                    raise ResyncError from error
                await self.after(book, error)

    async def after(self, book: Book | None, error: ForkpointError | HiccupError) -> None:
        """What a failed attempt means: wait and try again, or give up what was going on."""
        self._trace.note(f"client-{self.number}", "told", error)
        if isinstance(error, SessionRelocatingError) and book is not None:
            self._hints[book.name] = error.owner
        elif book is not None:
            self._hints.pop(book.name, None)
        passing = UnavailableError | NodeCapacityError | HiccupError
        if isinstance(error, SessionPausedError) and book is not None and not book.paused:
            await self._resume(book)
        elif not isinstance(error, passing) and not _is_plain_abort(error):
            if book is None or self._store.lost == book.synced_at_loss:
                raise Violation(f"client-{self.number} while it did {self.doing}: {type(error).__name__}: {error}")
            await self.resync(book)
            raise ResyncError
        await asyncio.sleep(self._rng.uniform(*BACK_OFF_SECONDS))

    def seat(self, book: Book | None) -> Seat:
        hint = None if book is None else self._hints.get(book.name)
        if hint is not None and self._rng.random() < 0.9:
            return next((seat for seat in self._seats if seat.name == hint), self._seats[0])
        return self._rng.choice([seat for seat in self._seats if seat.alive] or self._seats)

    async def resync(self, book: Book) -> None:
        """Take what is left of a session after a loss."""
        self.resyncs += 1
        while True:
            lost = self._store.lost
            try:
                view = await self.wire.call(self._any(), lambda node: node.get_session(book.name))
                tokens = await self.read(book.name)
            except (UnavailableError, AbortedError):
                await asyncio.sleep(self._rng.uniform(*BACK_OFF_SECONDS))
                continue
            except ForkpointError as error:
                # It is gone, or was deleted.
                self._trace.note("gone", str(book.name), error)
                book.deleted = True
                return
            # Both as the store has them now: the last token of a generation may come between the answers.
            running = await self._store.catalog.open_generation(book.name)
            row = await self._store.catalog.get_session(book.name)
            if lost == self._store.lost and view.row.head == len(tokens) == row.head and running is None:
                break
            if running is not None:
                await self._nudge(book)
            await asyncio.sleep(self._rng.uniform(*BACK_OFF_SECONDS))
        book.synced_at_loss = lost
        book.paused = row.state is SessionState.PAUSED
        common = next((at for at, (a, b) in enumerate(zip(tokens, book.tokens, strict=False)) if a != b), book.head)
        book.cut(min(common, len(tokens)))
        book.grow(tokens[book.head :], None)

    async def while_paused(self, book: Book) -> None:
        """The end of a generation is in the store and will be told, unless the store lost it: then ResyncError."""
        if self._store.lost != book.synced_at_loss:
            await self.resync(book)
            raise ResyncError
        await asyncio.sleep(0.02)

    async def _nudge(self, book: Book) -> None:
        """An append that can't take effect: its owner finds out what the store holds of the session."""
        call = AppendCall(book.name, Input(token_ids=(97,)), expected_position=1_000_000)
        try:
            await self.wire.call(self.seat(book), lambda node: node.append(call))
        except SessionRelocatingError as error:
            self._hints[book.name] = error.owner
        except (ForkpointError, HiccupError):
            self._hints.pop(book.name, None)

    async def read(self, name: SessionName) -> list[int]:
        """The whole log."""
        async with aclosing(
            self.wire.stream(self._any(), lambda node: node.read_tokens(name, 0, None, False))
        ) as chunks:
            return [token async for chunk in chunks for token in chunk.token_ids]

    def _any(self) -> Seat:
        return self.seat(None)

    # --- operations --------------------------------------------------------------------------------------------
    async def run(self, count: int) -> None:
        """Some sessions, then `count` operations on them."""
        for _ in range(1 + self._rng.randrange(2)):
            await self._create()
        for _ in range(count):
            choices = [book for book in self.books if not book.deleted]
            if not choices:
                await self._create()
                continue
            book = self._rng.choice(choices)
            operation = self._choose(book)
            self.doing = f"{operation.__name__.strip('_')} on {book.name.session}"
            self._trace.note(f"client-{self.number}", "begins", self.doing, book.head)
            try:
                await operation(book)
                self.operations += 1
            except ResyncError:
                self._trace.note(f"client-{self.number}", "resynced", str(book.name), book.head)
            self.doing = "nothing"
            await asyncio.sleep(self._rng.uniform(0, 0.05))

    def _choose(self, book: Book) -> Callable[[Book], Awaitable[None]]:
        rng = self._rng
        if book.paused:
            return rng.choice((self._resume, self._resume, self._fork, self._look))
        if book.head == 0:
            return self._append
        if book.head > HEAD_MAX:
            return rng.choice((self._fork, self._rewind, self._look, self._checkpoint, self._delete))
        choices = (
            (self._append, 5),
            (self._generate, 8),
            (self._generate_beside, 5),
            (self._fork, 3),
            (self._rewind, 2),
            (self._pause, 2),
            (self._checkpoint, 2),
            (self._look, 2),
            (self._delete, 0.4),
        )
        return rng.choices([choice for choice, _ in choices], [weight for _, weight in choices])[0]

    async def _create(self) -> None:
        name = SessionName(WORKFLOW, f"c{self.number}-s{len(self.books)}")
        seed = self._rng.randrange(1000)
        policy = self._rng.choice((None, CheckpointPolicy(16), CheckpointPolicy(0)))
        standbys = self._rng.choice((0, 0, 1))
        call = CreateSession(name, seed, policy, request=self.key("create"), standbys=standbys)
        book = Book(name, seed, synced_at_loss=self._store.lost)
        with contextlib.suppress(ResyncError):
            await self.insist(book, lambda node: node.create_session(call))
            self.books.append(book)

    def _tokens(self) -> tuple[int, ...]:
        return tuple(self._rng.randrange(97, 123) for _ in range(self._rng.choice((1, 3, 15, 16, 17, 40))))

    async def _append(self, book: Book) -> None:
        tokens = self._tokens()
        expected = (book.head, book.head_hash())
        call = AppendCall(book.name, Input(token_ids=tokens), *expected, request=self.key(repr(tokens)))
        if self._rng.random() < 0.2:
            # Sent twice at once: one executes, the other gets the same answer.
            tries = [self.insist(book, lambda node: node.append(call)) for _ in range(2)]
            result, other = _raise_worst(list(await asyncio.gather(*tries, return_exceptions=True)))
            if result.outcome.start != other.outcome.start:
                raise Violation(f"{book.name}: one append took effect at {result.outcome} and at {other.outcome}")
        else:
            result = await self.insist(book, lambda node: node.append(call))
        if result.outcome.start != book.head:
            raise Violation(f"{book.name}: appended at {result.outcome.start}, its client knew {book.head} tokens")
        book.grow(tokens, None)
        if result.outcome.head_hash != book.head_hash():
            raise Violation(f"{book.name}: the head hash at {book.head} is not that of the acknowledged tokens")

    async def _generate(self, book: Book) -> None:
        await Reading(self, book, self._call(book)).run()

    def _call(self, book: Book) -> GenerateCall:
        rng = self._rng
        tokens = self._tokens() if rng.random() < 0.4 else None
        return GenerateCall(
            book.name,
            self.key("generate"),
            Input(token_ids=tokens),
            book.head,
            book.head_hash(),
            max_tokens=rng.choice((1, 2, 7, 15, 16, 17, 30)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.choice((None, rng.randrange(1000))),
        )

    async def _generate_beside(self, book: Book) -> None:
        """Something else happens to the session while it generates."""
        reading = Reading(self, book, replace(self._call(book), max_tokens=30))
        other = self._rng.choice((self._fork, self._cancel, self._checkpoint, self._pause))

        async def beside() -> None:
            await reading.begun.wait()
            await asyncio.sleep(self._rng.uniform(0, 0.1))
            if not reading.off:
                await other(book)

        _raise_worst(list(await asyncio.gather(reading.run(), beside(), return_exceptions=True)))

    async def _cancel(self, book: Book) -> None:
        await self.insist(book, lambda node: node.cancel_generation(book.name))

    async def _fork(self, book: Book) -> None:
        count = self._rng.randint(1, 2)
        position = self._rng.choice((book.head, book.head, self._rng.randint(0, book.head)))
        ids = tuple(f"{book.name.session}f{self._requests}-{n}" for n in range(count))
        if len(self.books) >= 8:
            return
        call = ForkCall(book.name, count, position, ids, request=self.key(f"fork {position}"))
        views, at = await self.insist(book, lambda node: node.fork(call))
        if at != position or [view.row.name.session for view in views] != list(ids):
            raise Violation(f"{book.name}: forked at {at}, not at {position}")
        for view in views:
            seed = child_seed("", book.seed, view.row.name.session, count)
            self.books.append(book.child(view.row.name, seed, position))

    async def _rewind(self, book: Book) -> None:
        position = self._rng.randint(0, book.head)
        request = self.key(f"rewind {position}")
        view = await self.insist(book, lambda node: node.rewind(book.name, position, request))
        if view.row.head != position:
            raise Violation(f"{book.name}: rewound to {view.row.head}, not to {position}")
        book.cut(position)

    async def _pause(self, book: Book) -> None:
        request = self.key("pause")
        await self.insist(book, lambda node: node.pause(book.name, request))
        book.paused = True

    async def _resume(self, book: Book) -> None:
        while True:
            request = self.key("resume")
            try:
                await self.wire.call(self.seat(book), partial(_resumes, book.name, request))
                break
            except SessionPausedError:
                continue  # paused by a call whose answer was lost: once more
            except (ForkpointError, HiccupError) as error:
                await self.after(book, error)
        book.paused = False

    async def _checkpoint(self, book: Book) -> None:
        request = self.key("checkpoint")
        book.checkpoints += 1
        checkpoint = f"k{book.checkpoints}-{self._requests}"
        view = await self.insist(book, lambda node: node.create_checkpoint(book.name, checkpoint, request))
        if view.row.grid_position > view.row.position:
            raise Violation(f"{book.name}: checkpoint {view.row} lies beyond its position")

    async def _look(self, book: Book) -> None:
        """Read it all and compare; the row says the same."""
        view: SessionView = await self.insist(book, lambda node: node.get_session(book.name))
        tokens = await self._read_insisting(book)
        if self._store.lost != book.synced_at_loss:
            await self.resync(book)
            raise ResyncError
        if tokens != book.tokens or view.row.head != book.head or view.row.head_hash != book.head_hash():
            raise Violation(f"{book.name}: {len(tokens)} tokens are read, {book.head} were told of, or they differ")

    async def _read_insisting(self, book: Book) -> list[int]:
        while True:
            try:
                return await self.read(book.name)
            except (ForkpointError, HiccupError) as error:
                await self.after(book, error)

    async def _delete(self, book: Book) -> None:
        request = self.key("delete")
        await self.insist(book, lambda node: node.delete_session(book.name, request))
        if self._rng.random() < 0.5:
            book.deleted = True
            return
        # Undelete has no request id: a repeated one may find it done.
        while True:
            try:
                await self.wire.call(self._any(), lambda node: node.undelete_session(book.name))
                break
            except (ForkpointError, HiccupError) as error:
                if type(error).__name__ == "PreconditionError":
                    break
                await self.after(book, error)
        book.paused = True


def _raise_worst(found: "list[T | BaseException]") -> "list[T]":
    """The results, unless something was raised: then a broken promise rather than a loss that was told of."""
    errors = [item for item in found if isinstance(item, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, ResyncError))
    return cast("list[T]", found)


def _resumes(name: SessionName, request: RequestKey, node: Node) -> Awaitable[ResumeResult]:
    return node.resume(name, request)


def _is_plain_abort(error: Exception) -> bool:
    """The state moved, in no way that says how."""
    return isinstance(error, AbortedError) and not isinstance(error, PositionConflictError)
