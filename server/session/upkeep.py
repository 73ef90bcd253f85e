"""What a node does by itself: deletes what has expired, lets go of what is not used."""

import asyncio
import logging

from forkpoint.errors import ForkpointError, NotFoundError, SessionRelocatingError, UnavailableError
from forkpoint.ids import SessionName
from forkpoint.limits import PAGE_SIZE_MAX
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.lifecycle import Lifecycle
from forkpoint.server.session.live import LiveSession
from forkpoint.server.session.tasks import survive
from forkpoint.statestore.records import SessionState

log = logging.getLogger(__name__)


class Upkeep:
    """Slow background rounds."""

    def __init__(self, core: NodeCore, lifecycle: Lifecycle) -> None:
        self._core = core
        self._lifecycle = lifecycle

    async def run(self) -> None:
        """Sweep, for ever."""
        while not self._core.draining:
            await asyncio.sleep(self._core.options.sweep_seconds)
            await survive(self.delete_expired(), "deleting expired sessions")
            await survive(self.let_go(), "letting go of unused sessions")

    async def delete_expired(self) -> None:
        """One round over all sessions."""
        now = self._core.clock.wall_us()
        after: SessionName | None = None
        while True:
            rows = await self._core.catalog.list_sessions(None, after, PAGE_SIZE_MAX)
            for row in rows:
                if row.expire_us is not None and row.expire_us <= now:
                    await self._expire(row.name)
            if len(rows) < PAGE_SIZE_MAX:
                return
            after = rows[-1].name

    async def let_go(self) -> None:
        """Give up sessions that lost their slot and were not used since the last round: what a node keeps must not grow
        with all that it ever served."""
        lives = self._core.lives
        unused = []
        for live in list(lives.values()):
            if live.is_dormant and live.last_seen_used == live.last_used:
                del lives[live.name]
                live.leave(UnavailableError(f"{live.name} was not used and was let go"))
                unused.append(live)
            live.last_seen_used = live.last_used
        await asyncio.gather(*(self._release(live) for live in unused))

    async def _release(self, live: LiveSession) -> None:
        try:
            await self._core.catalog.release(live.name, live.epoch, SessionState.ACTIVE)
        except ForkpointError as error:
            # It may be taken without that: by this node at once, by others when this one is gone.
            log.info("%s was not released: %s", live.name, error)

    async def _expire(self, name: SessionName) -> None:
        try:
            await self._lifecycle.delete(name, None)
            log.info("%s expired", name)
        except (SessionRelocatingError, NotFoundError):
            return  # its owner does it, or another node did it
        except ForkpointError as error:
            log.warning("%s could not be deleted when it expired: %s", name, error)
