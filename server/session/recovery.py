"""What a node does by itself: takes over generations that a dead node left, deletes what has expired, lets go of what
is not used."""

import asyncio
import logging
from collections.abc import Awaitable

from forkpoint.errors import ForkpointError, SessionRelocatingError, UnavailableError
from forkpoint.ids import SessionName
from forkpoint.limits import PAGE_SIZE_MAX
from forkpoint.server.session.claims import Claims
from forkpoint.server.session.lease import remove_lock_file
from forkpoint.server.session.lifecycle import Lifecycle
from forkpoint.server.session.live import LiveSession
from forkpoint.server.session.membership import Membership
from forkpoint.server.session.placement import NodeState
from forkpoint.statestore.records import SessionRow, SessionState

log = logging.getLogger(__name__)


class Recovery:
    """Slow background rounds. Sessions without a generation wait until somebody touches them."""

    def __init__(self, claims: Claims, members: Membership, lifecycle: Lifecycle) -> None:
        self._claims = claims
        self._core = claims.core
        self._members = members
        self._lifecycle = lifecycle
        self._nodes: frozenset[str] = frozenset()
        """Incarnations of the last round that recovered all there was."""

    async def run(self) -> None:
        """Look for sessions to take over, for ever."""
        while not self._core.draining:
            await _survive(self.look(), "looking for sessions to recover")
            await asyncio.sleep(self._core.options.recovery_poll_seconds)

    async def sweep(self) -> None:
        """Delete expired sessions, for ever."""
        while not self._core.draining:
            await asyncio.sleep(self._core.options.sweep_seconds)
            await _survive(self.delete_expired(), "deleting expired sessions")
            await _survive(self.let_go(), "letting go of unused sessions")

    async def look(self) -> None:
        """One round: generations whose owner is dead or gone, or that nobody owns.

        Sessions are looked at only when a node came, went or died, or when the last round left some behind. A dead
        node's row goes when its generations are taken; what else it owned is free to take without a row.
        """
        core = self._core
        nodes = {node.incarnation: node for node in await self._members.refresh()}
        dead = [node for node in nodes.values() if self._members.state(node) is NodeState.DEAD]
        if not dead and self._nodes == nodes.keys():
            return
        living = nodes.keys() - {node.incarnation for node in dead} - {core.incarnation}
        left = [row for row in await core.catalog.list_open_generations() if row.owner not in living]
        if not all([await self._recover(row) for row in left]):
            self._nodes = frozenset()
            return
        for node in dead:
            await core.catalog.remove_node(node.incarnation)
            remove_lock_file(node)
        self._nodes = frozenset(nodes)

    async def _recover(self, row: SessionRow) -> bool:
        """Own a session with an open generation: the loop does the rest. False: it must be tried again."""
        if self._core.draining or row.state is not SessionState.ACTIVE or row.name in self._core.lives:
            return True
        try:
            await self._claims.owners.own(row.name)
        except ForkpointError as error:
            log.warning("%s could not be recovered: %s", row.name, error)
            return False
        self._core.counters.recovered_generations += 1
        log.info("%s: its generation goes on here", row.name)
        return True

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
        except SessionRelocatingError:
            return  # its owner does it
        except ForkpointError as error:
            log.warning("%s could not be deleted when it expired: %s", name, error)


async def _survive(round_: Awaitable[None], what: str) -> None:
    """Whatever goes wrong in a round, the next one comes."""
    try:
        await round_
    except ForkpointError as error:
        log.warning("%s failed: %s", what, error)
    except Exception:
        log.exception("%s failed", what)
