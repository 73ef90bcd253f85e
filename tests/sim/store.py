"""A simulated Redis with a replica: the real in-memory catalog and blobs, a log of their writes, and failovers.

The replica is the log's replicated part. A failover replays it into a fresh store, which is the primary from then on:
what was acknowledged and not replicated is gone, in the order in which it was written.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from forkpoint.errors import ForkpointError
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.records import Durability
from tests.sim.instant import all_at_once, at_once
from tests.sim.trace import Trace
from tests.sim.watch import Call, Watch
from tests.support.session_site import MARKER

START_US: Final = 1_700_000_000_000_000
READS: Final = (
    *("get", "list", "find", "read", "open_generation", "scan", "nearest", "lineage", "absolutions"),
    *("has", "digests", "sizes"),
)
LAG_SECONDS: Final = (0.0005, 0.01)
"""How far the replica is behind, at least and at most, while it is well."""


class StoreClock:
    """The store's own clock; a replay goes by the time of the first execution."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.replayed_us: int | None = None

    def monotonic(self) -> float:
        return self._loop.time()

    def wall_us(self) -> int:
        if self.replayed_us is not None:
            return self.replayed_us
        return START_US + int(self._loop.time() * 1e6)


@dataclass(frozen=True)
class Write:
    """One executed write, and when the replica had it."""

    call: Call
    at_us: int
    replicated: float


@dataclass(frozen=True)
class Reply:
    """What the store says to a call, and when it may: at once, or as soon as the replica has what it is about."""

    value: object
    error: ForkpointError | None
    ready: float
    term: int


class SimStore:
    """`term` counts failovers; `lost` those that took back what was acknowledged."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, rng: random.Random, durability: Durability, trace: Trace
    ) -> None:
        self._loop = loop
        self._rng = rng
        self._trace = trace
        self._clock = StoreClock(loop)
        self._writes: list[Write] = []
        self.durability = durability
        self.up = True
        self.term = 0
        self.lost = 0
        self.stalled_until = 0.0
        """The replica gets nothing before."""
        self.watch = Watch()
        self.catalog, self.blobs = self._fresh()

    def _fresh(self) -> tuple[MemoryCatalog, MemoryBlobs]:
        catalog = MemoryCatalog(self._clock)
        at_once(catalog.open(MARKER))
        blobs = MemoryBlobs()
        blobs._tier = "simulated"
        return catalog, blobs

    def execute(self, call: Call) -> Reply:
        """Let a call take effect, now."""
        is_write = not call.method.startswith(READS)
        before = self.watch.before(call, self.catalog) if is_write else None
        value, error = self._apply(call)
        ready = self._loop.time()
        if is_write and error is None:
            ready = self._note(call)
            self.watch.after(call, before, self.catalog)
        elif self.durability is Durability.REPLICATED and self._writes:
            # Nobody may act on what a failover could take back.
            ready = max(ready, self._writes[-1].replicated)
        self._trace.note("store", call.caller, call.method, call.args, error or value)
        return Reply(value, error, ready if self.durability is Durability.REPLICATED else self._loop.time(), self.term)

    def execute_if_up(self, call: Call) -> None:
        """A call whose caller hears nothing of it any more."""
        if self.up:
            self.execute(call)

    def _apply(self, call: Call) -> tuple[object, ForkpointError | None]:
        target = getattr(self.catalog if call.port == "catalog" else self.blobs, call.method)
        try:
            if call.method == "digests":
                return all_at_once(target(*call.args)), None
            return at_once(target(*call.args, **call.keywords)), None
        except ForkpointError as error:
            return None, error

    def _note(self, call: Call) -> float:
        lag = self._rng.uniform(*LAG_SECONDS)
        last = self._writes[-1].replicated if self._writes else 0.0
        replicated = max(self._loop.time() + lag, self.stalled_until + lag, last)
        self._writes.append(Write(call, self._clock.wall_us(), replicated))
        return replicated

    def fail_over(self) -> None:
        """The primary dies; the replica takes its place with what it has."""
        kept = [write for write in self._writes if write.replicated <= self._loop.time()]
        lost = self._writes[len(kept) :]
        self._writes = kept
        self.catalog, self.blobs = self._fresh()
        self.term += 1
        for write in kept:
            self._clock.replayed_us = write.at_us
            _, error = self._apply(write.call)
            assert error is None, f"the replica refuses {write.call.method}: {error}"
        self._clock.replayed_us = None
        self.watch.rolled_back(self.catalog)
        if lost and self.durability is Durability.MEMORY:
            self.lost += 1
            self.watch.forget()
        elif lost:
            self.watch.take_back(self.catalog)
        self._trace.note("failover", self.term, [write.call.method for write in lost])

    def still_true(self, reply: Reply) -> bool:
        """Whether the store that gave the reply is still there to send it."""
        return self.up and reply.term == self.term

    def spoil(self, digest: str) -> None:
        """Flip a bit of a stored blob."""
        frame = bytearray(self.blobs._frames[digest])
        frame[self._rng.randrange(len(frame))] ^= 1 << self._rng.randrange(8)
        self.blobs._frames[digest] = bytes(frame)

    def digests(self) -> Sequence[str]:
        """Blobs that are there."""
        return all_at_once(self.blobs.digests())
