"""How a node leaves: in order, within its time, or at once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from forkpoint.errors import ForkpointError, NodeDrainingError
from forkpoint.server.session.checkpoint import Checkpointer
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.drain import Drainer
from forkpoint.server.session.evict import Residents
from forkpoint.server.session.fork import ForkImages
from forkpoint.server.session.live import LiveSession, Place
from forkpoint.server.session.loop import StepLoop
from forkpoint.server.session.presence import Presence
from forkpoint.statestore.records import SessionState

log = logging.getLogger(__name__)

MOVE_SHARE: Final = 0.5
"""Part of the shutdown time in which sessions move to other nodes, which keeps their state and their streams."""
CHECKPOINT_SHARE: Final = 0.7
"""Part of the time then left that checkpoints may take; the rest is for releasing."""


class Shutdown:
    """Ends the node's work. Both ways may be called once."""

    def __init__(
        self,
        core: NodeCore,
        loop: StepLoop,
        residents: Residents,
        checkpointer: Checkpointer,
        images: ForkImages,
        presence: Presence,
        stop_collecting: Callable[[], Awaitable[None]],
        stop_following: Callable[[], Awaitable[None]],
    ) -> None:
        self._core = core
        self._loop = loop
        self._residents = residents
        self._checkpointer = checkpointer
        self._images = images
        self._presence = presence
        self._stop_collecting = stop_collecting
        self._stop_following = stop_following
        self._began: float | None = None
        """When the node began to leave, on its clock."""

    async def move_away(self, drainer: Drainer) -> None:
        """Before it leaves: while it goes on answering, what runs here goes to other nodes, if there are any. The time
        that this takes is taken from that of `leave`."""
        self._began = self._core.clock.monotonic()
        if self._core.catalog.broken is None:
            await drainer.move_away(self._core.options.shutdown_seconds * MOVE_SHARE)

    async def leave(self) -> None:
        """Refuse new work, end streams, finish the step, checkpoint, release, and take the node's row away.

        Generations stay open: the node that takes the session goes on with them.
        """
        core = self._core
        if core.draining:
            return
        core.draining = core.leaving = True
        left = core.options.shutdown_seconds
        if self._began is not None:
            left = max(left * (1 - MOVE_SHARE), left - (core.clock.monotonic() - self._began))
        try:
            async with asyncio.timeout(left * CHECKPOINT_SHARE):
                await self._loop.halt()
                self._end_streams()
                await self._stop_following()
                await self._images.clear()
                await self._checkpoint(list(core.lives.values()))
                await self._residents.settled()
        except TimeoutError:
            log.warning("not every session was checkpointed in time: the log has what is missing")
            self._end_streams()
        try:
            async with asyncio.timeout(left * (1 - CHECKPOINT_SHARE)):
                await self._stop_collecting()
                # All at once: the store commits many together.
                await asyncio.gather(*(self._release(live) for live in list(core.lives.values())))
        except TimeoutError:
            log.warning("not every session was released in time: another node finds this one dead")
        core.lives.clear()
        await self._presence.end()
        await core.tasks.close()
        core.engine.close()

    def _end_streams(self) -> None:
        for live in self._core.lives.values():
            live.leave(NodeDrainingError(self._core.options.node))

    async def vanish(self) -> None:
        """Stop without a word to the store."""
        self._core.draining = self._core.leaving = True
        await self._presence.vanish()
        await self._core.tasks.close()
        self._end_streams()
        self._core.lives.clear()
        self._core.engine.close()

    async def _checkpoint(self, lives: list[LiveSession]) -> None:
        for live in lives:
            if live.place is Place.RESIDENT:
                await self._residents.evict(live)
        for live in lives:
            while live.place is Place.RESTORING:
                await live.changed.wait()
            await self._checkpointer.settle(live)

    async def _release(self, live: LiveSession) -> None:
        """Once no write is under way. A session that a pause released meanwhile stays paused, and where nobody knows
        what became of a write the node's end releases it as well: others may take what a node owned that is gone."""
        while live.writer:
            await live.changed.wait()
        if live.suspect or self._core.lives.get(live.name) is not live:
            return
        try:
            await self._core.catalog.release(live.name, live.epoch, SessionState.ACTIVE)
        except ForkpointError as error:
            log.warning("%s was not released: %s", live.name, error)
