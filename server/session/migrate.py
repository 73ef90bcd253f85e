"""Moving a session that this node owns to another one, while it runs: only token ids cross in the last phase."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from forkpoint.errors import NodeDrainingError, NotFoundError, SessionRelocatingError
from forkpoint.ids import SessionName
from forkpoint.limits import MOVE_LAG_TOKENS, MOVE_STALL_SECONDS
from forkpoint.move_errors import MigrationUnderwayError, MoveFailedError
from forkpoint.server.session.api import MovePhase, MoveReport, SessionView
from forkpoint.server.session.changes import Signal
from forkpoint.server.session.checkpoint import Checkpointer
from forkpoint.server.session.claims import Claims
from forkpoint.server.session.elsewhere import Elsewhere
from forkpoint.server.session.handover import HandOver
from forkpoint.server.session.live import LiveSession, Place
from forkpoint.server.session.loop import StepLoop
from forkpoint.server.session.membership import Membership
from forkpoint.server.session.placement import NodeState
from forkpoint.server.session.ports import FollowAsk, FollowReport, Peers
from forkpoint.server.session.views import Views
from forkpoint.statestore.records import NodeRow

log = logging.getLogger(__name__)

CUT_OVER_TRIES: Final = 3
"""Cut-overs that fail, until the move does."""
LOOK_SECONDS: Final = 0.02
"""How often a move looks whether it may go on, beside the target's reports."""
PATIENCE_SECONDS: Final = 5.0
"""A target that is within one step's tokens for so long is near enough, though a step of them takes its time."""
CHUNKS_BEHIND: Final = 2
"""A checkpoint that is so many steps' tokens behind is replaced before the target restores it."""


class Move:
    """One move as who asked for it sees it: the last report, and the end."""

    def __init__(self) -> None:
        self.report: MoveReport | None = None
        self.error: Exception | None = None
        self.ended = False
        self.cancelled = False
        self.changed = Signal()

    def tell(self, report: MoveReport) -> None:
        """The newest report; one that nobody took is replaced."""
        if report != self.report:
            self.report = report
            self.changed.fire()

    def end(self, error: Exception | None) -> None:
        """It is over; `error`: why it failed."""
        self.error, self.ended = error, True
        self.changed.fire()


class Target:
    """The node that a session goes to, as its reports show it."""

    def __init__(self, node: NodeRow) -> None:
        self.node = node
        self.told: FollowReport | None = None
        self.error: Exception | None = None

    def lag(self, live: LiveSession) -> int:
        """Committed tokens that it has not consumed."""
        return live.head - (0 if self.told is None else self.told.applied)


