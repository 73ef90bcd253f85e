"""A running generation: when it ends is read off the log, before anything is sampled."""

from collections.abc import Iterable

from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import Usage
from forkpoint.server.session.ports import TextCodec
from forkpoint.server.session.text import TextTrail
from forkpoint.statestore.records import FinishReason, GenerationRow


class RunningGeneration:
    """An open generation row with what the log holds of it.

    `ending`: somebody asked for its end; it ends at the next token border. `finish`, `end` and `end_hash` are set when
    the end was committed. `readers`: streams that read it now; `usage`: of the log up to `end`, for those readers that
    a deletion overtakes.
    """

    def __init__(self, row: GenerationRow, codec: TextCodec) -> None:
        self.row = row
        self.trail = TextTrail(row.start, codec.token_bytes, row.params.stop_text, row.params.stop_ids)
        self.ending: FinishReason | None = None
        self.finish: FinishReason | None = None
        self.end = -1
        self.end_hash = b""
        self.readers = 0
        self.usage: Usage | None = None
        sampling = row.params.sampling
        self.sample = Sample(
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.seed,
            row.params.logprobs,
        )

    def feed(self, token_ids: Iterable[int]) -> None:
        """Take tokens that the log holds."""
        for token_id in token_ids:
            self.trail.feed(token_id)

    @property
    def is_complete(self) -> bool:
        """Whether a stop or the length has been reached: the log holds no more of its tokens."""
        limit = self.row.params.max_tokens
        return self.trail.stop_position >= 0 or 0 < limit <= self.trail.position - self.row.start

    def due(self, context_limit: int) -> FinishReason | None:
        """Why it must end at the log's head, None when it goes on."""
        return self.end_of(self.trail, context_limit) or self.ending

    def due_after(self, token_id: int, context_limit: int) -> FinishReason | None:
        """Why it ends with one more token, None when it goes on. Changes nothing."""
        trail = self.trail.copy()
        trail.feed(token_id)
        return self.end_of(trail, context_limit)

    def end_of(self, trail: TextTrail, context_limit: int) -> FinishReason | None:
        """The log's own reasons: a stop, the length, the context limit."""
        limit = self.row.params.max_tokens
        if trail.stop_position >= 0:
            return FinishReason.STOP
        if limit > 0 and trail.position - self.row.start >= limit:
            return FinishReason.LENGTH
        return FinishReason.CONTEXT_FULL if trail.position >= context_limit else None

    def finished(self, reason: FinishReason, end: int, end_hash: bytes) -> None:
        """The end is durable."""
        self.finish, self.end, self.end_hash = reason, end, end_hash
