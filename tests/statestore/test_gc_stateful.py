"""Random trees of sessions, checkpoints and collections against what must always hold.

The model is short: which checkpoints callers asked for, and what every session could be restored from before a
collection. A collection may take nothing of either, and no manifest may ever lack a blob.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forkpoint.errors import NotFoundError
from forkpoint.statestore.gc import Collector, CollectorOptions
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.records import Pin, SessionRow, SessionState
from forkpoint.statestore.retention import RetentionPolicy
from forkpoint.statestore.scan import all_manifests, all_sessions
from tests.statestore.test_gc_crashes import Died, Life, mortal
from tests.support.collecting import Yard, finish
from tests.support.store import MARKER, ManualClock, name

T = TypeVar("T")
DAY_US = 24 * 3600 * 1_000_000
PICK = st.integers(0, 1 << 16)


class Store(RuleBasedStateMachine):
    """Calls in any order, each to its end; a collector may die in the middle of its work."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        clock = ManualClock()
        self.yard = Yard(MemoryCatalog(clock), MemoryBlobs(), clock)
        self.collector: Collector | None = None
        self.numbers = 0
        self.asked: set[str] = set()
        """session/checkpoint of what callers asked for and nobody gave up."""
        self.pinned: dict[str, list[str]] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end."""
        return self.loop.run_until_complete(work)

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def rows(self) -> list[SessionRow]:
        async def listed() -> list[SessionRow]:
            return [row async for row in all_sessions(self.yard.catalog, "w")]

        return self.run(listed())

    def pick(self, pick: int, deleted: bool = False) -> SessionRow | None:
        rows = [row for row in self.rows() if (row.state is SessionState.DELETED) == deleted]
        return rows[pick % len(rows)] if rows else None

    def teardown(self) -> None:
        self.loop.close()

    @initialize()
    def begin(self) -> None:
        self.run(self.yard.catalog.open(MARKER))
        self.run(self.yard.session("first", tokens=100))
        self.run(self.yard.register("node"))

    @rule(pick=PICK, tokens=st.integers(1, 90))
    def append(self, pick: int, tokens: int) -> None:
        if row := self.pick(pick):
            self.run(self.yard.append(row.name.session, tokens))

    @rule(pick=PICK, share=st.floats(0, 1), automatic=st.booleans())
    def save(self, pick: int, share: float, automatic: bool) -> None:
        row = self.pick(pick)
        if row is None or row.head < 16:
            return
        grid = max(1, int(share * (row.head // 16))) * 16
        session, checkpoint = row.name.session, f"c{self.number()}"
        self.run(self.yard.save(session, grid, checkpoint, automatic))
        if not automatic:
            self.asked.add(f"{session}/{checkpoint}")

    @rule(pick=PICK, share=st.floats(0, 1))
    def fork(self, pick: int, share: float) -> None:
        if row := self.pick(pick):
            self.run(self.yard.fork(row.name.session, f"s{self.number()}", int(share * row.head)))

    @rule(pick=PICK, share=st.floats(0, 1))
    def rewind(self, pick: int, share: float) -> None:
        if row := self.pick(pick):
            self.run(self.yard.rewind(row.name.session, int(share * row.head)))

    @rule(pick=PICK, days=st.integers(0, 3))
    def delete_session(self, pick: int, days: int) -> None:
        if row := self.pick(pick):
            self.run(self.yard.catalog.delete_session(row.name, self.yard.clock.now_us + days * DAY_US))

    @rule(pick=PICK)
    def undelete_session(self, pick: int) -> None:
        if row := self.pick(pick, deleted=True):
            self.run(self.yard.catalog.undelete_session(row.name))

    @precondition(lambda self: self.asked)
    @rule(pick=PICK)
    def delete_checkpoint(self, pick: int) -> None:
        where = sorted(self.asked)[pick % len(self.asked)]
        session, _, checkpoint = where.partition("/")
        try:
            self.run(self.yard.catalog.delete_checkpoint(name(session), checkpoint))
        except NotFoundError:
            return
        self.asked.discard(where)

    @rule(pick=PICK)
    def pin(self, pick: int) -> None:
        scanned = self.run(self.yard.catalog.scan_manifests(0, 1000))
        if scanned:
            chosen, pin = scanned[pick % len(scanned)], f"p{self.number()}"
            self.run(self.yard.catalog.pin(Pin(pin, "node", chosen.row.key)))
            self.pinned[pin] = self.run(self.yard.named_by(chosen.row))

    @precondition(lambda self: self.pinned)
    @rule(pick=PICK)
    def unpin(self, pick: int) -> None:
        pin = sorted(self.pinned)[pick % len(self.pinned)]
        self.run(self.yard.catalog.unpin(pin))
        del self.pinned[pin]

    @rule(pick=PICK)
    def leave_garbage(self, pick: int) -> None:
        self.run(self.yard.blobs.put(f"{pick:064x}", b"left over"))

    @rule(days=st.floats(0, 2))
    def wait(self, days: float) -> None:
        self.yard.clock.now_us += int(days * DAY_US)

    @rule(keep=st.integers(2, 4), step=st.sampled_from([0, 16, 64]), patient=st.booleans())
    def collect(self, keep: int, step: int, patient: bool) -> None:
        """A collector that lives on remembers what it saw; a new one does not."""
        before, gone = self.usable(), self.gone()
        if self.collector is None or not patient:
            options = CollectorOptions(RetentionPolicy(keep, step), grace_seconds=3600 if patient else 0)
            self.yard.clock.now_us += 60_000_000
            self.collector = self.yard.collector(options, f"collector-{self.number()}")
            self.run(self.collector.election.stand())
            self.yard.clock.now_us += 60_000_000
        eager = not patient
        report = self.run(finish(self.collector))
        assert report.stopped == ""
        self.check(before, gone)
        if eager:
            assert self.run(self.yard.garbage()) == set()
            assert all(scanned.held for scanned in self.run(self.manifests()))

    @rule(calls=st.integers(0, 120), late=st.booleans())
    def collector_dies(self, calls: int, late: bool) -> None:
        before, gone = self.usable(), self.gone()
        self.collector = None
        doomed = mortal(self.yard, Life(calls, late), CollectorOptions(RetentionPolicy(2, 0), grace_seconds=0))
        doomed.election.holder = f"mortal-{self.number()}"
        self.yard.clock.now_us += 60_000_000
        for _ in range(2):
            try:
                self.run(doomed.election.stand())
            except Died:
                return
            self.yard.clock.now_us += 60_000_000
        with contextlib.suppress(Died):
            self.run(finish(doomed))
        self.check(before, gone)

    async def manifests(self) -> list[Any]:
        return [scanned async for scanned in all_manifests(self.yard.catalog)]

    def gone(self) -> set[str]:
        """Deleted sessions that can't come back."""
        now = self.yard.clock.now_us + DAY_US // 100
        return {
            row.name.session for row in self.rows() if row.state is SessionState.DELETED and (row.purge_us or 0) <= now
        }

    def usable(self) -> dict[tuple[str, int], int]:
        """What every session that is not gone would be restored from, at its head and below it."""
        found: dict[tuple[str, int], int] = {}
        for row in self.rows():
            for limit in (row.head, row.head - 1):
                nearest = self.run(self.yard.catalog.nearest_checkpoint(row.name, limit))
                if nearest is not None:
                    found[row.name.session, limit] = nearest.grid_position
        return found

    def check(self, before: dict[tuple[str, int], int], gone: set[str]) -> None:
        """A collection has taken nothing that was needed or asked for."""
        after = self.usable()
        for (session, limit), grid in before.items():
            if session not in gone:
                assert after.get((session, limit)) == grid, f"{session} lost its checkpoint at {grid}"
        self.asked = {where for where in self.asked if where.partition("/")[0] not in gone}
        assert self.asked <= self.run(self.yard.rows())

    @invariant()
    def nothing_is_missing(self) -> None:
        assert self.run(self.yard.missing()) == []

    @invariant()
    def what_is_pinned_can_be_read(self) -> None:
        for digests in self.pinned.values():
            assert None not in self.run(self.yard.blobs.sizes(digests))


Store.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestStore = Store.TestCase
