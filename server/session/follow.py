"""Following: this node brings along sessions of others, for as long as their owners ask for it, and somewhat longer."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Final

from forkpoint.errors import (
    AbortedError,
    ForkpointError,
    NodeDrainingError,
    NotFoundError,
    OutOfRangeError,
    PreconditionError,
    SessionRelocatingError,
    StaleEpochError,
    StoreFullError,
    StoreUnavailableError,
    UnavailableError,
)
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.evict import Residents
from forkpoint.server.session.follower import Follower
from forkpoint.server.session.live import LiveSession, Place
from forkpoint.server.session.logread import read_all
from forkpoint.server.session.loop import StepLoop
from forkpoint.server.session.membership import Membership
from forkpoint.server.session.owner import Owners
from forkpoint.server.session.placement import NodeState
from forkpoint.server.session.ports import CutOverAsk, FollowAsk, FollowReport, Peers
from forkpoint.server.session.promote import adopt
from forkpoint.server.session.restore import Restorer
from forkpoint.server.session.tasks import survive
from forkpoint.statestore.records import SessionRow, SessionState

log = logging.getLogger(__name__)

TAIL_AGAIN_SECONDS: Final = 0.1
"""A follower whose owner does not tell it the log looks into the store this often."""
MOVE_REPORT_SECONDS: Final = 0.005
STANDBY_REPORT_SECONDS: Final = 1.0
"""How often an owner hears how far a follower is, at most: a migration waits for it, a standby just lives."""


class Followers:
    """All that this node follows. A follower writes nothing into the store, save that it pins what it restores."""

    def __init__(
        self,
        core: NodeCore,
        members: Membership,
        owners: Owners,
        restorer: Restorer,
        residents: Residents,
        loop: StepLoop,
        peers: Peers,
    ) -> None:
        self._core = core
        self._members = members
        self._owners = owners
        self._restorer = restorer
        self._residents = residents
        self._loop = loop
        self._peers = peers
        self._restores: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Take the sessions whose owners died, whether anything runs on them or not, for ever."""
        while not self._core.draining:
            for follower in list(self._core.follows.values()):
                if follower.ready and self._is_dead(follower.ask.owner):
                    await survive(self._inherit(follower), f"taking {follower.name}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._core.options.recovery_poll_seconds):
                    await self._members.changed.wait()

    def _is_dead(self, incarnation: str) -> bool:
        """As far as this node's directory knows: whoever takes a session asks the store."""
        node = self._members.node(incarnation)
        return node is None or self._members.state(node) is NodeState.DEAD

    async def _inherit(self, follower: Follower) -> None:
        try:
            await follower.promote()
        except SessionRelocatingError:
            return  # somebody has it, who may ask for a follower
        except (NotFoundError, PreconditionError) as error:
            await self._core.unfollow(follower, error)
        else:
            log.info("%s goes on here", follower.name)

    async def follow(self, ask: FollowAsk) -> AsyncGenerator[FollowReport, None]:
        """Follow a session until the iterator is closed; ends when this node has become its owner.

        Raises StaleEpochError when who asks does not own it, NodeCapacityError when there is no room or it is needed
        for this node's own sessions, NodeDrainingError, and why the session could not be restored or replayed.
        """
        follower = await self._core.tasks.run(self._begin(ask), f"follow {ask.name}")
        stream = self._core.ticket()
        follower.asking[stream] = ask.migration
        told: FollowReport | None = None
        try:
            while not follower.owned:
                if follower.live.gone is not None:
                    raise follower.live.gone
                report = follower.report()
                if report is None or report == told:
                    await follower.live.changed.wait()
                    continue
                told = report
                yield report
                await asyncio.sleep(MOVE_REPORT_SECONDS if ask.migration else STANDBY_REPORT_SECONDS)
        finally:
            del follower.asking[stream]
            if not follower.asking:
                self._let_linger(follower)

    async def cut_over(self, ask: CutOverAsk) -> int:
        """Own a session that is handed over; returns its epoch. What the catalog does is not cut off when the caller
        goes away. Raises what Owners.cut_over raises."""
        return await self._core.tasks.run(self._cut_over(ask), f"cut over {ask.name}")

    async def close(self) -> None:
        """Follow nothing any more; returns when no restore is under way."""
        for follower in list(self._core.follows.values()):
            await self._core.unfollow(follower, NodeDrainingError(self._core.options.node))
        while self._restores:
            await asyncio.wait(self._restores)

    async def _begin(self, ask: FollowAsk) -> Follower:
        """The follower of the session: the one there is, which goes on, or a new one."""
        async with self._owners.kept_out(ask.name) as live:
            core = self._core
            if core.draining or core.cordoned:
                raise NodeDrainingError(core.options.node)
            if live is not None and live.epoch >= ask.epoch:
                raise StaleEpochError(str(ask.name), ask.epoch, live.epoch)
            row = await core.catalog.get_session(ask.name)
            if row.epoch != ask.epoch or row.owner != ask.owner:
                raise StaleEpochError(str(ask.name), ask.epoch, row.epoch)
            if live is not None:
                await self._owners.lost(live)  # nobody had told this node
            follower = core.follows.get(ask.name)
            if follower is not None:
                follower.ask = ask
                return follower
            make_way = self._residents.make_way
            await self._loop.at_tick(lambda: make_way(ask.name, row.head, eager=bool(ask.migration)))
            if core.draining or core.cordoned:  # since the first look: nobody would end what begins now
                raise NodeDrainingError(core.options.node)
            follower = Follower(row, ask, core.ticket(), self._owners.own)
            core.follows[ask.name] = follower
            self._restore_soon(follower)
            self._let_linger(follower)  # should who asks be gone already
            return follower

    def _restore_soon(self, follower: Follower) -> None:
        task = self._core.tasks.spawn(self._restore(follower, follower.live), f"restore {follower.name} to follow it")
        self._restores.add(task)
        task.add_done_callback(self._restores.discard)

    async def _restore(self, follower: Follower, live: LiveSession) -> None:
        """Bring its state onto the engine. Never cut off: a sequence would be left that nobody has."""
        live.place = Place.RESTORING
        try:
            await self._restorer.restore(live, follows=True)
            generation = await self._core.catalog.open_generation(live.name)
            if generation is not None:
                await adopt(self._core, live, generation)
        except Exception as error:  # noqa: BLE001 - who asked for it gets it
            await self._core.free_sequence(live)
            await self._core.unfollow(follower, error)
        else:
            if live.gone is not None:
                await self._core.free_sequence(live)
                return
            follower.restored()
            follower.tailing = self._core.tasks.spawn(self._tail(follower), f"tail {live.name}")
            self._core.wake()
        finally:
            self._residents.arrived(live.name)
            if live.place is Place.RESTORING:
                live.place = Place.PARKED

    async def _tail(self, follower: Follower) -> None:
        """Take what the owner tells of the log; what it does not tell is read from the store."""
        while follower.live.gone is None:
            try:
                if not await self._look(follower):
                    self._core.tasks.spawn(self._restart(follower), f"restart {follower.name}")
                    return
                await self._read_owner(follower)
            except NotFoundError as error:
                await self._core.unfollow(follower, error)
            except (AbortedError, OutOfRangeError) as error:
                log.info("%s is looked at anew: %s", follower.name, error)
            except ForkpointError as error:
                log.debug("%s: its owner tells no tokens: %s", follower.name, error)
            await asyncio.sleep(TAIL_AGAIN_SECONDS)

    async def _read_owner(self, follower: Follower) -> None:
        tail = self._peers.tail(follower.ask.owner_address, follower.name, follower.live.head)
        async with aclosing(tail) as parts:
            async for part in parts:
                follower.take(part)
                self._core.wake()
                if follower.unsure:
                    await self._learn_generation(follower)

    async def _look(self, follower: Follower) -> bool:
        """Take what the store knows and the follower does not. False: the log is another one, all begins anew."""
        live, known = follower.live, follower.live.head
        row = await self._core.catalog.get_session(follower.name)
        if row.state is SessionState.DELETED:
            raise NotFoundError(str(row.name), "is deleted")
        if row.branch != live.row.branch or row.head < known:
            return False
        if row.head > live.head:
            missing = await read_all(self._core.catalog, row.name, live.head, row.head)
            follower.take(missing)
            self._core.wake()
        live.note(row)
        await self._learn_generation(follower)
        # Another log of the same branch may be as long: the store lost an end, and the owner went on otherwise.
        return live.head != row.head or live.row.head_hash == row.head_hash

    async def _learn_generation(self, follower: Follower) -> None:
        """Know the generation that runs before the session is owned: then it goes on at once."""
        live, follower.unsure = follower.live, False
        opened = await self._core.catalog.open_generation(live.name)
        if opened is None:
            live.generation = None
        elif live.generation is None or live.generation.row.generation != opened.generation:
            await adopt(self._core, live, opened)

    async def _restart(self, follower: Follower) -> None:
        """The session was turned back, or the store lost the end of its log: restore what it is now."""
        async with follower.turn:
            try:
                row = await self._core.catalog.get_session(follower.name)
                if follower.owned or follower.live.gone is not None:
                    return
                old = follower.begin(row)
                await self._core.free_sequence(old)
            except ForkpointError as error:
                await self._core.unfollow(follower, error)
            else:
                self._restore_soon(follower)

    def _let_linger(self, follower: Follower) -> None:
        if follower.live.gone is None and not follower.owned:
            self._spawn(self._linger(follower), f"linger {follower.name}")

    async def _linger(self, follower: Follower) -> None:
        """Nobody asks for it any more: its owner may be dead, and this node the one that takes the session."""
        options = self._core.options
        patience = options.lease_ttl_seconds + options.lease_skew_seconds + options.recovery_poll_seconds
        while True:
            await asyncio.sleep(2 * patience)
            if follower.asking or follower.owned:
                return
            if not follower.turn.locked():
                await self._core.unfollow(follower, UnavailableError(f"{follower.name}: nobody asks for it any more"))
                return

    def _spawn(self, work: Coroutine[Any, Any, object], name: str) -> None:
        """Run it in the background, unless the node is ending anyway."""
        with contextlib.suppress(NodeDrainingError):
            self._core.tasks.spawn(work, name)

    async def _cut_over(self, ask: CutOverAsk) -> int:
        try:
            return (await self._owners.cut_over(ask)).epoch
        except (StoreUnavailableError, StoreFullError):
            self._spawn(self._find_out(ask), f"find out who owns {ask.name}")
            raise

    async def _find_out(self, ask: CutOverAsk) -> None:
        """Nobody knows what became of the cut-over: ask until it is known, and see to the session if it is ours."""
        delay = self._core.options.retry_first_seconds
        while not self._core.draining and ask.name not in self._core.lives:
            await asyncio.sleep(delay)
            delay = min(2 * delay, self._core.options.retry_most_seconds)
            try:
                row = await self._core.catalog.get_session(ask.name)
                if self._is_ours(row, ask):
                    await self._owners.own(ask.name)
            except ForkpointError as error:
                log.info("it is not known yet who owns %s: %s", ask.name, error)
            else:
                if row.epoch != ask.epoch or row.migration != ask.migration:
                    return

    def _is_ours(self, row: SessionRow, ask: CutOverAsk) -> bool:
        return row.owner == self._core.incarnation and row.epoch > ask.epoch and row.state is SessionState.ACTIVE
