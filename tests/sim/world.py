"""One run: a store, its nodes, clients and evils, all from one seed; and what must hold in the end."""

import asyncio
import gc
import logging
import random
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final
from unittest import mock

from forkpoint.ids import SessionName
from forkpoint.server.session.live import LiveSession, Place
from forkpoint.statestore.check import Severity, check
from forkpoint.statestore.fetch import fetch_ahead
from forkpoint.statestore.manifest import unseal
from forkpoint.statestore.records import Durability, SessionState, WorkflowRow
from forkpoint.statestore.threads import CODEC_THREADS
from tests.sim.book import Book
from tests.sim.client import WORKFLOW, Client
from tests.sim.fleet import HiccupError, Seat
from tests.sim.link import Weather
from tests.sim.loop import SimLoop
from tests.sim.mover import Mover
from tests.sim.nemesis import Nemesis
from tests.sim.oracle import Oracle
from tests.sim.peers import Roads
from tests.sim.reader import LogReader
from tests.sim.store import SimStore
from tests.sim.trace import Trace
from tests.sim.watch import Call, Violation
from tests.sim.wire import Wire

VIRTUAL_SECONDS_MAX: Final = 60.0
"""A run that takes longer hangs: what clients want is done within seconds once all is well again."""
QUIET_SECONDS: Final = 10.0
COLLECTING_SHARE: Final = 0.5
"""Of the runs, in which nodes collect garbage."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to. `problem`: the first broken promise, None when all held."""

    seed: int
    digest: str
    problem: str | None
    facts: int
    virtual_seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    tail: tuple[str, ...] = ()


