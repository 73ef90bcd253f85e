"""The node's heart: schedule, run, commit, publish, one step after the other."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from forkpoint.errors import (
    DataLossError,
    ForkpointError,
    NodeCapacityError,
    NodeDrainingError,
    StoreFullError,
    StoreUnavailableError,
)
from forkpoint.ids import SessionName
from forkpoint.server.engine.batch import Sampled, Work
from forkpoint.server.engine.errors import NonFiniteLogitsError
from forkpoint.server.scheduler.history import History
from forkpoint.server.scheduler.policy import Candidate, Share, StepLimits, StepPlan, plan_step
from forkpoint.server.session.checkpoint import Checkpointer
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.evict import Residents
from forkpoint.server.session.live import LiveSession, Place
from forkpoint.server.session.quarantine import Quarantine
from forkpoint.server.session.settle import Settler
from forkpoint.statestore.calls import StepCommit

T = TypeVar("T")
log = logging.getLogger(__name__)


class StepLoop:
    """Owns `step()`. Outside events wait in a queue and are taken between two steps: nothing runs meanwhile."""

    def __init__(
        self,
        core: NodeCore,
        residents: Residents,
        checkpointer: Checkpointer,
        settler: Settler,
        quarantine: Quarantine,
    ) -> None:
        self._core = core
        self._residents = residents
        self._checkpointer = checkpointer
        self._settler = settler
        self._quarantine = quarantine
        self._events: list[Callable[[], Awaitable[None]]] = []
        self._history: History[SessionName] = History()
        self._store_failures = 0
        self._store_retry_at = 0.0
        self._stopping = False
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Step while there is work, sleep while there is none."""
        while not self._stopping:
            await self._core.work.wait()
            self._core.work.clear()
            while await self._guarded_step() and not self._stopping:  # noqa: ASYNC110 - it waits for nothing
                # A step with an instant engine and store must not starve the other tasks.
                await asyncio.sleep(0)
        while await self._take_events():
            pass
        self._ended.set()

    async def halt(self) -> None:
        """End after the running step; what waits for a tick is still done."""
        self._stopping = True
        self._core.wake()
        await self._ended.wait()

    async def at_tick(
        self, act: Callable[[], Coroutine[Any, Any, T]], after: Callable[[T], Awaitable[None]] | None = None
    ) -> T:
        """Run `act` between two steps and return what it does; keep it short, all sessions wait for it. `after` gets
        the result and runs before the next step as well, but the caller does not wait for it."""
        if self._ended.is_set():
            raise NodeDrainingError(self._core.options.node)
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def event() -> None:
            try:
                value = await act()
            except Exception as error:  # noqa: BLE001 - the caller gets it
                if not result.cancelled():
                    result.set_exception(error)
            else:
                if not result.cancelled():
                    result.set_result(value)
                if after is not None:
                    await after(value)

        self._events.append(event)
        self._core.wake()
        return await result

    async def step(self) -> bool:
        """Schedule, run, commit, publish. True when it did something, so that there may be more to do."""
        acted = await self._take_events()
        await self._confirm()
        acted = await self._end_generations() or acted
        await self._residents.rewarm()
        await self._residents.admit()
        candidates = self._candidates()
        if not candidates:
            return acted
        for group in self._groups(candidates):
            plan = await self._schedule(group)
            if plan.shares:
                lives = [self._residents.at(share.key) for share in plan.shares]
                await self._commit(lives, await self._run(lives, plan.shares))
            await self._make_room(plan)
            acted = acted or bool(plan.shares or plan.park)
        return acted

    async def _guarded_step(self) -> bool:
        try:
            with self._core.progress.under_way("a step"):
                return await self.step()
        except Exception:
            # A bug must not end all sessions of the node: say so, rest, and go on.
            log.exception("a step failed")
            self._core.wake_in(self._core.options.retry_most_seconds)
            return False

    async def _take_events(self) -> bool:
        events, self._events = self._events, []
        for event in events:
            await event()
        return bool(events)

    async def _confirm(self) -> None:
        """Compare sessions with the store after a lost answer, before they go on."""
        if self._store_rests():
            return
        for live in [live for live in self._core.lives.values() if live.suspect and not live.held]:
            if self._core.rests(live):
                continue
            try:
                await self._settler.refresh(live)
            except (StoreUnavailableError, StoreFullError) as error:
                self._store_failed([live], error)
                return
            except Exception as error:  # noqa: BLE001 - logged there; it is this session's alone
                await self._session_failed(live, error)

    async def _end_generations(self) -> bool:
        """Stop conditions are read off the log before anything is sampled; ends asked for are taken here as well."""
        if self._store_rests():
            return False
        limit = self._core.engine.facts.context_limit
        ending: list[tuple[LiveSession, StepCommit]] = []
        for live in self._core.lives.values():
            generation = live.generation
            if generation is None or live.held or live.suspect:
                continue
            reason = generation.due(limit)
            if reason is not None:
                commit = StepCommit(live.name, live.epoch, live.head, (), generation.row.generation, (), reason)
                ending.append((live, commit))
        return bool(ending) and await self._write(ending)

    def _candidates(self) -> list[Candidate[SessionName]]:
        found = []
        for live in self._core.lives.values():
            if live.place is not Place.RESIDENT or live.held or live.suspect or self._core.rests(live):
                continue
            samples = live.generation is not None and live.has_row_ahead and not self._store_rests()
            if samples or live.consumed < live.head:
                every = live.policy.every_tokens
                found.append(
                    Candidate(live.name, live.name.workflow, live.consumed, live.head, samples, every, live.admitted)
                )
        return found + self._residents.candidates_that_follow()

    def _groups(self, candidates: Sequence[Candidate[SessionName]]) -> list[list[Candidate[SessionName]]]:
        """One batch of all that are well; whoever failed last time runs alone, so that it fails nobody else."""
        well = [c for c in candidates if not self._residents.at(c.key).runs_alone]
        groups = [[c] for c in candidates if self._residents.at(c.key).runs_alone]
        return [well, *groups] if well else groups

    def _still_holds(self, candidate: Candidate[SessionName]) -> bool:
        """An earlier group's step may have parked it; the node may have lost it and even have it anew."""
        live = self._residents.find(candidate.key)
        if live is None or live.place is not Place.RESIDENT or live.consumed != candidate.consumed:
            return False
        return live.has_row_ahead or not candidate.wants_sample

    async def _schedule(self, candidates: Sequence[Candidate[SessionName]]) -> StepPlan[SessionName]:
        capacity = await self._core.engine.capacity()
        candidates = [c for c in candidates if self._still_holds(c)]
        limits = StepLimits(capacity.pages_free, self._core.options.prefill_chunk_tokens)
        plan = plan_step(candidates, limits, self._history, self._residents.idle())
        self._history = plan.history
        return plan

    async def _run(self, lives: Sequence[LiveSession], shares: Sequence[Share[SessionName]]) -> list[Sampled | None]:
        """One batch in the engine thread; what it consumed is noted, what it sampled is not yet anybody's."""
        works = [self._work(live, share) for live, share in zip(lives, shares, strict=True)]
        began = self._core.clock.monotonic()
        engine = self._core.engine
        try:
            sampled = await engine.call(engine.engine.step, works)
        except NonFiniteLogitsError as error:
            return await self._run_without(error, lives, shares)
        except Exception as error:  # noqa: BLE001 - back_off logs it; the sequences are as they were
            for live in lives:
                # Of many, nobody knows whose fault it is: each runs alone next, and its readers hear of it then.
                await self._failed(live, error, alone=len(lives) == 1)
            return [None] * len(works)
        consumed = sum(len(work.token_ids) for work in works)
        if consumed > len(works):
            self._core.counters.note_prefill(consumed, self._core.clock.monotonic() - began)
        self._core.counters.steps += 1
        for live, work in zip(lives, works, strict=True):
            self._advance(live, work)
        return sampled

    async def _run_without(
        self, error: NonFiniteLogitsError, lives: Sequence[LiveSession], shares: Sequence[Share[SessionName]]
    ) -> list[Sampled | None]:
        """The step again without the session that spoilt it, and without those that the node lost meanwhile."""
        culprits = [live for live in lives if live.sequence == error.sequence]
        rest = [
            at
            for at, (live, share) in enumerate(zip(lives, shares, strict=True))
            if live not in culprits and live.sequence is not None and live.consumed == share.start
        ]
        sampled: list[Sampled | None] = [None] * len(lives)
        if len(rest) == len(lives):
            # An engine that blames nobody of the step: as any other failure.
            for live in lives:
                self._core.back_off(live, error)
            return sampled
        if rest:
            again = await self._run([lives[at] for at in rest], [shares[at] for at in rest])
            for at, token in zip(rest, again, strict=True):
                sampled[at] = token
        for live in culprits:
            follower = self._core.followed(live)
            if follower is not None:
                await self._core.unfollow(follower, error)
            elif self._core.lives.get(live.name) is live:
                await self._quarantine.strike(live, error)
        return sampled

    async def _failed(self, live: LiveSession, error: Exception, alone: bool) -> None:
        """A step of it failed. Alone it is its own fault, and a follower that has failed is of no use to anyone."""
        follower = self._core.followed(live)
        if follower is not None and alone:
            await self._core.unfollow(follower, error)
        else:
            (self._core.back_off if alone else self._core.rest)(live, error)

    def _work(self, live: LiveSession, share: Share[SessionName]) -> Work:
        assert live.sequence is not None
        tokens = live.tail.tokens(share.start, share.start + share.count)
        sample = live.generation.sample if share.sample and live.generation is not None else None
        return Work(live.sequence, share.start, tokens, sample)

    def _advance(self, live: LiveSession, work: Work) -> None:
        self._core.counters.replayed_tokens += live.advance(work.token_ids)
        live.failures = 0
        live.last_used = self._core.ticket()
        if live.consumed == live.head and live.generation is None:
            live.wants_prefill = False

    async def _commit(self, lives: Sequence[LiveSession], sampled: Sequence[Sampled | None]) -> None:
        """Log what was sampled; then take the captures that are due.

        A session that the node lost during the step drops its token, also when the node has it again already: the log
        may have grown meanwhile.
        """
        limit = self._core.engine.facts.context_limit
        commits: list[tuple[LiveSession, StepCommit]] = []
        stepped: list[LiveSession] = []
        for live, token in zip(lives, sampled, strict=True):
            if self._core.lives.get(live.name) is not live:
                continue
            stepped.append(live)
            generation = live.generation
            if token is None or generation is None:
                continue
            logprobs = (token.logprob,) if generation.row.params.logprobs else ()
            finish = generation.due_after(token.token_id, limit)
            commit = StepCommit(
                live.name, live.epoch, live.head, (token.token_id,), generation.row.generation, logprobs, finish
            )
            commits.append((live, commit))
        if commits:
            await self._write(commits)
        for live in stepped:
            await self._checkpointer.capture_if_due(live)

    async def _write(self, commits: Sequence[tuple[LiveSession, StepCommit]]) -> bool:
        """One transaction for all. A failure costs nothing but time: the same tokens are sampled again later."""
        try:
            outcomes = await self._core.catalog.commit_step([commit for _, commit in commits])
        except (StoreUnavailableError, StoreFullError) as error:
            self._store_failed([live for live, _ in commits], error)
            return False
        except Exception as error:  # noqa: BLE001 - logged by whoever is found to have failed
            if len(commits) > 1:
                # One of them is refused, and all with it: alone it fails nobody else.
                return any([await self._write([commit]) for commit in commits])
            await self._session_failed(commits[0][0], error)
            return False
        self._store_failures = 0
        for (live, commit), outcome in zip(commits, outcomes, strict=True):
            try:
                await self._settler.settle(live, commit, outcome)
            except (StoreUnavailableError, StoreFullError) as error:
                self._store_failed([live], error)
            except Exception as error:  # noqa: BLE001 - logged there; the others' tokens are to be published
                await self._session_failed(live, error)
        return True

    async def _session_failed(self, live: LiveSession, error: Exception) -> None:
        """The store is well, but not with this session."""
        live.suspect = True
        if isinstance(error, DataLossError):
            await self._quarantine.unreadable(live, error)
        else:
            self._core.back_off(live, error)

    def _store_failed(self, lives: Sequence[LiveSession], error: ForkpointError) -> None:
        self._store_failures += 1
        self._core.counters.commit_failures += 1
        delay = self._core.retry_delay(self._store_failures)
        self._store_retry_at = self._core.clock.monotonic() + delay
        log.warning("a commit failed: %s", error)
        for live in lives:
            live.suspect = True
            live.fail(error)
        self._core.wake_in(delay)

    def _store_rests(self) -> bool:
        return self._store_failures > 0 and self._core.clock.monotonic() < self._store_retry_at

    async def _make_room(self, plan: StepPlan[SessionName]) -> None:
        if await self._residents.give_way(plan.blocked):
            return
        if plan.park:
            await self._residents.relieve(plan.park)
        elif plan.blocked and not plan.shares and not await self._residents.drop_any_follower():
            live = self._residents.at(plan.blocked[0])
            capacity = await self._core.engine.capacity()
            self._core.back_off(live, NodeCapacityError("pages", 1, capacity.pages_free))
