"""Who is on the engine: admits waiting sessions, parks idle ones, drops fork images when room is short."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Final

from forkpoint.errors import DataLossError, ForkpointError, NodeCapacityError, SessionRelocatingError, StaleEpochError
from forkpoint.ids import SessionName
from forkpoint.server.engine.base import Capacity
from forkpoint.server.scheduler.admission import NodeRoom, Waiting, plan_admission
from forkpoint.server.scheduler.policy import Candidate, Idle, pages_for
from forkpoint.server.session.checkpoint import Checkpointer
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.fork import ForkImages
from forkpoint.server.session.live import LiveSession, Place
from forkpoint.server.session.quarantine import Quarantine
from forkpoint.server.session.restore import Restorer

log = logging.getLogger(__name__)

FOLLOWERS_LAST: Final = 1 << 62
"""Added to a follower's number, it is above all tickets."""


class Residents:
    """Runs between steps. Activations run in the background and attach what they restored when they are done."""

    def __init__(
        self,
        core: NodeCore,
        checkpointer: Checkpointer,
        restorer: Restorer,
        images: ForkImages,
        quarantine: Quarantine,
    ) -> None:
        self._core = core
        self._quarantine = quarantine
        self._checkpointer = checkpointer
        self._restorer = restorer
        self._images = images
        self._room_for: dict[SessionName, int] = {}
        """Sessions whose activation has not taken its slot yet, with the pages it may take."""
        self._room_for_followers: dict[SessionName, int] = {}
        """The same of followers that are being restored."""
        self._activations: set[asyncio.Task[None]] = set()

    def idle(self) -> list[Idle[SessionName]]:
        """Resident sessions that want nothing now."""
        return [
            Idle(live.name, live.consumed, live.last_used)
            for live in self._core.lives.values()
            if live.place is Place.RESIDENT and not live.held and not _needs_engine(live)
        ]

    def find(self, name: SessionName) -> LiveSession | None:
        """What steps work on under this name: a session of the node, or one that it follows."""
        live = self._core.lives.get(name)
        if live is None and name in self._core.follows:
            live = self._core.follows[name].live
        return live

    def at(self, name: SessionName) -> LiveSession:
        """As find, of one that is there."""
        live = self.find(name)
        assert live is not None
        return live

    def candidates_that_follow(self) -> list[Candidate[SessionName]]:
        """Followers with tokens to consume. They count as admitted after all sessions of the node, so that none of
        these is parked for one; nothing is captured of them, and so their chunks need no cuts."""
        found = []
        for follower in self._core.follows.values():
            live = follower.live
            if follower.ready and live.consumed < live.head and not self._core.rests(live):
                admitted = FOLLOWERS_LAST + follower.number
                found.append(Candidate(live.name, live.name.workflow, live.consumed, live.head, False, 0, admitted))
        return found

    async def make_way(self, name: SessionName, tokens: int, eager: bool) -> None:
        """Between steps: keep a slot, and pages for so many tokens, free for a follower until `arrived`. `eager`: what
        is idle makes room for it. Sessions of the node that wait for a slot come first.

        Raises NodeCapacityError.
        """
        pages = pages_for(tokens + 1)
        while True:
            capacity = await self._core.engine.capacity()
            room = self._room(capacity)
            if room.slots_free >= 1 and room.pages_free >= pages:
                break
            waits = any(waiting.foreground for waiting in self._waiting())
            fits = capacity.slots_total > 0 and pages <= capacity.pages_total
            if waits or not fits or not (eager and await self._free_one()):
                short = room.slots_free < 1
                raise NodeCapacityError(*(("slots", 1, 0) if short else ("pages", pages, room.pages_free)))
        self._room_for_followers[name] = pages

    def arrived(self, name: SessionName) -> None:
        """The follower has its slot, or wants none any more."""
        self._room_for_followers.pop(name, None)

    async def _free_one(self) -> bool:
        """Free a slot that nobody needs now."""
        if await self._images.drop_one() or await self.drop_follower(migrating=False):
            return True
        idle = min(self.idle(), key=lambda resting: resting.last_used, default=None)
        if idle is None:
            return False
        await self.park([idle.key])
        return True

    async def drop_follower(self, migrating: bool) -> bool:
        """Give up the follower that came last, of those that a migration waits for or of the others. False: there is
        none, or it is about to be owned."""
        found = [
            follower
            for follower in self._core.follows.values()
            if follower.migrates is migrating and not follower.turn.locked()
        ]
        if not found:
            return False
        last = max(found, key=lambda follower: follower.number)
        await self._core.unfollow(last, NodeCapacityError("slots for sessions of other nodes", 1, 0))
        return True

    async def drop_any_follower(self) -> bool:
        """Give up one that a migration waits for only when there is no other."""
        return await self.drop_follower(migrating=False) or await self.drop_follower(migrating=True)

    async def give_way(self, blocked: Sequence[SessionName]) -> bool:
        """A follower that is short of pages is given up: nothing of the node is parked for it. Whether one was."""
        for name in blocked:
            follower = self._core.follows.get(name)
            if follower is not None and not follower.turn.locked():
                await self._core.unfollow(follower, NodeCapacityError("pages", 1, 0))
                return True
        return False

    async def admit(self) -> None:
        """Let waiting sessions in, as far as there is room, and make room for the next ones."""
        if next(iter(self._waiting()), None) is None:
            return
        capacity = await self._core.engine.capacity()
        # A session may have left while the engine was asked.
        waiting = list(self._waiting())
        plan = plan_admission(waiting, self.idle(), self._room(capacity))
        foreground = {w.key for w in waiting if w.foreground}
        short = bool(foreground - set(plan.admit) - set(plan.never))
        for name in plan.admit:
            self._begin(self._core.lives[name])
        for live in [self._core.lives[name] for name in plan.never]:
            await self._refuse(live)
        # Prefill in the background goes before images and idle sessions, not before running generations.
        wants = short or bool(plan.park)
        if wants and (await self._images.drop_one() or await self.drop_follower(migrating=False)):
            self._core.wake()
        elif plan.park:
            await self.park(plan.park)
        elif short and not await self.drop_follower(migrating=True):
            await self.park(self._had_their_turn())

    async def park(self, names: Iterable[SessionName]) -> None:
        """Checkpoint these and take them off the engine. What runs goes on when there is room again."""
        for name in names:
            live = self._core.lives.get(name)
            if live is not None and live.place is Place.RESIDENT and not live.held:
                await self.evict(live)
                self._core.counters.parked += 1

    async def relieve(self, names: Iterable[SessionName]) -> None:
        """Pages are short: fork images go first, then followers, then these sessions; followers that a migration waits
        for go before what runs, not before what is idle."""
        names = list(names)
        if await self._images.drop_one() or await self.drop_follower(migrating=False):
            return
        idle = {resting.key for resting in self.idle()}
        if idle.issuperset(names) or not await self.drop_follower(migrating=True):
            await self.park(names)

    async def rewarm(self) -> None:
        """Sessions restored exactly at the head that are to sample: the row to sample from is not there, a restore
        from below the head brings it."""
        for live in list(self._core.lives.values()):
            resident = live.place is Place.RESIDENT and not live.held
            if resident and live.generation is not None and not live.has_row_ahead:
                live.will_sample = True
                await self._core.discard(live)

    async def evict(self, live: LiveSession) -> None:
        """Capture the state, free the sequence; the checkpoint is written in the background."""
        await self._checkpointer.capture(live)
        await self._core.discard(live)

    def _waiting(self) -> Iterable[Waiting[SessionName]]:
        for live in self._core.lives.values():
            if live.place is not Place.PARKED or live.held or live.suspect or self._core.rests(live):
                continue
            if _needs_engine(live):
                foreground = live.generation is not None or live.wanted > 0
                yield Waiting(live.name, live.name.workflow, live.head, self._since(live), foreground)

    def _had_their_turn(self) -> list[SessionName]:
        """The generation that had its slot for the longest, if that was a whole slice: nobody waits for ever."""
        slice_tokens = self._core.options.slice_tokens
        busy = [
            live
            for live in self._core.lives.values()
            if live.place is Place.RESIDENT and live.generation is not None and not live.held and live.wanted == 0
        ]
        oldest = min(busy, key=lambda live: live.admitted, default=None)
        return [] if oldest is None or oldest.head - oldest.slice_start < slice_tokens else [oldest.name]

    def _since(self, live: LiveSession) -> int:
        if live.waiting_since == 0:
            live.waiting_since = self._core.ticket()
        return live.waiting_since

    def _room(self, capacity: Capacity) -> NodeRoom:
        """What is free less what running activations will take."""
        kept = [*self._room_for.values(), *self._room_for_followers.values()]
        slots = max(0, capacity.slots_free - len(kept))
        pages = max(0, capacity.pages_free - sum(kept))
        return NodeRoom(capacity.slots_total, slots, capacity.pages_total, pages)

    def _begin(self, live: LiveSession) -> None:
        live.place = Place.RESTORING
        self._room_for[live.name] = pages_for(live.head + 1)
        task = self._core.tasks.spawn(self._activate(live), f"activate {live.name}")
        self._activations.add(task)
        task.add_done_callback(self._activations.discard)

    async def settled(self) -> None:
        """Until no activation runs, also of sessions that left meanwhile: cut off, it would leave a sequence that
        nobody has."""
        while self._activations:
            await asyncio.wait(self._activations)

    async def _activate(self, live: LiveSession) -> None:
        """Bring the session's state onto the engine."""
        try:
            await self._checkpointer.settle(live)
            if not await self._images.use(live):
                await self._restorer.restore(live)
        except StaleEpochError:
            await self._core.drop(live, SessionRelocatingError(str(live.name), "another node", ""))
        except NodeCapacityError:
            # The pages went to running sessions meanwhile: wait again.
            await self._core.free_sequence(live)
            live.place = Place.PARKED
            self._core.wake_in(self._core.options.retry_first_seconds)
        except DataLossError as error:
            await self._core.free_sequence(live)
            live.place = Place.PARKED
            await self._quarantine.unreadable(live, error)
        except Exception as error:  # noqa: BLE001 - back_off logs it
            await self._core.free_sequence(live)
            live.place = Place.PARKED
            self._core.back_off(live, error)
        else:
            await self._attach(live)
        finally:
            self._room_for.pop(live.name, None)
            if live.place is Place.RESTORING:
                live.place = Place.PARKED
            live.changed.fire()
            self._core.wake()

    async def _attach(self, live: LiveSession) -> None:
        if live.gone is not None:
            live.place = Place.PARKED
            await self._core.free_sequence(live)
            return
        live.place = Place.RESIDENT
        live.slice_start = live.head
        live.waiting_since = 0
        live.admitted = live.last_used = self._core.ticket()

    async def _refuse(self, live: LiveSession) -> None:
        capacity = await self._core.engine.capacity()
        needed = pages_for(live.head + 1)
        error: ForkpointError = NodeCapacityError("pages", needed, capacity.pages_total)
        self._core.back_off(live, error)


def _needs_engine(live: LiveSession) -> bool:
    if live.generation is not None or live.wanted > 0:
        return True
    return live.wants_prefill and (live.place is Place.PARKED or live.consumed < live.head)
