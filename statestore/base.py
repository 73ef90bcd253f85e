"""The catalog's port: small, transactional. Its larger calls' values are in statestore/calls.py, the blob port in
statestore/blobs.py.

Backends are dumb: retry, limits, metrics and fault injection wrap these ports. Every method may raise
StoreUnavailableError (the store can't be reached or refuses writes) and, where it writes, StoreFullError; then
nothing of the call took effect, or (the answer was lost) all of it did, and the request id tells which.
"""

from collections.abc import Sequence
from typing import Protocol

from forkpoint.ids import SessionName
from forkpoint.statestore.calls import (
    AppendOutcome,
    AppendTokens,
    BeginGeneration,
    BeginOutcome,
    ForkOutcome,
    ForkSessions,
    StepCommit,
    StepOutcome,
)
from forkpoint.statestore.collection import CollectionCatalog
from forkpoint.statestore.records import (
    CheckpointPolicy,
    CheckpointRow,
    Durability,
    GenerationRow,
    LogSlice,
    ManifestRow,
    NewSession,
    NodeRow,
    NodeStatus,
    RequestKey,
    SessionRow,
    SessionState,
    StoreMarker,
    WorkflowRow,
)


class Catalog(CollectionCatalog, Protocol):
    """Workflows, sessions, token logs, generations, manifests, leases, nodes and request ids.

    Each method is one transaction: it happens wholly or not at all, and has reached `durability` when it returns.
    Cancelling a call does not undo it. No read sees half a transaction. Rows come back as values; changing them
    changes nothing. Sessions in state DELETED answer only get_session, list_sessions(show_deleted), undelete_session
    and retention's methods; every other one raises NotFoundError for them. An epoch that is not the session's raises
    StaleEpochError (commit_step reports it per session instead), and so does one under which nobody owns the session
    any more, or yet: who released a session writes nothing into it, though the epoch is still its own. Two calls need
    no owner: put_checkpoint, which may come late and adds nothing to the log, and end_migration.

    A `request` is looked up before anything else. When it was answered in the last 24 hours the stored answer comes
    back, whatever became of the session since; with another digest, or of another method, it is RequestIdReusedError.
    The answer is stored in the transaction of the effect; a call that fails stores none. Its workflow is the one that
    the call acts on; a backend that keeps workflows apart raises InvalidFieldError for another.
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

    async def renew_lease(self, incarnation: str, status: NodeStatus | None = None) -> int:
        """Add one to the counter and return it; `status` replaces the row's. Raises NotFoundError after
        remove_node."""
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

    async def update_workflow(
        self, workflow: str, labels: dict[str, str] | None, revision: int | None, standbys: int | None = None
    ) -> WorkflowRow:
        """Replace what is given. Raises EtagMismatchError when `revision` is given and is not the row's."""
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
        standbys: int | None = None,
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
        """Make `incarnation` the owner, epoch + 1, state ACTIVE, no migration. Raises StaleEpochError unless at
        `expected_epoch`. Taken from another owner, who did not release it, while a generation is open, `takeovers` is
        one more than it was, or 1 when the head is not `takeover_head` any more; `takeover_head` is then the head."""
        ...

    async def release(
        self, name: SessionName, epoch: int, state: SessionState, reason: str = "", request: RequestKey | None = None
    ) -> SessionRow:
        """Give up ownership: owner "", state as given (ACTIVE, PAUSED or QUARANTINED), no migration, `takeovers` 0.
        The epoch stays. Raises SessionBusyError for PAUSED while a generation is open."""
        ...

    async def release_quarantine(self, name: SessionName, request: RequestKey | None = None) -> SessionRow:
        """From QUARANTINED to ACTIVE, unowned, reason "", `takeovers` 0. Raises PreconditionError when it is not
        quarantined."""
        ...

    # --- migrations --------------------------------------------------------------------------------------------
    async def begin_migration(self, name: SessionName, epoch: int, migration: str, target: str) -> SessionRow:
        """The owner's word that the session may go to the incarnation `target`: until the migration ends, cut_over with
        its id succeeds. Raises StaleEpochError; MigrationUnderwayError while another one is under way (the same id
        again changes nothing). An id is for one migration: rewind, release, acquire and deletion end it as
        end_migration does, and then no late cut_over may find its id in use again."""
        ...

    async def end_migration(self, name: SessionName, epoch: int, migration: str) -> SessionRow:
        """The owner takes its word back: no cut_over of that migration succeeds any more. Idempotent; nothing changes
        when another one, or none, is under way. Raises StaleEpochError: then it has been cut over, or taken."""
        ...

    async def cut_over(
        self, name: SessionName, epoch: int, migration: str, incarnation: str, head: int, head_hash: bytes
    ) -> SessionRow:
        """Make `incarnation`, the migration's target, the owner: epoch + 1, no migration, `takeovers` 0. Only while
        epoch, migration, target, head and head hash are as given. Raises StaleEpochError, MigrationEndedError,
        PositionConflictError, in this order; then nothing has changed. It was made, and its answer lost, when the row
        shows `incarnation` at epoch + 1."""
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
        digests: Sequence[str] = (),
        since: int = 0,
    ) -> CheckpointRow:
        """Commit a manifest, after all its blobs are durable, and the session's checkpoint that names it. The same
        (numerics id, position, hash) again keeps the stored manifest, unless `replace_manifest`: how a damaged one is
        healed. StaleEpochError; PositionBeyondHeadError; PreconditionError when the hash is not the log's.

        `digests`: every blob that the manifest names; `since`: absolutions() as it was before the caller first looked
        whether one of them is there. BlobsCondemnedError names those of them that are condemned, by whatever tier, or
        were absolved under a number above `since`; all of them, when such numbers were forgotten."""
        ...

    async def list_checkpoints(self, name: SessionName) -> list[CheckpointRow]:
        """Checkpoints made under this session's name whose chain hash lies on its chain, ascending by position."""
        ...

    async def get_checkpoint(self, name: SessionName, checkpoint: str) -> tuple[CheckpointRow, bytes]:
        """The row and its manifest. Raises NotFoundError."""
        ...

    async def delete_checkpoint(
        self, name: SessionName, checkpoint: str, request: RequestKey | None = None
    ) -> CheckpointRow:
        """Remove the session's row, whatever needs it, and return it as it was. Its manifest stays until it is
        collected. Raises NotFoundError."""
        ...

    async def find_manifests(self, points: Sequence[tuple[int, bytes]]) -> list[ManifestRow]:
        """Manifests at any of the given (grid position, chain hash), any numerics id, descending by position."""
        ...

    # --- retention ---------------------------------------------------------------------------------------------
    async def scan_checkpoints(self, workflow: str, after: tuple[str, str] | None, limit: int) -> list[CheckpointRow]:
        """Up to `limit` checkpoints of a workflow behind `after`, ascending by (session, checkpoint): also those off
        their session's chain, and those of deleted sessions. Empty for an unknown workflow."""
        ...

    async def nearest_checkpoint(
        self, name: SessionName, position: int, numerics_id: str | None = None
    ) -> CheckpointRow | None:
        """The checkpoint at the highest grid position up to `position` that lies on the session's chain, made under
        its name or that of a session it descends from; of `numerics_id` only, when given. None: there is none, only
        the empty state. Also of a deleted session."""
        ...

    async def lineage(self, workflow: str) -> int:
        """A number that grows whenever a session of the workflow is created, forked or rewound."""
        ...

    async def drop_checkpoints(self, workflow: str, lineage: int, rows: Sequence[tuple[str, str]]) -> bool:
        """Remove the rows (session, checkpoint), also of deleted sessions; those that are gone are none. False, with
        nothing removed, when the workflow's lineage is not `lineage` any more: who needs which row was judged by an
        older tree."""
        ...
