"""Export and import: a session's log and generations, without any state."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from forkpoint.errors import AlreadyExistsError, LogCorruptError, StateIncompatibleError
from forkpoint.ids import SessionName, new_id
from forkpoint.limits import REQUEST_ID_BYTES_MAX
from forkpoint.server.session.api import CreateSession, ExportedSession, SessionView
from forkpoint.server.session.claims import Claims
from forkpoint.server.session.inputs import check_room, check_tokens
from forkpoint.server.session.lifecycle import Lifecycle
from forkpoint.server.session.live import LiveSession
from forkpoint.server.session.logread import read_all, read_slices
from forkpoint.server.session.views import Views
from forkpoint.statestore.calls import AppendTokens, PastGeneration
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.records import FinishReason, GenerationRow, Kind, LogSlice, RequestKey, StoreMarker

IMPORT_STEP_TOKENS = 4096
"""Tokens of one import transaction."""


class Porter:
    """Writes sessions out and takes them in.

    An import is many transactions, each of them whole turns or parts of the log between two. One that broke off leaves
    a session with the log up to some turn; the same call again (by its request id) goes on from there.
    """

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
            done = None if request is None else _last_append(request)
            if done is None or await self._core.catalog.find_request(done) is None:
                log = ImportedLog(tokens, kinds, logprobs, head.generations)
                await self._claims.owned(name, lambda live: self._write(live, log, done))
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

    async def _write(self, live: LiveSession, log: "ImportedLog", done: RequestKey | None) -> None:
        async with self._claims.writing(live, "import"):
            there = (await read_all(self._core.catalog, live.name, 0, live.head)).token_ids
            if list(there) != log.token_ids[: live.head]:
                raise AlreadyExistsError(str(live.name))
            pieces = [piece for piece in log.pieces() if piece[0] >= live.head] or [(live.head, live.head, None)]
            for number, (start, end, generation) in enumerate(pieces, 1):
                tokens, kind, logprobs = log.part(start, end)
                past = None
                if generation is not None:
                    # One that was open ends as cancelled.
                    finish, request_id = generation.finish or FinishReason.CANCELLED, generation.request_id
                    past = PastGeneration(new_id("g"), generation.params, finish, request_id, generation.input_start)
                append = AppendTokens(
                    live.name,
                    live.epoch,
                    tokens,
                    kind,
                    expected_position=start,
                    request=done if number == len(pieces) else None,
                    logprobs=logprobs,
                    past=past,
                )
                outcome = await self._core.catalog.append(append)
                live.grow(tokens, kind, outcome.head_hash, logprobs)
            live.wants_prefill = True
            self._core.wake()


@dataclass(frozen=True, slots=True)
class ImportedLog:
    """What an import writes: all tokens with their kinds and logprobs, and the generations among them."""

    token_ids: list[int]
    kinds: list[Kind]
    logprobs: list[float | None]
    generations: tuple[GenerationRow, ...]

    def pieces(self) -> list[tuple[int, int, GenerationRow | None]]:
        """What one transaction each writes, in order."""
        return _pieces(self.kinds, self.generations, len(self.token_ids))

    def part(self, start: int, end: int) -> tuple[tuple[int, ...], Kind, tuple[float | None, ...]]:
        """Tokens [start, end), which are of one kind. No logprobs when none of them has one."""
        logprobs = tuple(self.logprobs[start:end])
        kind = self.kinds[start] if start < end else Kind.GENERATED
        known = any(value is not None for value in logprobs)
        return tuple(self.token_ids[start:end]), kind, logprobs if known else ()


def _last_append(request: RequestKey) -> RequestKey:
    """The key of an import's last append: when it is stored the import is over. Longer than any id of a caller."""
    return replace(request, request_id=f"{request.request_id.ljust(REQUEST_ID_BYTES_MAX)} imported")


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
