"""Pause and resume: a session's way off a node and onto one."""

from typing import Final

from forkpoint.errors import SessionPausedError
from forkpoint.ids import SessionName
from forkpoint.server.session.api import ResumeResult, SessionView
from forkpoint.server.session.checkpoint import Checkpointer
from forkpoint.server.session.claims import Claims
from forkpoint.server.session.evict import Residents
from forkpoint.server.session.live import LiveSession, Place
from forkpoint.server.session.loop import StepLoop
from forkpoint.server.session.views import Views
from forkpoint.server.session.writers import REPLAY_EPOCH
from forkpoint.statestore.records import FinishReason, RequestKey, SessionRow, SessionState

PAUSED_SINCE: Final = "paused since"
"""Source of a resume that was answered before: the session was paused again by then."""


class Pauser:
    """Pause ends the generation, checkpoints, frees the slot and gives up ownership; resume is a restore."""

    def __init__(
        self, claims: Claims, loop: StepLoop, residents: Residents, checkpointer: Checkpointer, views: Views
    ) -> None:
        self._claims = claims
        self._core = claims.core
        self._loop = loop
        self._residents = residents
        self._checkpointer = checkpointer
        self._views = views

    async def pause(self, name: SessionName, request: RequestKey | None) -> SessionView:
        """A paused session stays as it is."""
        async with self._claims.request(request) as stored:
            if stored:
                await self._core.catalog.release(name, REPLAY_EPOCH, SessionState.PAUSED, request=request)
            row = await self._core.catalog.get_session(name)
            if not stored and row.state is not SessionState.PAUSED:
                row = await self._claims.owned(name, lambda live: self._pause(live, request))
            return await self._views.one(row)

    async def _pause(self, live: LiveSession, request: RequestKey | None) -> SessionRow:
        async with self._claims.seized(live, "pause", FinishReason.PAUSED):
            live.held = True
            try:
                await self._claims.settled(live)
                if live.place is Place.RESIDENT:
                    await self._loop.at_tick(lambda: self._residents.evict(live))
                await self._checkpointer.settle(live)
                row = await self._core.catalog.release(
                    live.name, live.epoch, SessionState.PAUSED, "paused by a caller", request
                )
            finally:
                live.held = False
            live.row = row
            await self._core.drop(live, SessionPausedError(str(live.name)))
            return row

    async def resume(self, name: SessionName, request: RequestKey | None) -> ResumeResult:
        """Returns when the state is at the head. On an active session: the same, without a change of state. Sent again
        after another pause, it leaves the session paused."""
        async with self._claims.request(request) as stored:
            if stored:
                await self._core.catalog.acquire(name, self._core.incarnation, REPLAY_EPOCH, request)
                row = await self._core.catalog.get_session(name)
                if row.state is SessionState.PAUSED:
                    return ResumeResult(await self._views.one(row), 0, 0, 0, PAUSED_SINCE, row.exact)
            else:
                await self._claims.owners.own(name, resume=True, request=request)
            return await self._claims.owned(name, self._resume)

    async def _resume(self, live: LiveSession) -> ResumeResult:
        before = live.restored
        live.will_sample = True
        await self._claims.at_head(live, live.head)
        view = await self._views.one(await self._claims.ours_still(live))
        done = live.restored
        if done is None or done is before:
            return ResumeResult(view, 0, 0, 0, "resident", live.exact)
        return ResumeResult(view, done.position, done.replayed_tokens, done.bytes, done.source, done.exact)
