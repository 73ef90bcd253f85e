"""Sessions come, change, turn back and go."""

import asyncio
import contextlib

from forkpoint.errors import (
    DataLossError,
    InvalidFieldError,
    NotFoundError,
    PositionBeyondHeadError,
    SessionPausedError,
    SessionRelocatingError,
)
from forkpoint.ids import SessionName, check_id, new_id
from forkpoint.server.session.api import CreateSession, ForkCall, SessionView
from forkpoint.server.session.checkpoint import Checkpointer
from forkpoint.server.session.claims import Claims
from forkpoint.server.session.fork import ForkImages
from forkpoint.server.session.inputs import check_fork, check_labels, check_policy, check_seed
from forkpoint.server.session.live import LiveSession, Place
from forkpoint.server.session.loop import StepLoop
from forkpoint.server.session.seeds import child_seed, random_seed
from forkpoint.server.session.usage import UsageCounter
from forkpoint.server.session.views import Views
from forkpoint.server.session.writers import REPLAY_EPOCH
from forkpoint.statestore.calls import ForkOutcome, ForkSessions
from forkpoint.statestore.records import (
    CheckpointPolicy,
    FinishReason,
    NewSession,
    RequestKey,
    SessionRow,
)


class Lifecycle:
    """Create, fork, rewind, cancel, delete."""

    def __init__(
        self,
        claims: Claims,
        loop: StepLoop,
        usage: UsageCounter,
        images: ForkImages,
        checkpointer: Checkpointer,
        views: Views,
    ) -> None:
        self._claims = claims
        self._core = claims.core
        self._loop = loop
        self._usage = usage
        self._images = images
        self._checkpointer = checkpointer
        self._views = views

    async def create(self, call: CreateSession) -> SessionView:
        """An empty session; the seed is drawn here when the call has none."""
        async with self._claims.request(call.request):
            return await self.create_claimed(call)

    async def create_claimed(self, call: CreateSession) -> SessionView:
        """As create, for a caller that holds the request id already."""
        check_id(call.name.session, "session_id")
        check_labels(call.labels)
        if call.policy is not None:
            check_policy(call.policy)
        if call.seed is not None:
            check_seed(call.seed)
        options = self._core.options
        default = CheckpointPolicy(options.checkpoint_every_tokens, options.checkpoint_on_turn_end)
        seed = random_seed() if call.seed is None else call.seed
        standbys = call.standbys or await self._standbys(call.name.workflow, call.transient)
        new = NewSession(
            call.name, seed, call.policy or default, dict(call.labels), call.transient, call.expire_us, standbys
        )
        row, _ = await self._core.catalog.create_session(new, call.request)
        return await self._views.one(row)

    async def _standbys(self, workflow: str, transient: bool) -> int:
        """How many a new session has that says nothing. What may be thrown away needs none."""
        if transient:
            return 0
        try:
            return (await self._core.catalog.get_workflow(workflow)).standbys
        except NotFoundError:
            return 0  # the creation says so, or was answered before

    async def fork(self, call: ForkCall) -> tuple[list[SessionView], int]:
        """N children in one transaction; the parent, paused or running, goes on. An image is made between steps."""
        check_fork(call)
        async with self._claims.request(call.request) as stored:
            if not stored and call.name not in self._core.lives:
                await self._claims.owners.leave_to_owner(call.name)  # who has its state can fork that as well
            if stored or call.name not in self._core.lives:
                outcome, parent = await self._fork(call)
            else:
                outcome, parent = await self._loop.at_tick(lambda: self._fork_with_image(call), self._keep_point)
            rows = list(outcome.children)
            if not outcome.replayed:
                if (await self._core.catalog.get_session(call.name)).branch == parent.branch:
                    await self._usage.inherit(parent.branch, rows)
            else:
                rows = [await self._core.catalog.get_session(row.name) for row in rows]
            return await self._views.many(rows), outcome.position

    async def _fork(self, call: ForkCall) -> tuple[ForkOutcome, SessionRow]:
        """The outcome, and the parent as it was a moment before."""
        parent, standbys = await asyncio.gather(
            self._core.catalog.get_session(call.name), self._standbys(call.name.workflow, call.transient)
        )
        ids = call.session_ids or tuple(new_id("s") for _ in range(call.count))
        children = tuple(
            NewSession(
                SessionName(call.name.workflow, child),
                child_seed(call.seeds, parent.seed, child, call.count),
                parent.policy,
                {},
                call.transient,
                call.expire_us,
                standbys,
            )
            for child in ids
        )
        outcome = await self._core.catalog.fork(ForkSessions(call.name, call.position, children, call.request))
        if not outcome.replayed:
            self._core.counters.forks += len(children)
        return outcome, parent

    async def _fork_with_image(self, call: ForkCall) -> tuple[ForkOutcome, SessionRow]:
        """Between steps only: the parent's tokens consumed and its state on the engine must be of one moment."""
        outcome, parent = await self._fork(call)
        live = self._core.lives.get(call.name)
        if live is not None and not outcome.replayed:
            await self._images.make(live, outcome.position, outcome.children)
        return outcome, parent

    async def _keep_point(self, forked: tuple[ForkOutcome, SessionRow]) -> None:
        """A point that was forked from is worth coming back to: later children, and those that find no image, restore
        from there. A parent that keeps nothing by itself keeps nothing here."""
        outcome, parent = forked
        live = self._core.lives.get(parent.name)
        if outcome.replayed or live is None or live.policy.every_tokens == 0:
            return
        # A generation's state is one token behind its head.
        if outcome.position == live.head and live.consumed >= live.head - 1:
            await self._checkpointer.capture(live)

    async def rewind(self, name: SessionName, position: int, request: RequestKey | None) -> SessionView:
        """Ends a running generation, then lets the name point at a branch that ends at `position`."""
        async with self._claims.request(request) as stored:
            if stored:
                await self._core.catalog.rewind(name, REPLAY_EPOCH, position, request)
                return await self._views.one(await self._core.catalog.get_session(name))
            row = await self._claims.owned(name, lambda live: self._rewind(live, position, request))
            return await self._views.one(row)

    async def _rewind(self, live: LiveSession, position: int, request: RequestKey | None) -> SessionRow:
        # Before a generation is ended for it.
        if position < 0:
            raise InvalidFieldError("position", f"{position} is negative")
        if position > live.head:
            await self._claims.ours_still(live)
            raise PositionBeyondHeadError(str(live.name), position, live.head)
        async with self._claims.seized(live, "rewind", FinishReason.CANCELLED):
            live.held = True
            try:
                await self._claims.settled(live)
                return await self._loop.at_tick(lambda: self._turn_back(live, position, request))
            finally:
                live.held = False

    async def _turn_back(self, live: LiveSession, position: int, request: RequestKey | None) -> SessionRow:
        row, _ = await self._core.catalog.rewind(live.name, live.epoch, position, request)
        if live.place is Place.RESIDENT and live.consumed > position:
            await self._core.discard(live)
        await self._images.forget(live.name)
        live.row = row
        live.tail.cut(position)
        live.known_grids = {grid for grid in live.known_grids if grid <= position}
        live.last_grid = min(live.last_grid, position)
        live.consumed_once = min(live.consumed_once, position)
        live.changed.fire()
        return row

    async def cancel(self, name: SessionName) -> SessionView:
        """Ends a running generation at the next token border; without one nothing happens."""
        self._claims.refuse_when_draining()
        with contextlib.suppress(SessionPausedError):  # nothing runs on a paused session
            await self._claims.owned(name, self._cancel)
        return await self._views.one(await self._core.catalog.get_session(name))

    async def _cancel(self, live: LiveSession) -> None:
        if live.generation is None:
            await self._claims.ours_still(live)
        await self._claims.end_generation(live, FinishReason.CANCELLED)

    async def delete(self, name: SessionName, request: RequestKey | None) -> SessionView:
        """Hides the name and frees what it holds here. Descendants live on."""
        async with self._claims.request(request) as stored:
            if stored:
                return await self._views.one(await self._delete_row(name, request))
            async with self._claims.owners.kept_out(name) as live:
                row = (
                    await self._delete_absent(name, request) if live is None else await self._delete_live(live, request)
                )
            await self._images.forget(name)
            return await self._views.one(row)

    async def _delete_absent(self, name: SessionName, request: RequestKey | None) -> SessionRow:
        row = await self._core.catalog.get_session(name)
        node = await self._claims.owners.foreign_owner(row)
        if node is not None:
            raise SessionRelocatingError(str(name), node.node, node.address)
        return await self._delete_row(name, request)

    async def _delete_live(self, live: LiveSession, request: RequestKey | None) -> SessionRow:
        async with self._claims.seized(live, "delete", FinishReason.CANCELLED):
            live.held = True
            try:
                await self._provide_for_readers(live)
                row = await self._delete_row(live.name, request)
            finally:
                live.held = False
            await self._core.drop(live, NotFoundError(str(live.name), "is deleted"))
            return row

    async def _provide_for_readers(self, live: LiveSession) -> None:
        """Readers that have not come to the end yet find nothing in the store any more. What they miss is the usage:
        the last tokens are in memory."""
        ended = live.ended
        if ended is not None and ended.readers > 0 and ended.row.branch == live.row.branch:
            with contextlib.suppress(DataLossError):  # a damaged log must not keep a session from being deleted
                ended.usage = await self._usage.count(live.name, live.row.branch, ended.end)

    async def _delete_row(self, name: SessionName, request: RequestKey | None) -> SessionRow:
        purge_us = self._core.clock.wall_us() + int(self._core.options.purge_seconds * 1_000_000)
        return await self._core.catalog.delete_session(name, purge_us, request)
