"""What the parts of a node share."""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Final

from forkpoint.clock import Clock
from forkpoint.errors import ForkpointError, UnavailableError
from forkpoint.ids import SessionName
from forkpoint.move_errors import NodeStalledError
from forkpoint.server.session.counters import Counters
from forkpoint.server.session.engine_thread import EngineThread
from forkpoint.server.session.follower import Follower
from forkpoint.server.session.live import LiveSession, LogTail, Place
from forkpoint.server.session.options import NodeOptions
from forkpoint.server.session.ports import TextCodec
from forkpoint.server.session.progress import Progress
from forkpoint.server.session.tasks import TaskOwner
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.records import SessionRow, StoreMarker

log = logging.getLogger(__name__)

INCARNATION: Final = "i"
"""Prefix of an incarnation's id, so that it is told from a tool's name."""


@dataclass(slots=True)
class NodeCore:
    """Ports, options, counters, and the sessions that this node owns."""

    catalog: Catalog
    checkpoints: CheckpointStore
    engine: EngineThread
    codec: TextCodec
    options: NodeOptions
    clock: Clock
    incarnation: str
    marker: StoreMarker
    tasks: TaskOwner
    progress: Progress
    counters: Counters = field(default_factory=Counters)
    lives: dict[SessionName, LiveSession] = field(default_factory=dict)
    follows: dict[SessionName, Follower] = field(default_factory=dict)
    """Sessions of other nodes that this one brings along; none is in `lives` as well."""
    work: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the loop has something to look at."""
    draining: bool = False
    """The node leaves: it refuses calls."""
    cordoned: bool = False
    """Nothing is placed on the node; it goes on answering."""
    leaving: bool = False
    """The node is about to stop, or stops: a stream that ends now does not tell that its caller left."""
    _ticket: int = 0

    def ticket(self) -> int:
        """A number above all given before."""
        self._ticket += 1
        return self._ticket

    def wake(self) -> None:
        """Let the loop look for work."""
        self.work.set()

    def refuse_when_stalled(self) -> None:
        """Raises NodeStalledError."""
        stalled = self.progress.stalled
        if stalled:
            raise NodeStalledError(self.options.node, stalled)

    def doubt_all(self) -> None:
        """Other nodes took this one for dead, and its sessions may be theirs: the loop is to compare each with the
        store."""
        for live in self.lives.values():
            live.suspect = True
        self.wake()

    def wake_in(self, seconds: float) -> None:
        """Let the loop look for work when so much time has passed on the node's clock."""
        self._wake_at(self.clock.monotonic() + seconds)

    def _wake_at(self, when: float) -> None:
        """What rests is compared with this clock: the event loop's timers, which may go by a coarser or a faster one,
        must not wake the loop too early and then never again."""
        left = when - self.clock.monotonic()
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._wake_at, when)
        else:
            self.work.set()

    def back_off(self, live: LiveSession, error: Exception) -> None:
        """Note a failure of one session: its readers see it, and it rests for a while, longer each time."""
        self.rest(live, error)
        live.fail(error)

    def rest(self, live: LiveSession, error: Exception) -> None:
        """As back_off, without a word to the readers."""
        live.failures += 1
        delay = self.retry_delay(live.failures)
        live.retry_at = self.clock.monotonic() + delay
        self.counters.session_failures += 1
        level = logging.WARNING if isinstance(error, ForkpointError) else logging.ERROR
        log.log(level, "%s failed, next try in %.1f s: %s", live.name, delay, error, exc_info=level == logging.ERROR)
        self.wake_in(delay)

    def retry_delay(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row."""
        return min(self.options.retry_most_seconds, self.options.retry_first_seconds * 2.0 ** min(failures - 1, 30))

    def rests(self, live: LiveSession) -> bool:
        """Whether a failure is too fresh to try again."""
        return live.failures > 0 and self.clock.monotonic() < live.retry_at

    async def free_sequence(self, live: LiveSession) -> None:
        """Take the session off the engine, if it is on it."""
        sequence, live.sequence = live.sequence, None
        live.chain, live.needed_from, live.can_sample = None, None, False
        if sequence is not None:
            await self.engine.free(sequence)
        self.wake()

    async def discard(self, live: LiveSession) -> None:
        """Take it off the engine without a checkpoint; it waits like any other when it is needed again."""
        live.place = Place.PARKED
        live.waiting_since = self.ticket()
        if live.generation is None:
            live.tail = LogTail(live.head)
            # The last token of a turn is consumed while that costs nothing; it is not worth a restore.
            live.wants_prefill = live.wants_prefill and live.head - live.consumed > 1
        await self.free_sequence(live)

    async def unfollow(self, follower: Follower, error: Exception) -> None:
        """Bring the session along no longer: those who asked for it raise `error`, the slot is freed. While it is being
        restored, whoever restores it sees to that."""
        if self.follows.get(follower.name) is not follower:
            return
        del self.follows[follower.name]
        if follower.tailing is not None and follower.tailing is not asyncio.current_task():
            follower.tailing.cancel()
        follower.live.leave(error)
        await self.free_sequence(follower.live)

    def followed(self, live: LiveSession) -> Follower | None:
        """The follower whose state this is; None for a session of this node."""
        follower = self.follows.get(live.name)
        return follower if follower is not None and follower.live is live else None

    async def drop_if_ahead(self, live: LiveSession, row: SessionRow) -> bool:
        """Whether the store lost the end of a log that this node knows; then it gives the session up."""
        if row.branch != live.row.branch or row.head >= live.head:
            return False
        await self.drop_lost(live, f"the end of its log: it knows {row.head} tokens, {live.head} were here")
        return True

    async def drop_lost(self, live: LiveSession, what: str) -> None:
        """The store lost something that this node knows, as a failover may: what is here is of no use. Callers come
        again, and those who saw what is lost are told so by position."""
        log.error("%s: the store lost %s", live.name, what)
        await self.drop(live, UnavailableError(f"{live.name}: the store lost {what}; call again"))

    async def drop(self, live: LiveSession, error: Exception) -> None:
        """The node gives the session up: readers raise `error`, the slot is freed."""
        if self.lives.get(live.name) is live:
            del self.lives[live.name]
        live.leave(error)
        await self.free_sequence(live)
