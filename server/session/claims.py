"""Claims on a session: one writer operation at a time, and how a running generation is brought to its end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from forkpoint.errors import (
    LogTailMissingError,
    NodeDrainingError,
    PositionBeyondHeadError,
    PositionConflictError,
    SessionBusyError,
    StaleEpochError,
    StoreFullError,
    StoreUnavailableError,
    UnavailableError,
)
from forkpoint.ids import SessionName
from forkpoint.limits import MOVE_WAIT_SECONDS
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.live import LiveSession, Place
from forkpoint.server.session.owner import NameLocks, Owners
from forkpoint.statestore.records import FinishReason, RequestKey, SessionRow

T = TypeVar("T")


class Claims:
    """What every operation begins with: the request id, the ownership, the claim."""

    def __init__(self, core: NodeCore, owners: Owners) -> None:
        self.core = core
        self.owners = owners
        self._requests = NameLocks()

    @asynccontextmanager
    async def request(self, key: RequestKey | None) -> AsyncIterator[bool]:
        """Whether the call's result is stored already. Equal ids wait for one another, so that one executes.

        Raises RequestIdReusedError; NodeDrainingError for a first execution on a node that is going away.
        """
        if key is None:
            self.refuse_when_draining()
            yield False
            return
        async with self._requests.hold((key.caller, key.workflow, key.request_id)):
            stored = await self.core.catalog.find_request(key) is not None
            if not stored:
                self.refuse_when_draining()
            yield stored

    def refuse_when_draining(self) -> None:
        """Raises NodeDrainingError."""
        if self.core.draining:
            raise NodeDrainingError(self.core.options.node)

    async def owned(self, name: SessionName, act: Callable[[LiveSession], Awaitable[T]]) -> T:
        """Do `act` on a session of this node. When another node took it meanwhile, try to take it back once."""
        for _ in range(2):
            self.refuse_when_draining()
            live = await self.owners.own(name)
            self.core.refuse_when_stalled()
            try:
                await self.confirmed(live)
                return await act(live)
            except StaleEpochError:
                await self.owners.lost(live)
            except PositionBeyondHeadError as error:
                if error.head >= live.head:
                    raise
                self.doubt(live)  # the store lost the end of the log that this node knows
        raise await self.owners.relocating(name)

    @asynccontextmanager
    async def writing(self, live: LiveSession, operation: str) -> AsyncIterator[None]:
        """The claim of an append or generate: busy is an error. Waits while the session is about to leave."""
        await self._stays(live)
        try:
            live.begin_writer(operation)
        except SessionBusyError as busy:
            await self._ended_unheard(live, busy)
            live.begin_writer(operation)
        try:
            yield
        except (StoreUnavailableError, StoreFullError, SessionBusyError):
            # Busy in the store alone: it has a generation that this node does not know, or knew to its end.
            self.doubt(live)
            raise
        except (LogTailMissingError, PositionConflictError) as error:
            if error.head != live.head:
                self.doubt(live)
            raise
        finally:
            live.end_writer()

    @asynccontextmanager
    async def seized(self, live: LiveSession, operation: str, ending: FinishReason) -> AsyncIterator[None]:
        """The claim of an operation that goes before others: waits for the writer of now, ends the generation."""
        await self._stays(live)
        while live.writer:
            await self._changed(live)
            await self._stays(live)
        if live.gone is not None:
            raise live.gone
        live.writer = operation
        try:
            await self.end_generation(live, ending)
            yield
        except (StoreUnavailableError, StoreFullError, SessionBusyError):
            self.doubt(live)
            raise
        finally:
            live.end_writer()
            self.core.wake()

    async def _ended_unheard(self, live: LiveSession, busy: SessionBusyError) -> None:
        """Raises `busy`, unless it is busy with nothing but a generation that has ended in the store: the commit that
        ended it has no answer yet, and a reader that came again was shown the end."""
        if live.writer or await self.core.catalog.open_generation(live.name) is not None:
            raise busy
        self.doubt(live)
        await self.confirmed(live)

    async def _stays(self, live: LiveSession) -> None:
        """Until the session does not leave after all. Raises why it left, and UnavailableError when that takes long:
        the caller may come again, and finds it where it is then."""
        try:
            async with asyncio.timeout(MOVE_WAIT_SECONDS):
                while live.closing:
                    await self._changed(live)
        except TimeoutError:
            raise UnavailableError(f"{live.name} is on its way to another node; call again") from None

    async def end_generation(self, live: LiveSession, reason: FinishReason) -> None:
        """Let the running generation end at the next token border; returns when that is durable."""
        running = live.generation
        if running is None:
            return
        running.ending = running.ending or reason
        self.core.wake()
        number = live.trouble[0]
        while running.finish is None:
            await self._changed(live)
            later, error = live.trouble
            if later != number and isinstance(error, (StoreUnavailableError, StoreFullError)):
                running.ending = None
                raise error

    async def settled(self, live: LiveSession) -> None:
        """Until no activation is running."""
        while live.place is Place.RESTORING:
            await self._changed(live)

    async def at_head(self, live: LiveSession, position: int) -> None:
        """Bring the state onto the engine and wait until it has consumed `position` tokens.

        Raises the session's next failure.
        """
        number = live.trouble[0]
        live.wanted += 1
        self.core.wake()
        try:
            while live.place is not Place.RESIDENT or live.consumed < position:
                await self._changed(live)
                later, error = live.trouble
                if later != number and error is not None:
                    raise error
        finally:
            live.wanted -= 1
            self.core.wake()

    async def confirmed(self, live: LiveSession) -> None:
        """Until the loop has compared the session with the store, when a write's answer was lost."""
        number = live.trouble[0]
        while live.suspect:
            self.core.wake()
            await self._changed(live)
            later, error = live.trouble
            if later != number and error is not None:
                raise error

    async def ours_still(self, live: LiveSession) -> SessionRow:
        """Ask the store before an answer is given from this node's memory alone: it may have lost the session without
        having heard of it. Returns the row. Raises StaleEpochError, which `owned` sees to."""
        row = await self.core.catalog.get_session(live.name)
        if row.epoch != live.epoch or row.owner != self.core.incarnation:
            raise StaleEpochError(str(live.name), live.epoch, row.epoch)
        return row

    def doubt(self, live: LiveSession) -> None:
        """The store may hold something else than this node knows: let the loop compare."""
        live.suspect = True
        self.core.wake()

    async def _changed(self, live: LiveSession) -> None:
        """Until something changed; raises why the session left."""
        if live.gone is not None:
            raise live.gone
        await live.changed.wait()
        if live.gone is not None:
            raise live.gone
