"""Append and Generate: the two operations that make a session grow."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from forkpoint.chat import PromptIds
from forkpoint.errors import (
    AbortedError,
    ContextFullError,
    ForkpointError,
    InvalidFieldError,
    NodeDrainingError,
    QueueFullError,
)
from forkpoint.ids import new_id
from forkpoint.limits import SESSION_QUEUE_MAX
from forkpoint.server.session.api import AppendCall, AppendResult, GenerateCall, GenerateEvent, Reader
from forkpoint.server.session.claims import Claims
from forkpoint.server.session.generation import RunningGeneration
from forkpoint.server.session.inputs import check_durability, check_generate, check_room, prompt_of
from forkpoint.server.session.live import LiveSession, Place
from forkpoint.server.session.stream import GenerationStream
from forkpoint.server.session.usage import UsageCounter
from forkpoint.statestore.calls import AppendTokens, BeginGeneration
from forkpoint.statestore.records import (
    FinishReason,
    GenerationParams,
    GenerationRow,
    Kind,
    SamplingParams,
    SessionRow,
)

REPLAY_EPOCH = -1
"""Epoch of a call that only asks for its stored result: no session has it."""


@dataclass(frozen=True, slots=True)
class Attached:
    """A reader's view of a generation."""

    row: GenerationRow
    branch: str
    head: int
    epoch: int
    live: LiveSession | None
    running: RunningGeneration | None


