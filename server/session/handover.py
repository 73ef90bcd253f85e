"""The moment of a move: a session stands still, and its target becomes its owner, or does not."""

import asyncio
import logging
from typing import Final

from forkpoint.errors import (
    ForkpointError,
    NotFoundError,
    SessionRelocatingError,
    StaleEpochError,
    StoreFullError,
    StoreUnavailableError,
)
from forkpoint.ids import new_id
from forkpoint.limits import CUT_OVER_SECONDS
from forkpoint.move_errors import MigrationUnderwayError
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.live import LiveSession, Place
from forkpoint.server.session.loop import StepLoop
from forkpoint.server.session.owner import Owners
from forkpoint.server.session.ports import CutOverAsk, Peers
from forkpoint.statestore.records import NodeRow

log = logging.getLogger(__name__)

WRITER_SECONDS: Final = 0.1
"""So long a hand-over waits for an append that is under way; then it is tried again later."""


class HandOver:
    """Gives a session's word, cuts over, and takes the word back when that fails.

    The word is the migration's id in the session's row: the target owns the session only by a transaction that finds
    it there. So whatever becomes of a call or its answer, whoever takes the word back under the session's epoch knows
    whether the session is still here.
    """

    def __init__(self, core: NodeCore, loop: StepLoop, owners: Owners, peers: Peers) -> None:
        self._core = core
        self._loop = loop
        self._owners = owners
        self._peers = peers

    async def give_word(self, live: LiveSession, node: NodeRow) -> None:
        """Begin a migration under a new id, `live.moving`. What another one left, which was given up before the store
        answered, is taken back: only one at a time is under way here. Raises what begin_migration raises."""
        live.moving = new_id("m")
        begin = self._core.catalog.begin_migration
        try:
            row = await begin(live.name, live.epoch, live.moving, node.incarnation)
        except MigrationUnderwayError as left:
            await self._core.catalog.end_migration(live.name, live.epoch, left.migration)
            row = await begin(live.name, live.epoch, live.moving, node.incarnation)
        live.note(row)

    async def take_word_back(self, live: LiveSession, migration: str) -> bool:
        """No cut-over of the migration succeeds from now on. False: one has, or another node took the session. Asks
        until the store answers. Raises NotFoundError for a session that was deleted."""
        delay = self._core.options.retry_first_seconds
        while live.gone is None:
            try:
                live.note(await self._core.catalog.end_migration(live.name, live.epoch, migration))
            except StaleEpochError:
                return False
            except (StoreUnavailableError, StoreFullError) as error:
                log.warning("it is not known yet whether %s is here still: %s", live.name, error)
                await asyncio.sleep(delay)
                delay = min(2 * delay, self._core.options.retry_most_seconds)
            else:
                return True
        return False

    async def withdraw(self, live: LiveSession) -> None:
        """A move is given up before its end: take the word back, in the background if the store does not answer."""
        migration, live.moving = live.moving, ""
        if not migration or live.gone is not None:
            return
        try:
            live.note(await self._core.catalog.end_migration(live.name, live.epoch, migration))
        except StaleEpochError:
            await self._owners.lost(live)
        except (StoreUnavailableError, StoreFullError):
            self._core.tasks.spawn(self._withdraw_late(live, migration), f"withdraw {migration}")
        except ForkpointError as error:
            log.info("%s: its migration was not withdrawn: %s", live.name, error)

    async def _withdraw_late(self, live: LiveSession, migration: str) -> None:
        try:
            here = await self.take_word_back(live, migration)
        except NotFoundError:
            return  # a session that was deleted goes nowhere
        if not here and live.gone is None:
            await self._owners.lost(live)

    async def try_once(self, live: LiveSession, node: NodeRow) -> float | None:
        """Stop the session at a step's border and let `node`, which follows it, own it. Returns the seconds for which
        it stood still; then it is dropped here, and who waited is sent there. None: this is no moment for it.

        Raises what the target raised when the session stays here; SessionRelocatingError when another node has it.
        """
        live.closing, held = True, False
        try:
            held = await self._stands_still(live)
            if not held:
                return None
            began = self._core.clock.monotonic()
            ask = CutOverAsk(live.name, live.epoch, live.head, live.row.head_hash, live.moving)
            try:
                await self._peers.cut_over(node, ask, CUT_OVER_SECONDS)
            except Exception as error:
                if await self.take_word_back(live, live.moving):
                    raise
                log.info("%s: who has it is asked of the store: %s", live.name, error)
                await self._left(live, node)
            else:
                await self._core.drop(live, SessionRelocatingError(str(live.name), node.node, node.address))
            return self._core.clock.monotonic() - began
        finally:
            live.closing = False
            live.held = live.held and not held
            live.changed.fire()
            self._core.wake()

    async def _left(self, live: LiveSession, node: NodeRow) -> None:
        """It is not here any more. Raises SessionRelocatingError when it is not at `node` either."""
        if live.gone is None:
            await self._owners.lost(live)
        error = live.gone
        if not isinstance(error, SessionRelocatingError) or error.owner != node.node:
            assert error is not None
            raise error

    async def _stands_still(self, live: LiveSession) -> bool:
        """Whether nothing of the session is under way, and nothing begins until it is let go again."""
        try:
            async with asyncio.timeout(WRITER_SECONDS):
                while live.writer and live.gone is None:
                    await live.changed.wait()
        except TimeoutError:
            return False
        return await self._loop.at_tick(lambda: self._hold(live))

    async def _hold(self, live: LiveSession) -> bool:
        """Between steps: what was committed is known here, and nothing is being committed. A generation that is at its
        end ends here first, since whoever asked for the end did so here."""
        if live.gone is not None or live.writer or live.held or live.suspect or live.place is Place.RESTORING:
            return False
        generation = live.generation
        if generation is not None and generation.due(self._core.engine.facts.context_limit) is not None:
            return False
        live.held = True
        return True
