"""What a node does for those that died: it takes over the generations that they left."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from forkpoint.errors import ForkpointError, SessionQuarantinedError, SessionRelocatingError
from forkpoint.ids import SessionName
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.lease import remove_lock_file
from forkpoint.server.session.membership import Membership
from forkpoint.server.session.owner import Owners
from forkpoint.server.session.placement import NodeState, rank
from forkpoint.server.session.tasks import survive
from forkpoint.server.session.trials import Trials
from forkpoint.statestore.records import NodeRow, SessionRow, SessionState

log = logging.getLogger(__name__)

AT_ONCE: Final = 16
"""Sessions that are taken at the same time: enough to share the store's commits, too few to keep calls from it."""


class Recovery:
    """Looks for sessions to take over when a node came, went or died, and now and then. Sessions without a generation
    wait until somebody touches them.

    All who see a node die divide its sessions by the same ranking, so that each is taken by one of them; who comes
    later in a session's ranking waits, in case the first ones die as well.
    """

    def __init__(self, core: NodeCore, owners: Owners, members: Membership, trials: Trials) -> None:
        self._core = core
        self._owners = owners
        self._members = members
        self._trials = trials
        self._version = -1
        """Of the nodes, when it last looked."""
        self._due = 0.0
        """When it looks again though nothing has changed, on our clock."""
        self._seen: dict[SessionName, tuple[int, float]] = {}
        """Sessions that nobody has: under which epoch, and when they were first seen."""
        self._suspects: dict[SessionName, SessionRow] = {}
        """Those that wait for their trial."""
        self._trying = False

    async def run(self) -> None:
        """Look for sessions to take over, for ever."""
        while not self._core.draining:
            await survive(self.look(), "looking for sessions to recover")
            await self._rest()

    def again(self) -> None:
        """Look at once: a session that nobody had may be taken."""
        self._version = -1
        self._members.changed.fire()

    async def look(self) -> None:
        """One round: generations whose owner is dead or gone, or that nobody owns.

        A dead node's row goes when its generations are taken; what else it owned is free to take without a row.
        """
        core, members = self._core, self._members
        now = core.clock.monotonic()
        # Also of a look that fails, perhaps without waiting for anything: it rests like any other.
        self._due, self._version = now + core.options.recovery_poll_seconds, members.version
        await members.refresh()
        self._version = members.version
        dead = [node for node in members.nodes if members.state(node) is NodeState.DEAD]
        left = [row for row in await core.catalog.list_open_generations() if self._is_left(row)]
        self._seen = {row.name: self._first_seen(row, now) for row in left}
        waits = {row.name: self._turn(row) - (now - self._seen[row.name][1]) for row in left}
        due = [row for row in left if waits[row.name] <= 0]
        await self._take([row for row in due if not self._trials.is_suspect(row)])
        self._try([row for row in due if self._trials.is_suspect(row)])
        left = [row for row in left if self._is_left(row)]
        await self._bury(dead, {row.owner for row in left})
        later = min((wait for wait in waits.values() if wait > 0), default=self._patience())
        failed = any(waits[row.name] <= 0 for row in left)
        self._due = now + min(later, core.options.recovery_poll_seconds if failed else later)

    def _patience(self) -> float:
        """When to look again, in seconds, while no node comes, goes or changes. One that is drained gives sessions up,
        and nothing else tells of it."""
        options, members = self._core.options, self._members
        gives = [node for node in members.nodes if members.state(node) is NodeState.DRAINING and node.status.sessions]
        return options.recovery_poll_seconds if gives else options.recovery_look_seconds

    async def _rest(self) -> None:
        """Until a node came, went or died, or it is time to look again."""
        try:
            async with asyncio.timeout(max(0.0, self._due - self._core.clock.monotonic())):
                while self._members.version == self._version:
                    await self._members.changed.wait()
        except TimeoutError:
            return

    def _is_left(self, row: SessionRow) -> bool:
        """Whether it runs nowhere."""
        if row.state is not SessionState.ACTIVE or row.name in self._core.lives:
            return False
        owner = self._members.node(row.owner)
        return owner is None or row.owner == self._core.incarnation or self._members.state(owner) is NodeState.DEAD

    def _first_seen(self, row: SessionRow, now: float) -> tuple[int, float]:
        epoch, since = self._seen.get(row.name, (-1, now))
        return (epoch, since) if epoch == row.epoch else (row.epoch, now)

    def _turn(self, row: SessionRow) -> float:
        """How many seconds after it was left the session is this node's to take; infinite when never.

        A node that follows it comes first. Others can't know which one does, only that one may."""
        ours, numerics = self._core.incarnation, row.numerics_ids[-1] if row.numerics_ids else ""
        turns = rank(row.name, self._members.candidates(), numerics)
        if ours not in turns:
            return float("inf")
        if row.name in self._core.follows or row.migration_target == ours:
            return 0.0
        is_followed = row.standbys > 0 or row.migration_target in turns
        return (turns.index(ours) + is_followed) * self._core.options.recovery_rank_seconds

    async def _take(self, rows: Sequence[SessionRow]) -> None:
        """Take these, the first ones first."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def take(row: SessionRow) -> None:
            async with gate:
                await survive(self._recover(row), f"recovering {row.name}")

        await asyncio.gather(*(take(row) for row in rows))

    def _try(self, rows: Sequence[SessionRow]) -> None:
        """Let these be taken one after the other, beside all else: each waits for the trial of the one before."""
        self._suspects = {row.name: row for row in rows}
        if rows and not self._trying:
            self._trying = True
            self._core.tasks.spawn(self._try_all(), "trials")

    async def _try_all(self) -> None:
        try:
            while self._suspects:
                # The likeliest one comes last: until then nobody else depends on this process's life.
                row = self._suspects.pop(min(self._suspects, key=lambda name: self._suspects[name].takeovers))
                await survive(self._recover(row), f"recovering {row.name}")
        finally:
            self._trying = False

    async def _recover(self, row: SessionRow) -> None:
        """Own a session with an open generation: the loop does the rest."""
        if self._core.draining or row.name in self._core.lives:
            return
        try:
            await self._owners.own(row.name)
        except (SessionRelocatingError, SessionQuarantinedError):
            return  # somebody has it now, or nobody is to have it
        except ForkpointError as error:
            log.warning("%s could not be recovered: %s", row.name, error)
            return
        self._core.counters.recovered_generations += 1
        log.info("%s: its generation goes on here", row.name)

    async def _bury(self, dead: Sequence[NodeRow], owners: set[str]) -> None:
        """Forget the dead that own none of the generations that are left."""
        for node in dead:
            if node.incarnation not in owners:
                await self._core.catalog.remove_node(node.incarnation)
                remove_lock_file(node)
