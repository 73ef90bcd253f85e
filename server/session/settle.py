"""What follows from the store's answer to a step."""

import logging

from forkpoint.errors import AbortedError, NotFoundError, SessionPausedError
from forkpoint.server.session.checkpoint import Checkpointer
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.live import LiveSession, LogTail
from forkpoint.server.session.logread import read_all
from forkpoint.server.session.owner import Owners
from forkpoint.server.session.promote import adopt
from forkpoint.statestore.calls import StepCommit, StepOutcome, StepStatus
from forkpoint.statestore.records import FinishReason, Kind, SessionRow, SessionState

log = logging.getLogger(__name__)


class Settler:
    """Publishes what was committed; lets go of sessions that another node has."""

    def __init__(self, core: NodeCore, owners: Owners, checkpointer: Checkpointer) -> None:
        self._core = core
        self._owners = owners
        self._checkpointer = checkpointer

    async def settle(self, live: LiveSession, commit: StepCommit, outcome: StepOutcome) -> None:
        """Take one session's outcome."""
        if outcome.status is StepStatus.COMMITTED:
            await self._publish(live, commit, outcome)
        elif outcome.status is StepStatus.STALE_EPOCH:
            await self._owners.lost(live)
        else:
            await self._catch_up(live, outcome)

    async def refresh(self, live: LiveSession) -> None:
        """Between steps, after a lost answer: take what the store holds and this node does not know. Raises what the
        store raises."""
        row = await self._core.catalog.get_session(live.name)
        # The same epoch twice: the store lost that this node took it, and another one did.
        if row.epoch != live.epoch or row.owner not in ("", self._core.incarnation):
            await self._owners.lost(live)
            return
        if not row.owner or row.state is not SessionState.ACTIVE:
            await self._core.drop(live, SessionPausedError(str(live.name)))
            return
        if await self._core.drop_if_ahead(live, row):
            return
        if row.branch != live.row.branch:
            await self._other_branch(live, row)
        await self._take_missed(live, row.head, row.head_hash)
        opened = await self._core.catalog.open_generation(live.name)
        if live.generation is not None and opened is None:
            await self._note_end(live, row.head_hash)
        elif live.generation is None and opened is not None:
            await adopt(self._core, live, opened)
        live.wants_prefill = True
        live.suspect = False
        live.changed.fire()

    async def _other_branch(self, live: LiveSession, row: SessionRow) -> None:
        """A rewind took effect: nothing that is known of the log's end holds any more."""
        await self._core.discard(live)
        live.row = row
        live.tail = LogTail(row.head)
        live.known_grids, live.last_grid, live.consumed_once = set(), 0, row.head

    async def _publish(self, live: LiveSession, commit: StepCommit, outcome: StepOutcome) -> None:
        generation = live.generation
        assert generation is not None
        self._core.counters.generated_tokens += len(commit.token_ids)
        generation.feed(commit.token_ids)
        if commit.token_ids:
            live.grow(commit.token_ids, Kind.GENERATED, outcome.head_hash, commit.logprobs)
        if commit.finish is not None:
            await self._finish(live, commit.finish, outcome.head, outcome.head_hash)

    async def _finish(self, live: LiveSession, reason: FinishReason, end: int, end_hash: bytes) -> None:
        generation, live.generation = live.generation, None
        if generation is not None:
            generation.finished(reason, end, end_hash)
            live.ended = generation
            self._core.counters.generations_finished += 1
        live.wants_prefill = live.sequence is not None and live.consumed < live.head
        live.changed.fire()
        if live.policy.on_turn_end:
            await self._checkpointer.capture(live)

    async def _catch_up(self, live: LiveSession, outcome: StepOutcome) -> None:
        """The store is ahead: an earlier commit took effect though its answer was lost."""
        self._core.counters.commit_conflicts += 1
        if outcome.head < live.head:
            await self.refresh(live)
            return
        known = live.head
        await self._take_missed(live, outcome.head, outcome.head_hash)
        if not await self._note_end(live, outcome.head_hash) and live.head == known:
            self._core.back_off(live, AbortedError(f"{live.name}: the store refuses its step at {live.head}"))

    async def _take_missed(self, live: LiveSession, head: int, head_hash: bytes) -> None:
        missed = await read_all(self._core.catalog, live.name, live.head, head)
        for token, kind, logprob in zip(missed.token_ids, missed.kinds, missed.logprobs, strict=True):
            live.grow((token,), kind, head_hash, (logprob,))
            if live.generation is not None and kind is Kind.GENERATED:
                live.generation.feed((token,))

    async def _note_end(self, live: LiveSession, head_hash: bytes) -> bool:
        """Whether the generation has ended in the store; if so, it has here."""
        if live.generation is None:
            return False
        try:
            row = await self._core.catalog.get_generation(live.name, live.generation.row.generation)
        except NotFoundError:
            await self._core.drop_lost(live, "its generation")
            return True
        if row.finish is None or row.end is None:
            return False
        await self._finish(live, row.finish, row.end, head_hash)
        return True
