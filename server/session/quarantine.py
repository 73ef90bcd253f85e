"""A session that fails by its own fault: its state is thrown away and restored, and in the end nobody touches it."""

import logging
from typing import Final

from forkpoint.errors import ForkpointError, SessionQuarantinedError, SessionRelocatingError, StaleEpochError
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.live import LiveSession
from forkpoint.statestore.records import SessionState

log = logging.getLogger(__name__)

STRIKES: Final = 3
"""Failures in a row after which a state is not trusted any more, and fruitless recoveries after which the session is
not."""


class Quarantine:
    """Counts what a session did to its steps and restores. Between two steps, or in the session's own activation."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core

    async def strike(self, live: LiveSession, error: ForkpointError) -> None:
        """A step failed because of this session alone. Its readers wait: a restore may cure it."""
        live.failed_at = max(live.failed_at, live.consumed)
        self._core.rest(live, error)
        if live.failures < STRIKES or live.held:
            return
        if live.recoveries >= STRIKES:
            await self._isolate(live, error)
            return
        log.warning("%s: its state is thrown away and restored", live.name)
        live.recoveries += 1
        live.failures = 0
        live.will_sample = True
        await self._core.discard(live)

    async def unreadable(self, live: LiveSession, error: ForkpointError) -> None:
        """The session's log is damaged, as a restore, a commit or a look found. Its readers are told at once."""
        if await self._is_another(live):
            return
        live.failed_at = max(live.failed_at, live.head)
        live.recoveries += 1
        if live.recoveries >= STRIKES and not live.held:
            await self._isolate(live, error)
        else:
            self._core.back_off(live, error)

    async def _is_another(self, live: LiveSession) -> bool:
        """A log that is not the one which was known here is no damaged one: the store lost its end, or all that this
        node wrote since it took the session. What is left goes on, here or where it was taken meanwhile."""
        try:
            row = await self._core.catalog.get_session(live.name)
        except ForkpointError:
            return False  # the next look finds it
        if row.epoch != live.epoch or row.owner != self._core.incarnation:
            await self._core.drop(live, SessionRelocatingError(str(live.name), "another node", ""))
        elif row.branch != live.row.branch:
            await self._core.drop_lost(live, "its branch")
        else:
            return await self._core.drop_if_ahead(live, row)
        return True

    async def _isolate(self, live: LiveSession, error: ForkpointError) -> None:
        """Give the session up for good. What the store holds of it stays."""
        cause = str(error)
        try:
            live.row = await self._core.catalog.release(live.name, live.epoch, SessionState.QUARANTINED, cause)
        except StaleEpochError:
            await self._core.drop(live, SessionRelocatingError(str(live.name), "another node", ""))
        except ForkpointError as failure:
            # The store can't be told now: rest, and try once more after the next strike.
            self._core.back_off(live, failure)
        else:
            self._core.counters.sessions_quarantined += 1
            log.error("%s is quarantined: %s", live.name, cause)
            await self._core.drop(live, SessionQuarantinedError(str(live.name), cause))