class World:
    """Everything of one run."""

    def __init__(self, seed: int, loop: SimLoop, trace: Trace) -> None:
        rng = self._rng = random.Random(f"world {seed}")
        durability = rng.choice((Durability.REPLICATED, Durability.REPLICATED, Durability.MEMORY))
        self.loop = loop
        self.trace = trace
        self.weather = Weather()
        self.store = SimStore(loop, rng, durability, trace)
        self.seats = [Seat(f"n{n}", self.store, self.weather, rng, trace) for n in range(1, 2 + rng.randrange(3))]
        collects, roads = rng.random() < COLLECTING_SHARE, Roads()
        for seat in self.seats:
            seat.collects, seat.neighbours, seat.roads = collects, self.seats, roads
        self.wire = Wire(rng)
        self.clients = [
            Client(n, self.seats, self.wire, self.store, rng, trace) for n in range(1, 2 + rng.randrange(3))
        ]
        self.nemesis = Nemesis(self.seats, self.store, self.weather, roads, rng, trace)
        self.mover = Mover(self.seats, rng, trace)
        self.reader = LogReader(self.clients, self.seats, self.wire, rng)
        self.oracle = Oracle()

    async def play(self) -> None:
        """The whole story."""
        await asyncio.gather(*(seat.start() for seat in self.seats))
        self.store.execute(Call("catalog", "create_workflow", (WorkflowRow(WORKFLOW),)))
        await asyncio.sleep(0.1)  # no failover takes it back
        async with asyncio.TaskGroup() as group:
            evils = group.create_task(self.nemesis.run())
            group.create_task(self.reader.run())
            group.create_task(self.mover.run())
            operations = self._rng.randint(5, 12)
            story = [group.create_task(client.run(operations)) for client in self.clients]
            healing = group.create_task(self._heal_in(self._rng.uniform(1.0, 5.0)))
            await asyncio.wait(story)
            healing.cancel()
            self.nemesis.heal()
            self.reader.stopping = self.mover.stopping = True
        assert evils.done()
        await self._settle()

    async def _heal_in(self, seconds: float) -> None:
        """Evils end at some time, so that every run does."""
        await asyncio.sleep(seconds)
        self.nemesis.heal()

    async def _settle(self) -> None:
        for seat in self.seats:
            if not seat.alive:
                await seat.start()
        for client in self.clients:
            for book in client.books:
                if book.synced_at_loss != self.store.lost:
                    # An owner learns what the store lost when it is asked.
                    await client.resync(book)
        async with asyncio.timeout(QUIET_SECONDS):
            while await self.store.catalog.list_open_generations():
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)  # captures are written, replays are done

    # --- in the end --------------------------------------------------------------------------------------------
    async def judge(self) -> None:
        """Raises Violation."""
        if self.store.watch.found:
            raise Violation("; ".join(self.store.watch.found[:3]))
        for client in self.clients:
            for book in client.books:
                await self._judge_book(book)
        for sight in self.reader.sights:
            if sight.tokens and sight.losses == sight.book.synced_at_loss == self.store.lost:
                problem = sight.problem()
                if problem is not None:
                    raise Violation(problem)
        await self._judge_engines()
        await self._judge_manifests()
        await self._judge_store()

    async def _judge_book(self, book: Book) -> None:
        if book.deleted:
            return
        row = await self.store.catalog.get_session(book.name)
        if row.state is SessionState.QUARANTINED:
            raise Violation(f"{book.name} is quarantined: {row.state_reason}")
        stored = list((await self.store.catalog.read_log(book.name, 0, 100_000)).token_ids)
        if stored != book.tokens:
            raise Violation(f"{book.name}: the log has {len(stored)} tokens, its client was told of {book.head}")
        if row.head_hash != book.head_hash():
            raise Violation(f"{book.name}: the head hash is not that of its tokens")
        wrong = self.oracle.wrong_token(book.tokens, book.samples)
        if wrong is not None:
            raise Violation(f"{book.name}: {wrong}")

    async def _judge_engines(self) -> None:
        """What is on an engine is the state of the tokens consumed. Who was taken over unknowingly is out: it has what
        was there until then, and nobody gets to see it."""
        books = {book.name: book for client in self.clients for book in client.books}
        for seat in self.seats:
            assert seat.node is not None and seat.engine is not None
            for name, live in [*seat.node._core.lives.items(), *_followed(seat)]:
                book = books.get(name)
                if live.place is not Place.RESIDENT or live.sequence is None or book is None or book.deleted:
                    continue
                row = await self.store.catalog.get_session(name)
                if name in seat.node._core.lives and (row.owner, row.epoch) != (seat.node.incarnation, live.epoch):
                    continue
                if self.store.lost and live.consumed > book.head:
                    continue  # an owner learns what the store lost when it is asked
                held, due = seat.engine.sequences[live.sequence], self.oracle.state(book.tokens[: live.consumed])
                if (held.running, held.grid, held.latents) != (due.running, due.grid, due.latents):
                    raise Violation(f"{name}: its state on {seat.name} is not that of its {live.consumed} tokens")

    async def _judge_manifests(self) -> None:
        """Every stored checkpoint holds the state of the tokens that its chain hash stands for."""
        points: dict[tuple[int, bytes], list[int]] = {}
        for client in self.clients:
            for book in client.books:
                for era in book.eras:
                    points.update(dict.fromkeys(self.oracle.grid_points(era), era))
        for scanned in await self.store.catalog.scan_manifests(0, 100_000):
            row = scanned.row
            tokens = points.get((row.grid_position, row.chain_hash))
            if tokens is None:
                if self.store.lost == 0:
                    raise Violation(f"a manifest at {row.grid_position} is of no log that anyone was told of")
                continue
            due = self.oracle.parts(tokens[: row.grid_position])
            async for part, raw in fetch_ahead(self.store.blobs, unseal(row.manifest).parts):
                if raw != due[part.spec.name] and not (self.store.lost and isinstance(raw, Exception)):
                    raise Violation(f"part {part.spec.name} at {row.grid_position} is not the state there: {raw!r}")

    async def _judge_store(self) -> None:
        findings = [found async for found in check(self.store.catalog, self.store.blobs)]
        # A blob that was seen before a failover took it may be named by a manifest that came after.
        known = {"BLOB_MISSING"} if self.store.lost else set[str]()
        bad = [found for found in findings if found.severity is Severity.ERROR and found.kind not in known]
        if bad:
            raise Violation(f"check finds {bad[0]}")

    async def end(self) -> None:
        """Every node leaves in order; then nobody owns anything."""
        left = {seat.node.incarnation for seat in self.seats if seat.node is not None}
        await asyncio.gather(*(seat.stop() for seat in self.seats))
        listed = left & {node.incarnation for node in await self.store.catalog.list_nodes()}
        if listed:
            raise Violation(f"{listed} left in order and are still listed: nobody may take what they own")
        for seat in self.seats:
            await seat.bury()


