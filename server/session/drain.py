"""Drain: a node takes nothing new, and what it has goes to other nodes, or is parked for whoever is asked for it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from forkpoint.errors import ForkpointError, UnavailableError
from forkpoint.ids import SessionName
from forkpoint.server.session.api import DrainReport
from forkpoint.server.session.changes import Signal
from forkpoint.server.session.checkpoint import Checkpointer
from forkpoint.server.session.claims import Claims
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.elsewhere import Elsewhere
from forkpoint.server.session.evict import Residents
from forkpoint.server.session.live import LiveSession, Place
from forkpoint.server.session.loop import StepLoop
from forkpoint.statestore.records import NodeRow, SessionState

log = logging.getLogger(__name__)

AT_ONCE: Final = 4
"""A move's long part is the target's restore and replay; more at once would only take turns there."""
TARGETS_MAX: Final = 2
"""Nodes that a session is sent to until it is parked."""


class Mover(Protocol):
    """Moves sessions that run here."""

    async def move(self, name: SessionName, target: NodeRow) -> None:
        """Until `target` owns the session. Raises MoveFailedError and what else stands in the way: then it is here as
        before. Cancelled before the cut-over, it stays here as well."""
        ...


@dataclass(slots=True)
class _Tally:
    """One drain's work: what it has dealt with, and what came of it."""

    moved: int = 0
    parked: int = 0
    seen: set[LiveSession] = field(default_factory=set)
    changed: Signal = field(default_factory=Signal)


class Parker:
    """Gives a session up without ending anything: whoever is asked for it, or finds its generation, goes on with it."""

    def __init__(self, claims: Claims, loop: StepLoop, residents: Residents, checkpointer: Checkpointer) -> None:
        self._claims = claims
        self._core = claims.core
        self._loop = loop
        self._residents = residents
        self._checkpointer = checkpointer

    async def park(self, live: LiveSession) -> None:
        """Checkpoint it, take it off the engine, release it. Calls are taken until just before it is released; nothing
        that was acknowledged is lost. Raises what the store raises, and why the session left meanwhile."""
        while not await self._let_go(live):
            await self._claims.confirmed(live)
            while live.writer:
                await live.changed.wait()
        # Half of this would leave it to a node that does not have it.
        await self._core.tasks.run(self._release(live), f"release {live.name}")

    async def settled(self, live: LiveSession) -> None:
        """Until it is on the engine or not. Raises why it left."""
        await self._claims.settled(live)

    async def _release(self, live: LiveSession) -> None:
        await self._core.free_sequence(live)
        await self._core.catalog.release(live.name, live.epoch, SessionState.ACTIVE)

    async def _let_go(self, live: LiveSession) -> bool:
        """Until the session is among the node's no longer. False when that must be tried again: the store may know more
        of it than the node, or a caller works on it, who may need steps to get to an end."""
        live.held = True
        try:
            await self._claims.settled(live)
            if live.place is Place.RESIDENT:
                await self._loop.at_tick(lambda: self._residents.evict(live))
            await self._checkpointer.settle(live)
            if live.gone is not None:
                raise live.gone
            if live.suspect or live.writer:
                return False
            del self._core.lives[live.name]
            # No NodeDrainingError: another node may have it in a moment, and calls are sent there from here.
            live.leave(UnavailableError(f"{live.name} was given up by a node that is drained; call again"))
            return True
        finally:
            live.held = False
            self._core.wake()


