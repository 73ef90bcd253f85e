"""What a node does by itself: takes over generations that a dead node left, deletes what has expired."""

import asyncio
import logging

from forkpoint.errors import ForkpointError
from forkpoint.ids import SessionName
from forkpoint.limits import PAGE_SIZE_MAX
from forkpoint.server.session.claims import Claims
from forkpoint.server.session.lease import DeathWatch, remove_lock_file
from forkpoint.server.session.lifecycle import Lifecycle
from forkpoint.statestore.records import NodeRow, SessionRow, SessionState

log = logging.getLogger(__name__)


class Recovery:
    """Two slow background rounds. Sessions without a generation wait until somebody touches them."""

    def __init__(self, claims: Claims, watch: DeathWatch, lifecycle: Lifecycle) -> None:
        self._claims = claims
        self._core = claims.core
        self._watch = watch
        self._lifecycle = lifecycle
        self._nodes: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Look for sessions to take over, for ever."""
        while not self._core.draining:
            try:
                await self.look()
            except ForkpointError as error:
                log.warning("looking for sessions to recover failed: %s", error)
            await asyncio.sleep(self._core.options.recovery_poll_seconds)

    async def sweep(self) -> None:
        """Delete expired sessions, for ever."""
        while not self._core.draining:
            await asyncio.sleep(self._core.options.sweep_seconds)
            try:
                await self.delete_expired()
            except ForkpointError as error:
                log.warning("deleting expired sessions failed: %s", error)

    async def look(self) -> None:
        """One round: dead nodes' generations, and generations that nobody owns."""
        nodes = await self._core.catalog.list_nodes()
        for node in nodes:
            if node.incarnation != self._core.incarnation and self._watch.is_dead(node):
                await self._bury(node)
        incarnations = frozenset(node.incarnation for node in nodes)
        if incarnations != self._nodes:
            # A node came or went (this one, at its start): one that drained leaves open generations unowned.
            await self._take_unowned()
            self._nodes = incarnations

    async def _bury(self, node: NodeRow) -> None:
        """Take a dead node's generations. When it owns nothing more, its row and its lock file go."""
        rows = await self._core.catalog.list_owned(node.incarnation)
        for row in rows:
            await self._recover(row)
        left = await self._core.catalog.list_owned(node.incarnation)
        if not left:
            await self._core.catalog.remove_node(node.incarnation)
            self._watch.forget(node.incarnation)
            remove_lock_file(node)

    async def _take_unowned(self) -> None:
        after: SessionName | None = None
        while True:
            rows = await self._core.catalog.list_sessions(None, after, PAGE_SIZE_MAX)
            for row in rows:
                if row.owner == "":
                    await self._recover(row)
            if len(rows) < PAGE_SIZE_MAX:
                return
            after = rows[-1].name

    async def _recover(self, row: SessionRow) -> None:
        """Own the session if it has an open generation: the loop does the rest."""
        if row.state is not SessionState.ACTIVE or row.name in self._core.lives:
            return
        try:
            if await self._core.catalog.open_generation(row.name) is None:
                return
            await self._claims.owners.own(row.name)
            self._core.counters.recovered_generations += 1
            log.info("%s: its generation goes on here", row.name)
        except ForkpointError as error:
            log.warning("%s could not be recovered: %s", row.name, error)

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

    async def _expire(self, name: SessionName) -> None:
        try:
            await self._lifecycle.delete(name, None)
            log.info("%s expired", name)
        except ForkpointError as error:
            log.warning("%s could not be deleted when it expired: %s", name, error)
