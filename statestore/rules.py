"""Rules that every catalog keeps alike: what a call may find, and which error it gets otherwise."""

from forkpoint.errors import (
    AlreadyExistsError,
    InvalidFieldError,
    LogTailMissingError,
    PositionBeyondHeadError,
    PositionConflictError,
    StaleEpochError,
    StateIncompatibleError,
)
from forkpoint.ids import SessionName
from forkpoint.limits import TILE_TOKENS
from forkpoint.statestore.calls import ForkSessions
from forkpoint.statestore.records import CheckpointRow, StoreMarker


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


def check_children(fork: ForkSessions) -> None:
    """Children lie in the parent's workflow and have names of their own."""
    seen: set[SessionName] = set()
    for child in fork.children:
        if child.name.workflow != fork.parent.workflow:
            raise InvalidFieldError(
                "session_ids", f"{child.name} is outside {fork.parent.workflow!r}: forks stay in it"
            )
        if child.name in seen:
            raise AlreadyExistsError(str(child.name))
        seen.add(child.name)


def check_checkpoint(row: CheckpointRow, head: int) -> None:
    """Positions are on the log and the grid position is on the grid."""
    check_position(row.session, row.position, head)
    if row.grid_position % TILE_TOKENS or not 0 <= row.grid_position <= row.position:
        raise InvalidFieldError("grid_position", f"{row.grid_position} is no grid point at or below {row.position}")