class Drainer:
    """Drains the node, and lets it take sessions again."""

    def __init__(self, core: NodeCore, parker: Parker, elsewhere: Elsewhere, mover: Mover | None) -> None:
        """`mover` None: sessions are parked only."""
        self._core = core
        self._parker = parker
        self._elsewhere = elsewhere
        self._mover = mover
        self._turn = asyncio.Lock()

    async def cordon(self) -> None:
        """Take nothing new from now on, and tell the others. Idempotent."""
        self._core.cordoned = True
        await self._elsewhere.tell()

    async def uncordon(self) -> None:
        """Take sessions again. Idempotent."""
        self._core.cordoned = False
        await self._elsewhere.tell()

    async def drain(self) -> AsyncIterator[DrainReport]:
        """Cordon, then send away all there is and park the rest: a report as it begins, whenever a session is gone, and
        at the end. Closing the iterator stops it after the moves under way were taken back; the node stays cordoned.
        What could be neither moved nor parked is left, and tried anew by the next drain."""
        await self.cordon()
        async with self._turn:
            tally = _Tally()
            task = self._core.tasks.spawn(self._send_all(tally, park=True), "drain")
            try:
                while not task.done():
                    yield self._report(tally)
                    await _either(task, tally.changed)
            finally:
                task.cancel()
                await asyncio.wait([task])
            yield self._report(tally)

    async def move_away(self, seconds: float) -> None:
        """Cordon, and send to others what can be sent in `seconds`, what runs first; for a node that leaves next."""
        try:
            async with asyncio.timeout(seconds), self._turn:
                await self.cordon()
                if await self._elsewhere.is_there():
                    await self._send_all(_Tally(), park=False)
        except TimeoutError:
            log.info("not everything was moved in time: the rest is released for others to take")
        except ForkpointError as error:
            log.warning("nothing more is moved: %s", error)

    def _report(self, tally: _Tally) -> DrainReport:
        return DrainReport(len(self._core.lives), tally.moved, tally.parked)

    async def _send_all(self, tally: _Tally, park: bool) -> None:
        """First those that can be moved, then, when they have their places, the others: what is released wants a slot
        elsewhere too."""
        await self._each(tally, self._move)
        if park:
            tally.seen.clear()
            await self._each(tally, self._park)

    async def _each(self, tally: _Tally, act: Callable[[LiveSession, _Tally], Awaitable[None]]) -> None:
        """Do `act` on every session once, also on those that come meanwhile, a few at a time."""

        async def work() -> None:
            while (live := self._next(tally)) is not None:
                try:
                    await act(live, tally)
                except ForkpointError as error:
                    log.warning("%s stays for now: %s", live.name, error)
                except Exception:
                    # A bug must not keep the other sessions here.
                    log.exception("%s was neither moved nor parked", live.name)
                tally.changed.fire()

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())

    def _next(self, tally: _Tally) -> LiveSession | None:
        """The next session to send away: those that run first, then those that somebody works with, then the idle."""
        left = [live for live in self._core.lives.values() if live not in tally.seen]
        if not left:
            return None
        live = min(left, key=lambda live: (live.generation is None, live.is_dormant, -live.last_used))
        tally.seen.add(live)
        return live

    async def _move(self, live: LiveSession, tally: _Tally) -> None:
        """Move it, if it has a state to keep."""
        await self._parker.settled(live)
        if live.place is Place.RESIDENT and await self._moved(live):
            tally.moved += 1

    async def _park(self, live: LiveSession, tally: _Tally) -> None:
        await self._parker.park(live)
        tally.parked += 1

    async def _moved(self, live: LiveSession) -> bool:
        tried = set[str]()
        while self._mover is not None and len(tried) < TARGETS_MAX and self._is_here(live):
            node = self._elsewhere.choose(live, tried)
            if node is None:
                return False
            tried.add(node.incarnation)
            try:
                await self._mover.move(live.name, node)
            except ForkpointError as error:
                log.warning("%s was not moved to %s: %s", live.name, node.node, error)
            else:
                return True
        return False

    def _is_here(self, live: LiveSession) -> bool:
        return self._core.lives.get(live.name) is live


async def _either(task: "asyncio.Task[None]", changed: Signal) -> None:
    """Until the task ended or the signal was fired."""
    fired = asyncio.get_running_loop().create_task(changed.wait())  # owner: this call
    try:
        await asyncio.wait((task, fired), return_when=asyncio.FIRST_COMPLETED)
    finally:
        fired.cancel()
