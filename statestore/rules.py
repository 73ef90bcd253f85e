"""Rules that every catalog keeps alike: what a call may find, and which error it gets otherwise."""

from forkpoint.errors import (
    AlreadyExistsError,
    InvalidFieldError,
    LogTailMissingError,
    PositionBeyondHeadError,
    PositionConflictError,
    PreconditionError,
    SessionBusyError,
    StaleEpochError,
    StateIncompatibleError,
)
from forkpoint.ids import SessionName
from forkpoint.limits import TILE_TOKENS
from forkpoint.move_errors import MigrationEndedError, MigrationUnderwayError
from forkpoint.statestore.calls import ForkSessions
from forkpoint.statestore.records import CheckpointRow, SessionRow, SessionState, StoreMarker


def check_marker(stored: StoreMarker, ours: StoreMarker) -> None:
    """Raises StateIncompatibleError, which names the first thing that differs and both values."""
    for what, theirs, mine in (
        ("schema version", str(stored.schema_version), str(ours.schema_version)),
        ("namespace", stored.namespace, ours.namespace),
        ("model digest", stored.model_digest.hex(), ours.model_digest.hex()),
        ("tokenizer digest", stored.tokenizer_digest.hex(), ours.tokenizer_digest.hex()),
    ):
        if theirs != mine:
            raise StateIncompatibleError(what, theirs, mine)


def check_epoch(name: SessionName, epoch: int, current: int) -> None:
    """Raises StaleEpochError."""
    if epoch != current:
        raise StaleEpochError(str(name), epoch, current)


def check_release(row: SessionRow, epoch: int, state: SessionState, open_generation: str | None) -> None:
    """The owner may give the session up in this state. Raises StaleEpochError; SessionBusyError for a pause while a
    generation is open, which its owner would not know of; PreconditionError for a deletion."""
    check_owned(row, epoch)
    if state is SessionState.DELETED:
        raise PreconditionError("a session is deleted by delete_session only")
    if state is SessionState.PAUSED and open_generation:
        raise SessionBusyError(str(row.name), f"generation {open_generation}", row.head)


def check_owned(row: SessionRow, epoch: int) -> None:
    """The session is at `epoch` and its owner has not released it. Raises StaleEpochError."""
    if epoch != row.epoch or not row.owner:
        raise StaleEpochError(str(row.name), epoch, row.epoch)


def count_takeover(row: SessionRow, incarnation: str, generates: bool) -> tuple[int, int]:
    """`takeovers` and `takeover_head` of a session that `incarnation` acquires. One that had nothing to do when its
    owner was lost has not stood in the way of progress."""
    if row.owner in ("", incarnation) or not generates:
        return row.takeovers, row.takeover_head
    return row.takeovers + 1 if row.head == row.takeover_head else 1, row.head


def check_migration(migration: str, target: str) -> None:
    """Raises InvalidFieldError."""
    for field, value in (("migration", migration), ("target", target)):
        if not value:
            raise InvalidFieldError(field, "it is empty")


def begins_migration(row: SessionRow, epoch: int, migration: str, target: str) -> bool:
    """Whether begin_migration changes the row; False: it has happened already. Raises StaleEpochError,
    MigrationUnderwayError, InvalidFieldError."""
    check_migration(migration, target)
    check_owned(row, epoch)
    if not row.migration:
        return True
    if (row.migration, row.migration_target) != (migration, target):
        raise MigrationUnderwayError(str(row.name), row.migration, row.migration_target)
    return False


def check_cut_over(row: SessionRow, epoch: int, migration: str, incarnation: str, head: int, head_hash: bytes) -> None:
    """The owner's word stands, and its log is the one that `incarnation` has. Raises StaleEpochError,
    MigrationEndedError, PositionConflictError."""
    check_owned(row, epoch)
    if not migration or (row.migration, row.migration_target) != (migration, incarnation):
        raise MigrationEndedError(str(row.name), migration)
    if (row.head, row.head_hash) != (head, head_hash):
        raise PositionConflictError(str(row.name), head, row.head, row.head_hash)


def check_expected(
    name: SessionName, head: int, head_hash: bytes, rewound_from: int, position: int | None, expected_hash: bytes | None
) -> None:
    """Compare what the caller expects with the head.

    A caller that knows more than the log ever held (heads given up by a rewind count as held) has seen tokens that
    the store lost: LogTailMissingError. Any other difference is PositionConflictError.
    """
    if position is not None and position != head:
        if position > max(head, rewound_from):
            raise LogTailMissingError(str(name), position, head)
        raise PositionConflictError(str(name), position, head, head_hash)
    if expected_hash is not None and expected_hash != head_hash:
        raise PositionConflictError(str(name), head if position is None else position, head, head_hash)


def check_position(name: SessionName, position: int, head: int) -> None:
    """Raises PositionBeyondHeadError, InvalidFieldError below 0."""
    if position < 0:
        raise InvalidFieldError("position", f"{position} is negative")
    if position > head:
        raise PositionBeyondHeadError(str(name), position, head)


def check_child_workflows(fork: ForkSessions) -> None:
    """Children lie in the parent's workflow. Raises InvalidFieldError."""
    for child in fork.children:
        if child.name.workflow != fork.parent.workflow:
            raise InvalidFieldError(
                "session_ids", f"{child.name} is outside {fork.parent.workflow!r}: forks stay in it"
            )


def check_children(fork: ForkSessions) -> None:
    """Children lie in the parent's workflow and have names of their own."""
    check_child_workflows(fork)
    seen: set[SessionName] = set()
    for child in fork.children:
        if child.name in seen:
            raise AlreadyExistsError(str(child.name))
        seen.add(child.name)


def check_checkpoint(row: CheckpointRow, head: int) -> None:
    """Positions are on the log and the grid position is on the grid."""
    check_position(row.session, row.position, head)
    if row.grid_position % TILE_TOKENS or not 0 <= row.grid_position <= row.position:
        raise InvalidFieldError("grid_position", f"{row.grid_position} is no grid point at or below {row.position}")