class Migrations:
    """Moves run as the node's own tasks; who asked for one may go away, which cancels it unless it is cutting over."""

    def __init__(
        self,
        claims: Claims,
        loop: StepLoop,
        checkpointer: Checkpointer,
        hand_over: HandOver,
        views: Views,
        members: Membership,
        elsewhere: Elsewhere,
        peers: Peers,
    ) -> None:
        self._claims = claims
        self._core = claims.core
        self._loop = loop
        self._checkpointer = checkpointer
        self._hand_over = hand_over
        self._views = views
        self._members = members
        self._elsewhere = elsewhere
        self._peers = peers

    async def move(self, name: SessionName, target: NodeRow) -> None:
        """As migrate, without reports."""
        async with aclosing(self._migrate(name, target)) as reports:
            async for _ in reports:
                pass

    def migrate(self, name: SessionName, target: str) -> AsyncGenerator[MoveReport, None]:
        """Move a session to the node `target` ("": where it is best placed). The last report has the session.

        Raises what stands in the way of any operation on it; NotFoundError for an unknown node, MigrationUnderwayError
        while another move is under way, MoveFailedError when it stays where it is. Closing the iterator cancels the
        move, unless it is cutting over.
        """
        return self._migrate(name, target or None)

    async def _migrate(self, name: SessionName, target: NodeRow | str | None) -> AsyncGenerator[MoveReport, None]:
        move = Move()
        told: MoveReport | None = None
        self._core.tasks.spawn(self._run(move, name, target), f"move {name}")
        try:
            while True:
                if move.report is not told:
                    told = move.report
                    assert told is not None
                    yield told
                elif move.error is not None:
                    raise move.error
                elif move.ended:
                    return
                else:
                    await move.changed.wait()
        finally:
            move.cancelled = True
            move.changed.fire()

    async def _run(self, move: Move, name: SessionName, target: NodeRow | str | None) -> None:
        try:
            await self._claims.owned(name, lambda live: self._move(live, move, target))
        except Exception as error:  # noqa: BLE001 - who asked for it gets it
            move.end(error)
        except BaseException:
            move.end(NodeDrainingError(self._core.options.node))
            raise
        else:
            move.end(None)

    async def _move(self, live: LiveSession, move: Move, target: NodeRow | str | None) -> None:
        node = await self._target(live, target)
        if node.incarnation == self._core.incarnation:
            await self._claims.ours_still(live)
            move.tell(MoveReport(MovePhase.MOVED, node.node, view=await self._view(live.name)))
            return
        if live.moving:
            raise MigrationUnderwayError(str(live.name), live.moving, live.row.migration_target)
        try:
            await self._hand_over.give_word(live, node)
            await self._bring_checkpoint(live)
            pause = await self._lead(live, move, node)
        except Exception:
            await self._hand_over.withdraw(live)
            raise
        self._core.counters.note_move(pause)
        move.tell(MoveReport(MovePhase.MOVED, node.node, view=await self._view(live.name), pause_seconds=pause))

    async def _target(self, live: LiveSession, target: NodeRow | str | None) -> NodeRow:
        """Raises NotFoundError for a node that is not known, MoveFailedError for one that can't take the session."""
        await self._members.refresh()
        if target is None:
            node = self._elsewhere.choose(live, ())
            if node is None:
                raise MoveFailedError(str(live.name), "another node", "there is none that could take it")
            return node
        node = self._members.named(target) if isinstance(target, str) else target
        if node is None:
            raise NotFoundError(f"nodes/{target}")
        if node.incarnation == self._core.incarnation:
            return node
        state, ours = self._members.state(node), self._core.engine.facts.numerics_id
        if state is not NodeState.SERVING:
            raise MoveFailedError(str(live.name), node.node, f"the node is {state.value}")
        if node.numerics_id != ours:
            cause = f"it computes by the numerics {node.numerics_id}, the session is at {ours}"
            raise MoveFailedError(str(live.name), node.node, cause)
        return node

    async def _bring_checkpoint(self, live: LiveSession) -> None:
        """A checkpoint near the head, so that the target has little to replay."""
        await self._checkpointer.settle(live)
        behind = live.consumed - live.last_grid
        if live.place is not Place.RESIDENT or behind < CHUNKS_BEHIND * self._core.options.prefill_chunk_tokens:
            return
        await self._loop.at_tick(lambda: self._checkpointer.capture(live))
        await self._checkpointer.settle(live)

    async def _lead(self, live: LiveSession, move: Move, node: NodeRow) -> float:
        """Let the target follow until it is near, then hand over. Returns the seconds without an owner that commits."""
        target = Target(node)
        following = self._core.tasks.spawn(self._listen(live, move, target), f"{live.name} to {node.node}")
        move.tell(MoveReport(MovePhase.RESTORING, node.node, lag_tokens=live.head))
        try:
            tries = 0
            async for _ in self._moments(live, move, target):
                try:
                    pause = await self._hand_over.try_once(live, node)
                except SessionRelocatingError:
                    raise
                except Exception as error:
                    tries += 1
                    if live.gone is not None or tries == CUT_OVER_TRIES:
                        raise MoveFailedError(str(live.name), node.node, str(error)) from error
                    await self._hand_over.give_word(live, node)
                else:
                    if pause is not None:
                        return pause
            raise MoveFailedError(str(live.name), node.node, "it was cancelled")
        finally:
            following.cancel()

    async def _moments(self, live: LiveSession, move: Move, target: Target) -> AsyncGenerator[None, None]:
        """The moments at which the target is near enough; ends when the move is cancelled. Raises why it fails."""
        clock, near_since, last, changed_at = self._core.clock, -1.0, -1, self._core.clock.monotonic()
        while not move.cancelled:
            if live.gone is not None:
                raise live.gone
            if target.error is not None:
                raise MoveFailedError(str(live.name), target.node.node, str(target.error)) from target.error
            now, lag = clock.monotonic(), target.lag(live)
            applied = -1 if target.told is None else target.told.applied
            if applied != last or lag == 0:
                last, changed_at = applied, now
            if now - changed_at > MOVE_STALL_SECONDS:
                raise MoveFailedError(str(live.name), target.node.node, "it gets no further there")
            within_a_step = target.told is not None and lag <= self._core.options.prefill_chunk_tokens
            near_since = (near_since if near_since >= 0 else now) if within_a_step else -1.0
            if within_a_step and (lag <= MOVE_LAG_TOKENS or now - near_since > PATIENCE_SECONDS):
                move.tell(MoveReport(MovePhase.CUTTING_OVER, target.node.node, _restored(target), lag))
                yield
                if move.cancelled:
                    return
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await move.changed.wait()
            except TimeoutError:
                continue

    async def _listen(self, live: LiveSession, move: Move, target: Target) -> None:
        """Take the target's reports; while this runs it follows the session."""
        options, node = self._core.options, target.node
        ask = FollowAsk(live.name, live.epoch, self._core.incarnation, options.address, live.moving)
        try:
            async with aclosing(self._peers.follow(node, ask)) as reports:
                async for told in reports:
                    target.told = told
                    move.tell(MoveReport(MovePhase.REPLAYING, node.node, told.restored_tokens, target.lag(live)))
            target.error = target.error or NotFoundError(str(live.name), f"is not followed by {node.node} any more")
        except Exception as error:  # noqa: BLE001 - the move fails with it
            target.error = error
        move.changed.fire()

    async def _view(self, name: SessionName) -> SessionView:
        return await self._views.one(await self._core.catalog.get_session(name))


def _restored(target: Target) -> int:
    return 0 if target.told is None else target.told.restored_tokens
