"""Export and import: a session's log and generations, without any state."""

from collections.abc import AsyncIterator

from forkpoint.errors import AlreadyExistsError, LogCorruptError, StaleEpochError, StateIncompatibleError
from forkpoint.ids import SessionName, new_id
from forkpoint.server.session.api import CreateSession, ExportedSession, SessionView
from forkpoint.server.session.claims import Claims
from forkpoint.server.session.inputs import check_room, check_tokens
from forkpoint.server.session.lifecycle import Lifecycle
from forkpoint.server.session.live import LiveSession
from forkpoint.server.session.logread import read_slices
from forkpoint.server.session.views import Views
from forkpoint.statestore.base import AppendTokens, BeginGeneration, StepCommit, StepStatus
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.records import FinishReason, GenerationRow, Kind, LogSlice, RequestKey, StoreMarker

IMPORT_STEP_TOKENS = 4096
"""Tokens of one import transaction."""


class Porter:
    """Writes sessions out and takes them in."""

    def __init__(self, claims: Claims, lifecycle: Lifecycle, views: Views) -> None:
        self._claims = claims
        self._core = claims.core
        self._lifecycle = lifecycle
        self._views = views

    async def head(self, name: SessionName) -> ExportedSession:
        """What an import needs beside the log."""
        row = await self._core.catalog.get_session(name)
        generations = tuple(await self._core.catalog.list_generations(name))
        marker = self._core.marker
        return ExportedSession(row, marker.model_digest, marker.tokenizer_digest, marker.namespace, generations)

    async def log(self, name: SessionName) -> AsyncIterator[LogSlice]:
        """The log up to the head of now."""
        row = await self._core.catalog.get_session(name)
        async for part in read_slices(self._core.catalog, name, 0, row.head):
            yield part

    async def take_in(
        self, name: SessionName, head: ExportedSession, slices: AsyncIterator[LogSlice], request: RequestKey | None
    ) -> SessionView:
        """Check all, then write. Raises StateIncompatibleError (another tokenizer), TokenOutOfRangeError,
        LogCorruptError (the tokens don't hash to the export's head hash), AlreadyExistsError."""
        facts = self._core.engine.facts
        if head.tokenizer_digest != facts.tokenizer_digest:
            raise StateIncompatibleError("tokenizer", head.tokenizer_digest.hex(), facts.tokenizer_digest.hex())
        tokens, kinds, logprobs = await self._collect(name, head, slices)
        async with self._claims.request(request):
            create = CreateSession(
                name, head.row.seed, head.row.policy, head.row.labels, head.row.transient, None, request
            )
            await self._lifecycle.create_claimed(create)
            row = await self._core.catalog.get_session(name)
            if row.head > 0:
                if row.head != len(tokens):
                    raise AlreadyExistsError(str(name))
                return await self._views.one(row)
            pieces = _pieces(kinds, head.generations, len(tokens))
            await self._claims.owned(name, lambda live: self._write(live, pieces, tokens, kinds, logprobs))
            return await self._views.one(await self._core.catalog.get_session(name))

    async def _collect(
        self, name: SessionName, head: ExportedSession, slices: AsyncIterator[LogSlice]
    ) -> tuple[list[int], list[Kind], list[float | None]]:
        tokens: list[int] = []
        kinds: list[Kind] = []
        logprobs: list[float | None] = []
        facts = self._core.engine.facts
        async for part in slices:
            if part.start != len(tokens):
                raise LogCorruptError(str(name), len(tokens), len(tokens), f"the next piece begins at {part.start}")
            check_tokens(part.token_ids, facts.vocab_size)
            tokens += part.token_ids
            kinds += part.kinds
            logprobs += part.logprobs
            check_room(name, len(tokens), 0, facts.context_limit)
        source = StoreMarker(0, head.namespace, head.model_digest, head.tokenizer_digest)
        chain = HashChain.root(source)
        chain.extend(tokens)
        if len(tokens) != head.row.head or chain.head_hash() != head.row.head_hash:
            raise LogCorruptError(str(name), 0, 0, "the tokens do not hash to the export's head hash")
        return tokens, kinds, logprobs

    async def _write(
        self,
        live: LiveSession,
        pieces: list[tuple[int, int, GenerationRow | None]],
        tokens: list[int],
        kinds: list[Kind],
        logprobs: list[float | None],
    ) -> None:
        async with self._claims.writing(live, "import"):
            for start, end, generation in pieces:
                if generation is None:
                    append = AppendTokens(live.name, live.epoch, tuple(tokens[start:end]), kinds[start])
                    outcome_hash = (await self._core.catalog.append(append)).head_hash
                else:
                    part = (tuple(tokens[start:end]), tuple(logprobs[start:end]))
                    outcome_hash = await self._generation(live, start, part, generation)
                live.grow(tuple(tokens[start:end]), kinds[start], outcome_hash, tuple(logprobs[start:end]))
            live.wants_prefill = True
            self._core.wake()

    async def _generation(
        self,
        live: LiveSession,
        start: int,
        part: tuple[tuple[int, ...], tuple[float | None, ...]],
        row: GenerationRow,
    ) -> bytes:
        """One finished generation, as it was; one that was open ends as cancelled."""
        token_ids, logprobs = part
        catalog = self._core.catalog
        generation = new_id("g")
        await catalog.begin_generation(BeginGeneration(live.name, live.epoch, generation, row.params))
        finish = row.finish or FinishReason.CANCELLED
        commit = StepCommit(live.name, live.epoch, start, token_ids, generation, logprobs, finish)
        outcome = (await catalog.commit_step([commit]))[0]
        if outcome.status is not StepStatus.COMMITTED:
            raise StaleEpochError(str(live.name), live.epoch, outcome.epoch)
        return outcome.head_hash


def _pieces(
    kinds: list[Kind], generations: tuple[GenerationRow, ...], head: int
) -> list[tuple[int, int, GenerationRow | None]]:
    """The log cut into finished generations and runs of one kind between them, in order."""
    pieces: list[tuple[int, int, GenerationRow | None]] = []
    position = 0
    for row in sorted(generations, key=lambda g: g.start):
        end = head if row.end is None else row.end
        if row.start < max(position, 1) or end > head:
            continue
        pieces += _runs(kinds, position, row.start)
        pieces.append((row.start, end, row))
        position = end
    return pieces + _runs(kinds, position, head)


def _runs(kinds: list[Kind], start: int, end: int) -> list[tuple[int, int, GenerationRow | None]]:
    runs: list[tuple[int, int, GenerationRow | None]] = []
    while start < end:
        stop = start + 1
        while stop < end and kinds[stop] is kinds[start] and stop - start < IMPORT_STEP_TOKENS:
            stop += 1
        runs.append((start, stop, None))
        start = stop
    return runs