class Complaints(logging.Handler):
    """What the product says in despair: an error that it did not expect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, HiccupError):
            self.found.append(f"{record.getMessage()} ({type(error).__name__}: {error})")


@contextmanager
def _alone(seed: int, loop: SimLoop, complaints: Complaints) -> Iterator[None]:
    """Nothing of the machine reaches the run: no randomness, no finaliser at a moment of its own."""
    rng = random.Random(f"secrets {seed}")
    logger = logging.getLogger("forkpoint")
    level, propagates = logger.level, logger.propagate
    logger.addHandler(complaints)
    logger.propagate = False
    if level == logging.NOTSET:
        logger.setLevel(logging.ERROR)
    gc.disable()
    gc.freeze()
    try:
        with (
            mock.patch.object(secrets, "choice", rng.choice),
            mock.patch.object(secrets, "token_bytes", rng.randbytes),
            mock.patch.object(secrets, "token_hex", lambda size: rng.randbytes(size).hex()),
            mock.patch.object(CODEC_THREADS, "submit", loop.submit),
        ):
            yield
    finally:
        gc.collect()
        gc.unfreeze()
        gc.enable()
        logger.setLevel(level)
        logger.propagate = propagates
        logger.removeHandler(complaints)


def run_seed(seed: int, show: Callable[[str], None] | None = None) -> Outcome:
    """One run. Never raises: a broken promise, a hang and a crash of the simulation are all the outcome's problem."""
    loop = SimLoop(random.Random(f"loop {seed}"))  # type: ignore[abstract]
    trace = Trace(loop.time, show)
    complaints = Complaints()
    problem: str | None = None
    with _alone(seed, loop, complaints):
        world = World(seed, loop, trace)
        try:
            loop.run(world.play(), VIRTUAL_SECONDS_MAX)
            loop.run(world.judge(), VIRTUAL_SECONDS_MAX)
            loop.run(world.end(), VIRTUAL_SECONDS_MAX)
            troubles = [*complaints.found, *(_told(trouble) for trouble in loop.troubles)]
            problem = troubles[0] if troubles else None
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            problem = _story(error, world)
            sys.unraisablehook = lambda _: None  # what is left half done is thrown away
        digest, seconds = trace.digest(), loop.time()
        loop.close()
    counts = {
        "operations": sum(client.operations for client in world.clients),
        "tokens": sum(client.generated for client in world.clients),
        "sights": len(world.reader.sights),
        "failovers": world.store.term,
        "losses": world.store.lost,
        "resyncs": sum(client.resyncs for client in world.clients),
        "rounds": loop.rounds,
        **world.mover.counts,
        "collections": sum(seat.collections for seat in world.seats),
        **world.nemesis.counts,
    }
    tail = tuple(trace.tail()) if problem else ()
    return Outcome(seed, digest, problem, trace.facts, seconds, counts, tail)


def _followed(seat: Seat) -> list[tuple[SessionName, LiveSession]]:
    """What the node brings along for others."""
    assert seat.node is not None
    return [(name, follower.live) for name, follower in seat.node._core.follows.items() if follower.ready]


def _told(trouble: dict[str, object]) -> str:
    return f"{trouble.get('message')}: {trouble.get('exception')!r}"


def _story(error: BaseException, world: World) -> str:
    """The first thing that went wrong, and what clients were at."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    where = ""
    if not isinstance(error, Violation):
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        if frame is not None:
            where = f" at {frame.tb_frame.f_code.co_filename.rpartition('/')[2]}:{frame.tb_lineno}"
        where += "; " + ", ".join(f"client-{client.number} {client.doing}" for client in world.clients)
    return f"{type(error).__name__}: {error}{where}"
