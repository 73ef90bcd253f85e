"""Which node owns a session, and how this one comes to own it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forkpoint.errors import (
    NodeDrainingError,
    NotFoundError,
    SessionPausedError,
    SessionQuarantinedError,
    SessionRelocatingError,
    StaleEpochError,
)
from forkpoint.ids import SessionName
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.generation import RunningGeneration
from forkpoint.server.session.live import LiveSession
from forkpoint.server.session.logread import read_slices
from forkpoint.server.session.membership import Membership
from forkpoint.statestore.records import GenerationRow, NodeRow, RequestKey, SessionRow, SessionState

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

    def __init__(self, core: NodeCore, members: Membership) -> None:
        self._core = core
        self._members = members
        self._locks = NameLocks()

    async def own(self, name: SessionName, resume: bool = False, request: RequestKey | None = None) -> LiveSession:
        """The session, owned by this node. `request`: whose effect it is that the node takes it, if it has to.

        Raises NotFoundError, SessionQuarantinedError, SessionPausedError (unless `resume`), SessionRelocatingError
        when a live node has it, NodeDrainingError.
        """
        live = self._core.lives.get(name)
        if live is not None:
            return live
        async with self._locks.hold(name):
            live = self._core.lives.get(name)
            if live is not None:
                return live
            row = await self._acquire(name, resume, request)
            generation = await self._core.catalog.open_generation(name)
            live = LiveSession(row)
            live.numerics_ids = row.numerics_ids
            live.last_used = self._core.ticket()
            if generation is not None:
                await self.adopt(live, generation)
            if self._core.draining:
                await self._core.catalog.release(name, live.epoch, SessionState.ACTIVE)
                raise NodeDrainingError(self._core.options.node)
            self._core.lives[name] = live
            self._core.wake()
            return live

    @asynccontextmanager
    async def kept_out(self, name: SessionName) -> AsyncIterator[LiveSession | None]:
        """The live session, if there is one; if not, the node takes it not before the block's end."""
        async with self._locks.hold(name):
            yield self._core.lives.get(name)

    async def adopt(self, live: LiveSession, row: GenerationRow) -> RunningGeneration:
        """Let the live session run an open generation, with what the log holds of it."""
        generation = RunningGeneration(row, self._core.codec)
        async for part in read_slices(self._core.catalog, live.name, row.start, live.head):
            generation.feed(part.token_ids)
        live.generation = generation
        return generation

    async def relocating(self, name: SessionName) -> SessionRelocatingError:
        """The error that says who has the session now."""
        row = await self._core.catalog.get_session(name)
        node = await self._members.holder(row.owner)
        if node is None:
            return SessionRelocatingError(str(name), row.owner or "nobody", "")
        return SessionRelocatingError(str(name), node.node, node.address)

    async def foreign_owner(self, row: SessionRow) -> NodeRow | None:
        """The live node that has the session, None when this one may take it."""
        if row.owner in ("", self._core.incarnation):
            return None
        return await self._members.holder(row.owner)

    async def _acquire(self, name: SessionName, resume: bool, request: RequestKey | None) -> SessionRow:
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
            try:
                return await self._core.catalog.acquire(name, self._core.incarnation, row.epoch, request)
            except StaleEpochError:
                continue
        raise await self.relocating(name)
