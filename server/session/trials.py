"""Sessions whose owners were lost one after the other: one of them at a time, until it shows which one is to blame."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from forkpoint.errors import NodeDrainingError, SessionQuarantinedError
from forkpoint.limits import TAKEOVERS_ALONE_MAX, TAKEOVERS_MAX
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.live import LiveSession
from forkpoint.statestore.records import SessionRow, SessionState

log = logging.getLogger(__name__)

TRIAL_SECONDS: Final = 30.0
"""A trial that shows nothing for so long is over: the others are not to wait for ever."""
LOOK_SECONDS: Final = 0.1
"""How long a session that nobody tells anything of must want nothing, for its trial to be over."""


class Turn:
    """One taking of a session. It is claimed once the session is found to be suspect."""

    def __init__(self, line: asyncio.Lock) -> None:
        self._line = line
        self.claimed = False
        self.live: LiveSession | None = None
        """What was taken."""

    async def claim(self) -> None:
        """Wait until no other suspect is on trial here."""
        await self._line.acquire()
        self.claimed = True


class Trials:
    """A session may end the process that runs it, and take its neighbours' reputation along: all that the process owned
    lost their owner as well. So a session that an owner lost without a token of progress is taken by itself: the next
    one waits until this one's log has grown, it has failed in an ordinary way, or wants nothing. If this process dies
    meanwhile, only that one has lost one more owner without progress.
    """

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        self._line = asyncio.Lock()

    def is_suspect(self, row: SessionRow) -> bool:
        """Whether its last owner but one, at least, was lost with nothing to show for it."""
        lost = row.owner not in ("", self._core.incarnation)
        return lost and row.takeovers > 0 and row.head == row.takeover_head

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """What takes a session claims this if it must; its trial goes on behind the block's end."""
        turn = Turn(self._line)
        try:
            yield turn
        finally:
            if turn.claimed and turn.live is None:
                self._line.release()
        if turn.claimed and turn.live is not None:
            self._begin(turn.live)

    async def acquit(self, row: SessionRow, elsewhere: bool) -> SessionRow:
        """The row of a session that was just taken, if it may run at all. One that lost too many owners is given up.
        `elsewhere`: the last of them was another node, not an earlier process of this one.

        Raises SessionQuarantinedError; StaleEpochError when another node has it meanwhile.
        """
        if row.takeovers < (TAKEOVERS_MAX if elsewhere else TAKEOVERS_ALONE_MAX):
            return row
        cause = f"{row.takeovers} owners in a row were lost that had it, and none wrote a token behind {row.head}"
        await self._core.catalog.release(row.name, row.epoch, SessionState.QUARANTINED, cause)
        self._core.counters.sessions_quarantined += 1
        log.error("%s is quarantined: %s", row.name, cause)
        raise SessionQuarantinedError(str(row.name), cause)

    def _begin(self, live: LiveSession) -> None:
        live.on_trial = True
        # Nobody overtakes it: while it waits for its slot this process may die of something else.
        live.waiting_since = -self._core.ticket()
        try:
            self._core.tasks.spawn(self._watch(live), f"trial of {live.name}")
        except NodeDrainingError:
            self._line.release()
            raise

    async def _watch(self, live: LiveSession) -> None:
        """Keep the others waiting until the trial is over."""
        head, failures, ends = live.head, live.failures, self._core.clock.monotonic() + TRIAL_SECONDS
        try:
            while live.gone is None and live.head == head and live.failures == failures:
                try:
                    async with asyncio.timeout(LOOK_SECONDS):
                        await live.changed.wait()
                except TimeoutError:
                    if live.is_idle or self._core.clock.monotonic() > ends:
                        break
        finally:
            live.on_trial = False
            self._line.release()
