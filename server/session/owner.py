"""Which node owns a session, and how this one comes to own it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from forkpoint.errors import (
    ForkpointError,
    NodeDrainingError,
    NotFoundError,
    SessionPausedError,
    SessionQuarantinedError,
    SessionRelocatingError,
    StaleEpochError,
    UnavailableError,
)
from forkpoint.ids import SessionName
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.live import LiveSession
from forkpoint.server.session.membership import Membership
from forkpoint.server.session.placement import NodeState
from forkpoint.server.session.ports import CutOverAsk
from forkpoint.server.session.promote import catch_up, fit_generation, install, note_numerics
from forkpoint.server.session.trials import Trials, Turn
from forkpoint.server.session.whereabouts import Whereabouts, is_free
from forkpoint.statestore.records import NodeRow, RequestKey, SessionRow, SessionState

log = logging.getLogger(__name__)

FOLLOWER_LOOK_SECONDS = 0.05
"""How often a node looks whether a follower has taken the session that it leaves to it."""
ACQUIRE_TRIES = 5
"""Others may take and give up a session while this node tries."""


class NameLocks:
    """One lock a key, kept only while somebody uses it."""

    def __init__(self) -> None:
        self._locks: dict[object, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def hold(self, key: object) -> AsyncIterator[None]:
        """One at a time for equal keys."""
        lock, users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[key]
            if users == 1:
                del self._locks[key]
            else:
                self._locks[key] = (lock, users - 1)


class Owners:
    """Takes sessions for this node."""

    def __init__(self, core: NodeCore, members: Membership, trials: Trials) -> None:
        self._core = core
        self._members = members
        self._trials = trials
        self._whereabouts = Whereabouts(core, members)
        self._locks = NameLocks()

    async def own(self, name: SessionName, resume: bool = False, request: RequestKey | None = None) -> LiveSession:
        """The session, owned by this node. `request`: whose effect it is that the node takes it, if it has to.

        Raises NotFoundError, SessionQuarantinedError, SessionPausedError (unless `resume`), SessionRelocatingError
        when a live node has it, or should have it (in a free call), NodeDrainingError: a node that is cordoned takes
        nothing that it has not.
        """
        live = self._core.lives.get(name)
        if live is not None:
            return live
        async with self._locks.hold(name):
            live = self._core.lives.get(name)
            if live is not None:
                return live
            follower = self._core.follows.get(name)
            async with self._trials.turn() as turn, follower.turn if follower else nullcontext():
                turn.live = await self._take(await self._acquire(name, resume, request, turn))
                return turn.live

    async def cut_over(self, ask: CutOverAsk) -> LiveSession:
        """Own a session that its owner hands over to the follower here.

        Raises what the catalog's cut_over raises; NotFoundError without a follower that knows the log as the owner
        does, NodeDrainingError, and StoreUnavailableError when nobody knows whether it is owned now.
        """
        name = ask.name
        async with self._locks.hold(name):
            live, follower = self._core.lives.get(name), self._core.follows.get(name)
            if live is not None and live.arrived == ask.migration:
                return live
            if self._core.draining or self._core.cordoned:
                raise NodeDrainingError(self._core.options.node)
            if follower is None:
                raise NotFoundError(str(name), "is not followed here")
            async with follower.turn:
                if not await catch_up(self._core, follower, ask.head, ask.head_hash):
                    raise NotFoundError(str(name), f"is not known here as it is at {ask.head}")
                row = await self._core.catalog.cut_over(
                    name, ask.epoch, ask.migration, self._core.incarnation, ask.head, ask.head_hash
                )
                live = await self._take(row)
            live.arrived = ask.migration
            self._core.counters.arrivals += 1
            return live

    async def _take(self, row: SessionRow) -> LiveSession:
        """Let a session run that is this node's by its row: with the follower's state, when there is one of use. One
        that fails meanwhile is of none."""
        live = await self._begin(row)
        if self._core.draining:
            await self._core.catalog.release(row.name, row.epoch, SessionState.ACTIVE)
            raise NodeDrainingError(self._core.options.node)
        follower = self._core.follows.get(row.name)
        if follower is not None and follower.live is live and follower.ready:
            install(self._core, follower, row)
            self._core.tasks.spawn(note_numerics(self._core, live), f"numerics of {row.name}")
            return live
        if follower is not None:
            await self._core.unfollow(follower, UnavailableError(f"{row.name} is this node's now"))
        if live.gone is not None or live.sequence is not None:
            live = await self._afresh(row)
        self._core.lives[row.name] = live
        self._core.wake()
        return live

    async def _begin(self, row: SessionRow) -> LiveSession:
        """What runs the session: the follower's state, or nothing yet; with its generation in both cases."""
        follower = self._core.follows.get(row.name)
        if follower is None or follower.live.row.branch != row.branch:
            return await self._afresh(row)
        if not await catch_up(self._core, follower, row.head, row.head_hash):
            return await self._afresh(row)
        await fit_generation(self._core, follower.live)
        return follower.live

    async def _afresh(self, row: SessionRow) -> LiveSession:
        live = LiveSession(row)
        live.numerics_ids = row.numerics_ids
        live.last_used = self._core.ticket()
        await fit_generation(self._core, live)
        return live

    @asynccontextmanager
    async def kept_out(self, name: SessionName) -> AsyncIterator[LiveSession | None]:
        """The live session, if there is one; if not, the node takes it not before the block's end."""
        async with self._locks.hold(name):
            yield self._core.lives.get(name)

    async def lost(self, live: LiveSession) -> None:
        """Another node has the session: the slot is dropped, readers are sent there."""
        self._core.counters.stale_epochs += 1
        try:
            error = await self.relocating(live.name)
        except ForkpointError:
            error = SessionRelocatingError(str(live.name), "another node", "")
        await self._core.drop(live, error)

    async def relocating(self, name: SessionName) -> SessionRelocatingError:
        """The error that says who has the session now."""
        row = await self._core.catalog.get_session(name)
        node = await self._members.holder(row.owner)
        if node is None:
            return SessionRelocatingError(str(name), row.owner or "nobody", "")
        return SessionRelocatingError(str(name), node.node, node.address)

    async def leave_to_owner(self, name: SessionName) -> None:
        """Raises SessionRelocatingError for a free call when a live node has the session."""
        if is_free():
            row = await self._core.catalog.get_session(name)
            self._whereabouts.to_owner(row, await self.foreign_owner(row))

    async def only_at_owner(self, name: SessionName) -> None:
        """Raises SessionRelocatingError when a live node has the session, which is to hear of what is done."""
        if name not in self._core.lives:
            node = await self.foreign_owner(await self._core.catalog.get_session(name))
            if node is not None:
                raise SessionRelocatingError(str(name), node.node, node.address)

    async def foreign_owner(self, row: SessionRow) -> NodeRow | None:
        """The live node that has the session, None when this one may take it."""
        if row.owner in ("", self._core.incarnation):
            return None
        return await self._members.holder(row.owner)

    async def _taken_by_follower(self, row: SessionRow) -> bool:
        """A dead node's session that another node may have brought along is left to that one for a while, which needs
        none to take it. Whether anybody took it, or anything else has changed."""
        core = self._core
        target = self._members.node(row.migration_target)
        may_be_followed = row.standbys > 0 or (target is not None and self._members.state(target) is NodeState.SERVING)
        if not may_be_followed or row.owner in ("", core.incarnation) or row.name in core.follows:
            return False
        until = core.clock.monotonic() + core.options.recovery_rank_seconds
        while core.clock.monotonic() < until:
            if (await core.catalog.get_session(row.name)).epoch != row.epoch:
                return True
            await asyncio.sleep(FOLLOWER_LOOK_SECONDS)
        return False

    def _was_elsewhere(self, row: SessionRow) -> bool:
        """Whether the row's owner, which is lost, is known to have been another node. One that is unknown was forgotten
        before this process began, as an earlier process of this node may have been."""
        lost = self._members.name_of(row.owner)
        return lost is not None and lost != self._core.options.node

    async def _acquire(self, name: SessionName, resume: bool, request: RequestKey | None, turn: Turn) -> SessionRow:
        for _ in range(ACQUIRE_TRIES):
            row = await self._core.catalog.get_session(name)
            if row.state is SessionState.DELETED:
                raise NotFoundError(str(name), "is deleted")
            if row.state is SessionState.QUARANTINED:
                raise SessionQuarantinedError(str(name), row.state_reason)
            if row.state is SessionState.PAUSED and not resume:
                raise SessionPausedError(str(name))
            node = await self.foreign_owner(row)
            if node is not None:
                raise SessionRelocatingError(str(name), node.node, node.address)
            if row.owner != self._core.incarnation:
                await self._whereabouts.place(row)
            if self._core.cordoned and row.owner != self._core.incarnation:
                raise NodeDrainingError(self._core.options.node)
            self._core.refuse_when_stalled()
            if await self._taken_by_follower(row):
                continue
            if self._trials.is_suspect(row) and not turn.claimed:
                await turn.claim()
                continue  # it may have taken a while
            try:
                taken = await self._core.catalog.acquire(name, self._core.incarnation, row.epoch, request)
                if row.owner not in ("", self._core.incarnation):
                    log.info("%s is taken over from %s, under epoch %d", name, row.owner, taken.epoch)
                return await self._trials.acquit(taken, elsewhere=self._was_elsewhere(row))
            except StaleEpochError:
                continue
        raise await self.relocating(name)