class Writers:
    """Runs as the node's own tasks: a caller that goes away changes nothing."""

    def __init__(self, claims: Claims, usage: UsageCounter) -> None:
        self._claims = claims
        self._core = claims.core
        self._usage = usage

    async def append(self, call: AppendCall) -> AppendResult:
        """Durable when it returns; prefill follows."""
        facts = self._core.engine.facts
        check_durability(call.durability, self._core.catalog.durability)
        if call.input.token_ids is None and call.input.text is None and call.input.chat is None:
            raise InvalidFieldError("input", "nothing to append")
        prompt = await prompt_of(call.input, self._core.codec, facts.vocab_size)
        return await self._core.tasks.run(self._append(call, prompt), f"append {call.name}")

    async def _append(self, call: AppendCall, prompt: PromptIds) -> AppendResult:
        async with self._claims.request(call.request) as stored:
            if stored:
                replay = AppendTokens(call.name, REPLAY_EPOCH, (), request=call.request)
                outcome = await self._core.catalog.append(replay)
                return AppendResult(outcome, prompt.at(outcome.start))
            return await self._claims.owned(call.name, lambda live: self._append_to(live, call, prompt))

    async def _append_to(self, live: LiveSession, call: AppendCall, prompt: PromptIds) -> AppendResult:
        async with self._claims.writing(live, "append"):
            tokens = prompt.at(live.head)
            await self._check_room(live, len(tokens))
            outcome = await self._core.catalog.append(
                AppendTokens(
                    live.name,
                    live.epoch,
                    tokens,
                    expected_position=call.expected_position,
                    expected_head_hash=call.expected_head_hash,
                    request=call.request,
                )
            )
            if outcome.start == live.head and not outcome.replayed:
                self._grown(live, tokens, outcome.head_hash)
            else:
                # Another node executed it before this one owned the session, or the store lost the end that is known
                # here: what the store holds counts.
                self._claims.doubt(live)
            return AppendResult(outcome, prompt.at(outcome.start) if outcome.replayed else tokens)

    def _grown(self, live: LiveSession, tokens: tuple[int, ...], head_hash: bytes) -> None:
        if tokens:
            live.grow(tokens, Kind.PROMPT, head_hash)
            live.wants_prefill = True
            live.last_used = self._core.ticket()
            self._core.counters.prompt_tokens += len(tokens)
        self._core.wake()

    async def generate(self, call: GenerateCall, reader: Reader) -> AsyncIterator[GenerateEvent]:
        """Begin or re-attach, then read. Closing the iterator detaches; with cancel_on_disconnect it ends the
        generation as well, unless the node sent the reader away."""
        attached = await self._join(call, reader)
        stream = GenerationStream(
            self._core, self._usage, attached.row, attached.branch, attached.live, attached.running
        )
        ended = False
        if attached.running is not None:
            attached.running.readers += 1
        try:
            async for event in stream.events(call.resume_position, attached.head, attached.epoch):
                yield event
            ended = True
        except ForkpointError:
            # We end it, and the caller may come again.
            ended = True
            raise
        finally:
            if attached.running is not None:
                attached.running.readers -= 1
            if not ended:
                self._left(call, attached, reader)

    async def _join(self, call: GenerateCall, reader: Reader) -> Attached:
        """Attach in the node's own task: when the caller goes away meanwhile, the task sees to what that means."""
        waits = True

        async def attach() -> Attached:
            attached = await self._attach(call)
            if not waits:
                self._left(call, attached, reader)
            return attached

        try:
            return await self._core.tasks.run(attach(), f"generate {call.name}")
        finally:
            waits = False

    def _left(self, call: GenerateCall, attached: Attached, reader: Reader) -> None:
        running = attached.running
        if self._core.leaving or reader.sent_away:
            return  # it is the node that goes, not the caller
        if call.cancel_on_disconnect and running is not None and running.finish is None:
            running.ending = running.ending or FinishReason.CANCELLED
            self._core.wake()

    async def _attach(self, call: GenerateCall) -> Attached:
        async with self._claims.request(call.request) as stored:
            if stored:
                return await self._again(call)
            facts = self._core.engine.facts
            prompt = await prompt_of(call.input, self._core.codec, facts.vocab_size)
            check_generate(call, facts.vocab_size)
            return await self._claims.owned(call.name, lambda live: self._begin(live, call, prompt))

    async def _begin(self, live: LiveSession, call: GenerateCall, prompt: PromptIds) -> Attached:
        async with self._claims.writing(live, "generate"):
            tokens = prompt.at(live.head)
            await self._check_room(live, len(tokens))
            self._check_queue(live)
            outcome = await self._core.catalog.begin_generation(
                BeginGeneration(
                    live.name,
                    live.epoch,
                    new_id("g"),
                    self._params(call, live.row.seed),
                    tokens,
                    call.expected_position,
                    call.expected_head_hash,
                    call.request,
                )
            )
            if outcome.replayed or outcome.head != live.head + len(tokens):
                self._claims.doubt(live)
                return await self._again(call)
            running = RunningGeneration(outcome.row, self._core.codec)
            live.generation = running
            live.will_sample = True
            self._core.counters.generations_started += 1
            self._grown(live, tokens, outcome.head_hash)
            return Attached(outcome.row, live.row.branch, outcome.head, live.epoch, live, running)

    async def _check_room(self, live: LiveSession, count: int) -> None:
        """Raises ContextFullError."""
        try:
            check_room(live.name, live.head, count, self._core.engine.facts.context_limit)
        except ContextFullError:
            await self._claims.ours_still(live)  # a later owner may have turned it back
            raise

    def _check_queue(self, live: LiveSession) -> None:
        """Raises QueueFullError when too many generations wait for a slot already."""
        if live.place is not Place.PARKED:
            return
        waiting = sum(
            other.place is Place.PARKED and other.generation is not None for other in self._core.lives.values()
        )
        if waiting >= SESSION_QUEUE_MAX:
            raise QueueFullError("sessions that wait for a slot", SESSION_QUEUE_MAX)

    async def _again(self, call: GenerateCall) -> Attached:
        """Re-attach to what an equal call began."""
        begin = BeginGeneration(call.name, REPLAY_EPOCH, "", self._params(call, 0), request=call.request)
        row = (await self._core.catalog.begin_generation(begin)).row
        live: LiveSession | None = None
        running: RunningGeneration | None = None
        if row.finish is None:
            if self._core.draining:
                raise NodeDrainingError(self._core.options.node, call.resume_position)
            live, running = await self._claims.owned(call.name, partial(self._running, row.generation))
            if running is None:
                live, row = None, await self._core.catalog.get_generation(call.name, row.generation)
        session = await self._core.catalog.get_session(call.name)
        self._check_branch(row, session)
        return Attached(row, session.branch, session.head, session.epoch, live, running)

    async def _running(self, generation: str, live: LiveSession) -> tuple[LiveSession, RunningGeneration | None]:
        """What runs it here; nothing when it has ended."""
        if live.generation is None or live.generation.row.generation != generation:
            await self._claims.ours_still(live)
            # Or it began by a write that was given up, and took effect after the store was asked what it had.
            self._claims.doubt(live)
            await self._claims.confirmed(live)
        running = live.generation
        return live, running if running is not None and running.row.generation == generation else None

    def _check_branch(self, row: GenerationRow, session: SessionRow) -> None:
        if row.branch != session.branch:
            raise AbortedError(f"{session.name} was rewound: its generation at {row.start} is on a branch it left")

    def _params(self, call: GenerateCall, session_seed: int) -> GenerationParams:
        sampling = SamplingParams(
            call.temperature,
            call.top_k,
            call.top_p,
            call.min_p,
            session_seed if call.seed is None else call.seed,
        )
        stop_ids = tuple(dict.fromkeys((*call.stop_ids, *self._core.options.end_ids)))
        return GenerationParams(sampling, call.max_tokens, call.stop_text, stop_ids, call.logprobs)
