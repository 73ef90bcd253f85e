"""The store's two ports: Catalog (small, transactional) and BlobStore (large, immutable).

Backends are dumb: retry, limits, metrics and fault injection wrap these ports. Every method may raise
StoreUnavailableError (the store can't be reached or refuses writes) and, where it writes, StoreFullError; then
nothing of the call took effect, or (the answer was lost) all of it did, and the request id tells which.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from forkpoint.ids import SessionName
from forkpoint.statestore.records import (
    CheckpointPolicy,
    CheckpointRow,
    Durability,
    FinishReason,
    GenerationParams,
    GenerationRow,
    Kind,
    LogSlice,
    ManifestRow,
    NewSession,
    NodeRow,
    RequestKey,
    SessionRow,
    SessionState,
    StoreMarker,
    WorkflowRow,
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


class Catalog(Protocol):
    """Workflows, sessions, token logs, generations, manifests, leases, nodes and request ids.

    Each method is one transaction: it happens wholly or not at all, and has reached `durability` when it returns.
    Cancelling a call does not undo it. No read sees half a transaction. Rows come back as values; changing them
    changes nothing. Sessions in state DELETED answer only get_session, list_sessions(show_deleted) and
    undelete_session; every other method raises NotFoundError for them. An epoch that is not the session's raises
    StaleEpochError (commit_step reports it per session instead).

    A `request` is looked up before anything else. When it was answered in the last 24 hours the stored answer comes
    back, whatever became of the session since; with another digest, or of another method, it is RequestIdReusedError.
    The answer is stored in the transaction of the effect; a call that fails stores none.
    """

    @property
    def durability(self) -> Durability:
        """The class every acknowledgement of this catalog reaches."""
        ...

    @property
    def broken(self) -> str | None:
        """Why every call raises StoreUnavailableError until the store is opened anew; None while it works, and after
        failures that pass (a full disk, a lost answer). Never goes back to None."""
        ...

    @property
    def marker(self) -> StoreMarker:
        """The marker it was opened with. Raises StoreUnavailableError before open."""
        ...

    async def open(self, marker: StoreMarker) -> None:
        """Open or create the store. Raises StateIncompatibleError when the store was made for another marker."""
        ...

    async def close(self) -> None:
        """Release everything. Idempotent. Calls after it raise StoreUnavailableError."""
        ...

    # --- nodes -------------------------------------------------------------------------------------------------
    async def register_node(self, node: NodeRow) -> None:
        """Add an incarnation with counter 1. Raises AlreadyExistsError for a known incarnation."""
        ...

    async def renew_lease(self, incarnation: str) -> int:
        """Add one to the counter and return it. Raises NotFoundError after remove_node."""
        ...

    async def remove_node(self, incarnation: str) -> None:
        """Forget an incarnation that ended well. Idempotent."""
        ...

    async def list_nodes(self) -> list[NodeRow]:
        """All incarnations, in order of registration."""
        ...

    # --- workflows ---------------------------------------------------------------------------------------------
    async def create_workflow(self, row: WorkflowRow, request: RequestKey | None = None) -> WorkflowRow:
        """Raises AlreadyExistsError, unless `request` stored this very creation before."""
        ...

    async def get_workflow(self, workflow: str) -> WorkflowRow:
        """Raises NotFoundError."""
        ...

    async def list_workflows(self, after: str, limit: int) -> list[WorkflowRow]:
        """Up to `limit` workflows whose id sorts after `after`, ascending."""
        ...

    async def update_workflow(self, workflow: str, labels: dict[str, str], revision: int | None) -> WorkflowRow:
        """Replace the labels. Raises EtagMismatchError when `revision` is given and is not the row's."""
        ...

    async def delete_workflow(self, workflow: str) -> None:
        """Raises PreconditionError while it has sessions that are not deleted, NotFoundError when unknown."""
        ...

    # --- sessions ----------------------------------------------------------------------------------------------
    async def create_session(self, new: NewSession, request: RequestKey | None = None) -> tuple[SessionRow, bool]:
        """An empty session, owner "", epoch 0. Returns (row, replayed). NotFoundError for an unknown workflow."""
        ...

    async def get_session(self, name: SessionName) -> SessionRow:
        """Also of a deleted session. Raises NotFoundError."""
        ...

    async def list_sessions(
        self, workflow: str | None, after: SessionName | None, limit: int, show_deleted: bool = False
    ) -> list[SessionRow]:
        """Up to `limit` sessions that sort after `after`, ascending by name; all workflows when None."""
        ...

    async def list_open_generations(self) -> list[SessionRow]:
        """Sessions with an unfinished generation, whoever owns them, most recently updated first. Costs by their number
        alone."""
        ...

    async def update_session(
        self,
        name: SessionName,
        revision: int | None,
        labels: dict[str, str] | None = None,
        policy: CheckpointPolicy | None = None,
        expire_us: int | None = None,
    ) -> SessionRow:
        """Change what is given. Raises EtagMismatchError."""
        ...

    async def delete_session(self, name: SessionName, purge_us: int, request: RequestKey | None = None) -> SessionRow:
        """Hide the name: state DELETED, owner "", epoch + 1, any open generation CANCELLED. Descendants live on."""
        ...

    async def undelete_session(self, name: SessionName) -> SessionRow:
        """Back to PAUSED. Raises PreconditionError when it is not deleted."""
        ...

    async def acquire(
        self, name: SessionName, incarnation: str, expected_epoch: int, request: RequestKey | None = None
    ) -> SessionRow:
        """Make `incarnation` the owner, epoch + 1, state ACTIVE. Raises StaleEpochError unless at `expected_epoch`."""
        ...

    async def release(
        self, name: SessionName, epoch: int, state: SessionState, reason: str = "", request: RequestKey | None = None
    ) -> SessionRow:
        """Give up ownership: owner "", state as given (ACTIVE, PAUSED or QUARANTINED). The epoch stays."""
        ...

    async def note_numerics(
        self, name: SessionName, epoch: int, numerics_ids: tuple[str, ...], exact: bool
    ) -> SessionRow:
        """Record which numerics ids the session's state passed through."""
        ...

    # --- log and generations -----------------------------------------------------------------------------------
    async def append(self, append: AppendTokens) -> AppendOutcome:
        """Append to the log. Raises PositionConflictError, LogTailMissingError (the store knows less than the
        caller expects), RequestIdReusedError; SessionBusyError while a generation is open. With a past generation also
        what begin_generation raises."""
        ...

    async def begin_generation(self, begin: BeginGeneration) -> BeginOutcome:
        """As append, then open a generation. Raises SessionBusyError while another one is open, EmptySessionError."""
        ...

    async def commit_step(self, commits: Sequence[StepCommit]) -> list[StepOutcome]:
        """Append generated tokens of many sessions in one transaction: an outcome each, in order. A stale epoch or
        a conflict skips that session's rows and never fails the others."""
        ...

    async def open_generation(self, name: SessionName) -> GenerationRow | None:
        """The session's unfinished generation."""
        ...

    async def get_generation(self, name: SessionName, generation: str) -> GenerationRow:
        """Raises NotFoundError."""
        ...

    async def list_generations(self, name: SessionName) -> list[GenerationRow]:
        """Generations that started on the session's own branch, ascending by start."""
        ...

    async def find_request(self, request: RequestKey) -> str | None:
        """JSON of the stored result, None when the id is new. Raises RequestIdReusedError on another digest."""
        ...

    async def read_log(self, name: SessionName, start: int, limit: int) -> LogSlice:
        """Up to `limit` tokens from `start`, across ancestors. Empty at the head; PositionBeyondHeadError beyond it;
        LogCorruptError when a record fails its checksum or the hash chain."""
        ...

    # --- forks -------------------------------------------------------------------------------------------------
    async def fork(self, fork: ForkSessions) -> ForkOutcome:
        """N children, unowned and ACTIVE, in one transaction whose cost depends on N alone. PositionBeyondHeadError;
        AlreadyExistsError when a child's name is taken (then none is made)."""
        ...

    async def rewind(
        self, name: SessionName, epoch: int, position: int, request: RequestKey | None = None
    ) -> tuple[SessionRow, bool]:
        """Fork at `position` and let the name point at the new branch. The old branch lives while one descends
        from it. SessionBusyError while a generation is open. Returns (row, replayed)."""
        ...

    # --- checkpoints -------------------------------------------------------------------------------------------
    async def put_checkpoint(
        self,
        row: CheckpointRow,
        manifest: bytes,
        epoch: int,
        request: RequestKey | None = None,
        replace_manifest: bool = False,
    ) -> CheckpointRow:
        """Commit a manifest, after all its blobs are durable, and the session's checkpoint that names it. The same
        (numerics id, position, hash) again keeps the stored manifest, unless `replace_manifest`: how a damaged one is
        healed. StaleEpochError; PositionBeyondHeadError; PreconditionError when the hash is not the log's."""
        ...

    async def list_checkpoints(self, name: SessionName) -> list[CheckpointRow]:
        """Checkpoints made under this session's name whose chain hash lies on its chain, ascending by position."""
        ...

    async def get_checkpoint(self, name: SessionName, checkpoint: str) -> tuple[CheckpointRow, bytes]:
        """The row and its manifest. Raises NotFoundError."""
        ...

    async def find_manifests(self, points: Sequence[tuple[int, bytes]]) -> list[ManifestRow]:
        """Manifests at any of the given (grid position, chain hash), any numerics id, descending by position."""
        ...

    async def list_manifests(self) -> list[ManifestRow]:
        """All manifests of the store (for check)."""
        ...


class BlobStore(Protocol):
    """Immutable bytes under the BLAKE3 digest of their *raw* content. Values here are frames (statestore/codec.py):
    a backend neither opens nor checks them. Digests are lower-case hex, 64 characters."""

    @property
    def broken(self) -> str | None:
        """As Catalog.broken."""
        ...

    async def put(self, digest: str, frame: bytes) -> bool:
        """Store and make durable; False when the digest was there already (the stored frame stays). Atomic: a reader
        sees the whole frame or nothing. Cancellation may leave the blob or not, never half of it."""
        ...

    async def get(self, digest: str) -> bytes:
        """The frame. Raises BlobMissingError."""
        ...

    async def has(self, digest: str) -> bool:
        """Whether a frame is there, and durably so: a manifest may name it. Says nothing about damage."""
        ...

    async def replace(self, digest: str, frame: bytes) -> None:
        """As put, over whatever is there: how a damaged blob is healed."""
        ...

    async def delete(self, digest: str) -> None:
        """Idempotent."""
        ...

    def digests(self) -> AsyncIterator[str]:
        """All digests, in no order; what is put or deleted meanwhile may or may not appear."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...
