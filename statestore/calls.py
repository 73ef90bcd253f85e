"""What the catalog's larger calls take and answer, as plain values."""

from dataclasses import dataclass
from enum import Enum

from forkpoint.ids import SessionName
from forkpoint.statestore.records import (
    FinishReason,
    GenerationParams,
    GenerationRow,
    Kind,
    NewSession,
    RequestKey,
    SessionRow,
)


@dataclass(frozen=True, slots=True)
class PastGeneration:
    """A generation that ran and ended elsewhere: an import records it over the tokens that it comes with."""

    generation: str
    params: GenerationParams
    finish: FinishReason
    request_id: str = ""
    """As its row tells it; no answer is stored under it."""
    input_start: int | None = None


@dataclass(frozen=True, slots=True)
class AppendTokens:
    """One append. `expected_*` are checked on first execution only; None means not checked. `logprobs`: () or one for
    each token; `past`: the tokens are this generation's, which never was open here."""

    session: SessionName
    epoch: int
    token_ids: tuple[int, ...]
    kind: Kind = Kind.PROMPT
    expected_position: int | None = None
    expected_head_hash: bytes | None = None
    request: RequestKey | None = None
    logprobs: tuple[float | None, ...] = ()
    past: PastGeneration | None = None


@dataclass(frozen=True, slots=True)
class AppendOutcome:
    """Positions [start, head) hold the append's tokens. `replayed`: this is the stored result of an earlier call."""

    start: int
    head: int
    head_hash: bytes
    epoch: int
    replayed: bool


@dataclass(frozen=True, slots=True)
class BeginGeneration:
    """Append `token_ids` (may be empty) and open a generation at the new head, in one transaction."""

    session: SessionName
    epoch: int
    generation: str
    params: GenerationParams
    token_ids: tuple[int, ...] = ()
    expected_position: int | None = None
    expected_head_hash: bytes | None = None
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class BeginOutcome:
    """The open (or, replayed, perhaps finished) generation."""

    row: GenerationRow
    head: int
    head_hash: bytes
    epoch: int
    replayed: bool


@dataclass(frozen=True, slots=True)
class StepCommit:
    """What one engine step adds to one session. `start` must be the head; `finish` ends the generation behind it."""

    session: SessionName
    epoch: int
    start: int
    token_ids: tuple[int, ...]
    generation: str
    logprobs: tuple[float | None, ...] = ()
    finish: FinishReason | None = None


class StepStatus(Enum):
    """What became of one session's part of a step."""

    COMMITTED = "COMMITTED"
    STALE_EPOCH = "STALE_EPOCH"
    CONFLICT = "CONFLICT"
    """The head is not `start`, or the generation is not open."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of one StepCommit; head and hash are the session's after the step, whatever the status."""

    status: StepStatus
    head: int
    head_hash: bytes
    epoch: int


@dataclass(frozen=True, slots=True)
class ForkSessions:
    """N children of `parent` at `position` (None: its head)."""

    parent: SessionName
    position: int | None
    children: tuple[NewSession, ...]
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class ForkOutcome:
    """The children, in the order asked for; of an earlier call when `replayed`."""

    children: tuple[SessionRow, ...]
    position: int
    replayed: bool
