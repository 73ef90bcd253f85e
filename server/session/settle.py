"""What follows from the store's answer to a step."""

import logging

from forkpoint.errors import AbortedError, ForkpointError, SessionRelocatingError
from forkpoint.server.session.checkpoint import Checkpointer
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.live import LiveSession
from forkpoint.server.session.logread import read_all
from forkpoint.server.session.owner import Owners
from forkpoint.statestore.base import StepCommit, StepOutcome, StepStatus
from forkpoint.statestore.records import FinishReason, Kind

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
            await self.lost(live)
        else:
            await self._catch_up(live, outcome)

    async def lost(self, live: LiveSession) -> None:
        """Another node has the session: the slot is dropped, readers are sent there."""
        self._core.counters.stale_epochs += 1
        try:
            error = await self._owners.relocating(live.name)
        except ForkpointError:
            error = SessionRelocatingError(str(live.name), "another node", "")
        await self._core.drop(live, error)

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
            self._core.counters.generations_finished += 1
        live.wants_prefill = live.sequence is not None and live.consumed < live.head
        live.changed.fire()
        if live.row.policy.on_turn_end:
            await self._checkpointer.capture(live)

    async def _catch_up(self, live: LiveSession, outcome: StepOutcome) -> None:
        """The store is ahead: an earlier commit took effect though its answer was lost."""
        self._core.counters.commit_conflicts += 1
        if outcome.head < live.head:
            await self._core.drop(live, await self._owners.relocating(live.name))
            return
        missed = await read_all(self._core.catalog, live.name, live.head, outcome.head)
        generation = live.generation
        for token, kind, logprob in zip(missed.token_ids, missed.kinds, missed.logprobs, strict=True):
            live.grow((token,), kind, outcome.head_hash, (logprob,))
            if generation is not None:
                generation.feed((token,))
        if generation is None:
            return
        if not missed.token_ids and generation.finish is None:
            self._core.back_off(live, AbortedError(f"{live.name}: the store refuses its step at {live.head}"))
        row = await self._core.catalog.get_generation(live.name, generation.row.generation)
        if row.finish is not None and row.end is not None:
            await self._finish(live, row.finish, row.end, outcome.head_hash)
