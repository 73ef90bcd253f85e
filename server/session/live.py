"""A session that this node owns: its row, its place on the engine, and the end of its log."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from forkpoint.errors import SessionBusyError
from forkpoint.ids import SessionName
from forkpoint.limits import STREAM_BUFFER_TOKENS
from forkpoint.server.session.changes import Signal
from forkpoint.server.session.generation import RunningGeneration
from forkpoint.server.session.stored_parts import StoredParts
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.records import CheckpointPolicy, Kind, LogSlice, SessionRow

NO_CHECKPOINTS: Final = CheckpointPolicy(0, on_turn_end=False)
TRIM_SLACK: Final = 1024
"""Tokens that may lie before the needed ones until they are cut off in one go."""


class Place(Enum):
    """Where the session's state is."""

    PARKED = "PARKED"
    """Not on the engine: in checkpoints and the log."""
    RESTORING = "RESTORING"
    RESIDENT = "RESIDENT"


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did. `source`: "checkpoint", "empty" (replay from 0) or "image" (a fork's)."""

    position: int
    replayed_tokens: int
    bytes: int
    source: str
    exact: bool
    fallbacks: int


class LogTail:
    """The last tokens of a log: positions [start, end)."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.token_ids: list[int] = []
        self.kinds: list[Kind] = []
        self.logprobs: list[float | None] = []

    @property
    def end(self) -> int:
        """The head."""
        return self.start + len(self.token_ids)

    def extend(self, token_ids: tuple[int, ...], kind: Kind, logprobs: tuple[float | None, ...] = ()) -> None:
        """Go on by committed tokens."""
        self.token_ids += token_ids
        self.kinds += [kind] * len(token_ids)
        self.logprobs += logprobs or (None,) * len(token_ids)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Token ids of [start, end), which must lie within."""
        if not self.start <= start <= end <= self.end:
            raise IndexError(f"[{start}, {end}) is not within [{self.start}, {self.end})")
        return tuple(self.token_ids[start - self.start : end - self.start])

    def slice(self, start: int, end: int) -> LogSlice:
        """Tokens [start, end), which must lie within."""
        tokens = self.tokens(start, end)
        low, high = start - self.start, end - self.start
        return LogSlice(start, tokens, tuple(self.kinds[low:high]), tuple(self.logprobs[low:high]))

    def trim(self, needed: int) -> None:
        """Forget what lies before `needed`, once it is worth it."""
        excess = min(needed, self.end) - self.start
        if excess > TRIM_SLACK:
            self._drop(excess)

    def prepend(self, earlier: LogSlice) -> None:
        """Take earlier tokens again; those that the tail has already are left out. `earlier` must reach its start."""
        count = self.start - earlier.start
        if count <= 0:
            return
        if earlier.start + len(earlier.token_ids) < self.start:
            raise IndexError(f"a gap before {self.start}")
        self.token_ids[:0] = earlier.token_ids[:count]
        self.kinds[:0] = earlier.kinds[:count]
        self.logprobs[:0] = earlier.logprobs[:count]
        self.start = earlier.start

    def cut(self, position: int) -> None:
        """Forget what lies at and behind `position`."""
        keep = max(0, position - self.start)
        del self.token_ids[keep:], self.kinds[keep:], self.logprobs[keep:]
        self.start = min(self.start, position)

    def _drop(self, count: int) -> None:
        del self.token_ids[:count], self.kinds[:count], self.logprobs[:count]
        self.start += count


class LiveSession:
    """All fields are changed on the node's asyncio loop only; what a step works on is fixed before it runs.

    `needed_from`: first position that the tail must keep beside the readers' buffer. `chain`: hash chain of the
    consumed tokens, while resident. `known_grids`: grid positions whose checkpoint is in the store. `gone`: why the
    node no longer has the session; readers raise it. `trouble`: last failure and its number; readers that came before
    it raise it.
    """

    def __init__(self, row: SessionRow) -> None:
        self.name: SessionName = row.name
        self.row = row
        self.place = Place.PARKED
        self.sequence: int | None = None
        self.consumed = 0
        self.can_sample = False
        self.chain: HashChain | None = None
        self.tail = LogTail(row.head)
        self.needed_from: int | None = None
        self.generation: RunningGeneration | None = None
        self.ended: RunningGeneration | None = None
        """The last one that came to its end here: readers may still be on their way to it."""
        self.writer = ""
        self.wanted = 0
        """Callers that need the state on the engine."""
        self.wants_prefill = False
        self.will_sample = True
        self.waiting_since = 0
        self.admitted = 0
        self.slice_start = 0
        """Head when it was admitted."""
        self.last_used = 0
        self.last_seen_used = -1
        """`last_used` when the node looked for dormant sessions."""
        self.held = False
        """No step may run it: a tick's operation or a pause works on it."""
        self.moving = ""
        """Id of the migration that takes it to another node."""
        self.arrived = ""
        """Id of the migration that brought it here."""
        self.closing = False
        """It is about to leave for another node: no operation begins any more, until it has left or stays after all."""
        self.on_trial = False
        """Its last owners may have died of it: it runs by itself."""
        self.suspect = False
        """A write's answer was lost: the store may know more."""
        self.numerics_ids: tuple[str, ...] = ()
        self.exact = row.exact
        self.restored: Restored | None = None
        """The last restore."""
        self.known_grids: set[int] = set()
        self.stored = StoredParts()
        self.consumed_once = row.head
        """Tokens before this position were consumed by somebody before (as far as a new owner can know): consuming
        them again is replay."""
        self.last_grid = 0
        """Grid position of the newest checkpoint."""
        self.is_saved = True
        """No checkpoint of it is being written."""
        self.gone: Exception | None = None
        self.trouble: tuple[int, Exception | None] = (0, None)
        self.failures = 0
        self.retry_at = 0.0
        self.recoveries = 0
        """Restores in a row that did not get it beyond `failed_at`."""
        self.failed_at = -1
        """Position that it must get beyond to count as well again."""
        self.changed = Signal()

    @property
    def has_row_ahead(self) -> bool:
        """Whether a step can sample: from the row of the last token, or from that of one that it consumes first. Not
        after a restore exactly at the head, for a caller who wanted the state alone."""
        return self.can_sample or self.consumed < self.head

    @property
    def head(self) -> int:
        """Length of the committed log."""
        return self.row.head

    @property
    def epoch(self) -> int:
        """The epoch this node owns it under."""
        return self.row.epoch

    def begin_writer(self, operation: str) -> None:
        """Claim the session for one append or generate. Raises SessionBusyError, and why the session left."""
        if self.gone is not None:
            raise self.gone
        if self.writer:
            raise SessionBusyError(str(self.name), self.writer, self.head)
        if self.generation is not None:
            raise SessionBusyError(str(self.name), "generate", self.head)
        self.writer = operation

    def end_writer(self) -> None:
        """Give the claim back."""
        self.writer = ""
        self.changed.fire()

    def grow(
        self, token_ids: tuple[int, ...], kind: Kind, head_hash: bytes, logprobs: tuple[float | None, ...] = ()
    ) -> None:
        """Tokens were committed at the head."""
        self.tail.extend(token_ids, kind, logprobs)
        self.row = replace(self.row, head=self.tail.end, head_hash=head_hash)
        self.trim()
        self.changed.fire()

    def trim(self) -> None:
        """Let go of tokens that neither the engine nor a prompt reader needs."""
        needed = self.head if self.needed_from is None else self.needed_from
        self.tail.trim(min(needed, self.head - STREAM_BUFFER_TOKENS))

    @property
    def policy(self) -> CheckpointPolicy:
        """When checkpoints are due: never for a transient session. What leaves the engine is kept all the same."""
        return NO_CHECKPOINTS if self.row.transient else self.row.policy

    def note(self, row: SessionRow) -> None:
        """Take a newer row; head and hash stay those that the tail reaches."""
        self.row = replace(row, head=self.row.head, head_hash=self.row.head_hash)

    def advance(self, token_ids: tuple[int, ...]) -> int:
        """The engine consumed these. Returns how many of them were replay."""
        start, self.consumed = self.consumed, self.consumed + len(token_ids)
        replayed = max(0, min(self.consumed, self.consumed_once) - start)
        self.consumed_once = max(self.consumed_once, self.consumed)
        if self.consumed > self.failed_at:
            self.recoveries = 0
        if token_ids:
            self.can_sample = True
        if self.chain is not None:
            self.chain.extend(token_ids)
        self.needed_from = self.consumed
        self.trim()
        self.changed.fire()
        return replayed

    def fail(self, error: Exception) -> None:
        """Tell the readers of now; those who come later see the next failure."""
        self.trouble = (self.trouble[0] + 1, error)
        self.changed.fire()

    @property
    def is_idle(self) -> bool:
        """Nobody wants anything of it."""
        return not (self.generation is not None or self.writer or self.wanted or self.wants_prefill or self.moving)

    @property
    def is_dormant(self) -> bool:
        """It has no slot, nobody wants one for it, and the store has all of it."""
        return self.is_idle and self.place is Place.PARKED and self.is_saved and not (self.held or self.suspect)

    @property
    def runs_alone(self) -> bool:
        """A step may fail, or end the process, by its fault: no other session is to be in it."""
        return self.failures > 0 or self.on_trial

    def leave(self, error: Exception) -> None:
        """The node has it no longer. The first reason stays."""
        self.gone = self.gone or error
        self.changed.fire()
