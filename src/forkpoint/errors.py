"""Errors. Facts are fields; one file (server/rpc/status.py) maps them to gRPC status.

ForkpointError
├── InvalidArgumentError            the call is wrong whatever the state
│   ├── InvalidFieldError             a field's value
│   ├── FieldNotSupportedError        a set field that this version does not honour
│   ├── RequestIdReusedError          same request id, other content
│   ├── TokenOutOfRangeError
│   ├── NotUtf8Error
│   └── EmptySessionError             Generate on an empty log
├── NotFoundError / AlreadyExistsError
├── AbortedError                    re-read, then try again
│   ├── PositionConflictError         expected_position is not the head
│   ├── EtagMismatchError
│   ├── SessionBusyError              another writer operation is running
│   └── MigrationUnderwayError        src/forkpoint/move_errors.py
├── PreconditionError               not until somebody changes something
│   ├── StaleEpochError
│   ├── SessionPausedError
│   ├── SessionQuarantinedError
│   ├── StateIncompatibleError        other model, tokenizer, layout, dtype, version
│   ├── MigrationEndedError, MoveFailedError    src/forkpoint/move_errors.py
│   └── DurabilityNotReachedError
├── OutOfRangeError / PositionBeyondHeadError
├── ResourceError
│   ├── NodeCapacityError             no slot or page left
│   ├── StoreFullError                disk or quota
│   ├── QueueFullError
│   └── ContextFullError              the model's context limit
├── UnavailableError                the only ones a client retries by itself
│   ├── SessionRelocatingError        owned by another node, whose address is given
│   ├── NodeDrainingError, NodeStalledError (src/forkpoint/move_errors.py)
│   └── StoreUnavailableError
├── DataLossError
│   ├── LogTailMissingError           the store knows less than the client
│   └── LogCorruptError
├── BlobError                       internal to restore: costs time, not data
│   └── BlobMissingError / BlobDamagedError
└── ConfigError                     a bad setting, names the key and where it came from
"""

from typing import ClassVar


class ForkpointError(Exception):
    """Base of all errors that Forkpoint raises on purpose. `reason` is the API's ErrorInfo reason."""

    reason: ClassVar[str] = "INTERNAL"

    def facts(self) -> dict[str, str]:
        """The error's fields as strings, for ErrorInfo metadata."""
        return {key: str(value) for key, value in vars(self).items() if not key.startswith("_") and value is not None}


class InvalidArgumentError(ForkpointError):
    """The call is wrong, whatever the state."""

    reason = "INVALID_ARGUMENT"


class InvalidFieldError(InvalidArgumentError):
    """A field's value is wrong."""

    reason = "INVALID_FIELD"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem


class FieldNotSupportedError(InvalidArgumentError):
    """A field is set that this version does not honour."""

    reason = "FIELD_NOT_SUPPORTED"

    def __init__(self, field: str, why: str = "not supported by this version") -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


class RequestIdReusedError(InvalidArgumentError):
    """The request id was used before with other content."""

    reason = "REQUEST_ID_REUSED"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request id {request_id!r} was used before for a call with other content")
        self.request_id = request_id


class TokenOutOfRangeError(InvalidArgumentError):
    """A token id is outside the vocabulary."""

    reason = "TOKEN_OUT_OF_RANGE"

    def __init__(self, token_id: int, index: int, vocab_size: int) -> None:
        super().__init__(f"token id {token_id} at index {index} is outside the vocabulary of {vocab_size}")
        self.token_id, self.index, self.vocab_size = token_id, index, vocab_size


class NotUtf8Error(InvalidArgumentError):
    """Text is not UTF-8."""

    reason = "NOT_UTF8"

    def __init__(self, field: str, byte_offset: int) -> None:
        super().__init__(f"{field}: not UTF-8 at byte {byte_offset}")
        self.field, self.byte_offset = field, byte_offset


class EmptySessionError(InvalidArgumentError):
    """Generate on an empty log: there is nothing to continue."""

    reason = "EMPTY_SESSION"

    def __init__(self, session: str) -> None:
        super().__init__(f"{session} has no tokens: append some before generating")
        self.session = session


class NotFoundError(ForkpointError):
    """No such resource."""

    reason = "NOT_FOUND"

    def __init__(self, resource: str, why: str = "does not exist") -> None:
        super().__init__(f"{resource} {why}")
        self.resource = resource


class AlreadyExistsError(ForkpointError):
    """The resource exists already."""

    reason = "ALREADY_EXISTS"

    def __init__(self, resource: str) -> None:
        super().__init__(f"{resource} exists already")
        self.resource = resource


class AbortedError(ForkpointError):
    """The state moved: re-read, then try again."""

    reason = "ABORTED"


class PositionConflictError(AbortedError):
    """The head is not where the caller expected it."""

    reason = "POSITION_CONFLICT"

    def __init__(self, session: str, expected_position: int, head: int, head_hash: bytes = b"") -> None:
        super().__init__(f"{session}: expected position {expected_position}, the head is {head}")
        self.session, self.expected_position, self.head, self.head_hash = (
            session,
            expected_position,
            head,
            head_hash.hex(),
        )


class EtagMismatchError(AbortedError):
    """The resource changed since it was read."""

    reason = "ETAG_MISMATCH"

    def __init__(self, resource: str, etag: str) -> None:
        super().__init__(f"{resource} changed since it was read; its etag is {etag}")
        self.resource, self.etag = resource, etag


class SessionBusyError(AbortedError):
    """Another writer operation is running on the session."""

    reason = "SESSION_BUSY"

    def __init__(self, session: str, operation: str, head: int) -> None:
        super().__init__(f"{session} is busy: {operation} is running")
        self.session, self.operation, self.head = session, operation, head


class PreconditionError(ForkpointError):
    """The call can't succeed until somebody changes something."""

    reason = "FAILED_PRECONDITION"


class StaleEpochError(PreconditionError):
    """The writer's epoch is no longer the session's, or nobody owns the session under it."""

    reason = "STALE_EPOCH"

    def __init__(self, session: str, epoch: int, current_epoch: int) -> None:
        why = "is stale" if epoch != current_epoch else "has no owner"
        super().__init__(f"{session}: epoch {epoch} {why}, the current one is {current_epoch}")
        self.session, self.epoch, self.current_epoch = session, epoch, current_epoch


class SessionPausedError(PreconditionError):
    """The session is paused."""

    reason = "SESSION_PAUSED"

    def __init__(self, session: str) -> None:
        super().__init__(f"{session} is paused: resume it first")
        self.session = session


class SessionQuarantinedError(PreconditionError):
    """The session failed to recover too often."""

    reason = "SESSION_QUARANTINED"

    def __init__(self, session: str, cause: str) -> None:
        super().__init__(f"{session} is quarantined: {cause}")
        self.session, self.cause = session, cause


class StateIncompatibleError(PreconditionError):
    """Stored bytes belong to another model, tokenizer, layout, dtype or format version."""

    reason = "STATE_INCOMPATIBLE"

    def __init__(self, what: str, stored: str, ours: str) -> None:
        super().__init__(f"{what}: the store holds {stored}, this process has {ours}")
        self.what, self.stored, self.ours = what, stored, ours


class DurabilityNotReachedError(PreconditionError):
    """The durability class asked for is not what the store gives."""

    reason = "DURABILITY_NOT_REACHED"

    def __init__(self, asked: str, reached: str) -> None:
        super().__init__(f"durability {asked} was asked for, this store reaches {reached}")
        self.asked, self.reached = asked, reached


class OutOfRangeError(ForkpointError):
    """A position or revision outside what exists."""

    reason = "OUT_OF_RANGE"


class PositionBeyondHeadError(OutOfRangeError):
    """A position beyond the head."""

    reason = "POSITION_BEYOND_HEAD"

    def __init__(self, session: str, position: int, head: int) -> None:
        super().__init__(f"{session}: position {position} is beyond the head {head}")
        self.session, self.position, self.head = session, position, head


class ResourceError(ForkpointError):
    """Something is used up."""

    reason = "RESOURCE_EXHAUSTED"


class NodeCapacityError(ResourceError):
    """No slot or page is left on this node."""

    reason = "NODE_CAPACITY"

    def __init__(self, what: str, needed: int, free: int) -> None:
        super().__init__(f"not enough {what} on this node: {needed} needed, {free} free")
        self.what, self.needed, self.free = what, needed, free


class StoreFullError(ResourceError):
    """The store's disk or quota is full. Nothing was written."""

    reason = "STORE_FULL"

    def __init__(self, store: str, cause: str) -> None:
        super().__init__(f"{store} is full: {cause}")
        self.store, self.cause = store, cause


class QueueFullError(ResourceError):
    """Too much is waiting."""

    reason = "QUEUE_FULL"

    def __init__(self, queue: str, limit: int) -> None:
        super().__init__(f"{queue} is full: {limit} are waiting")
        self.queue, self.limit = queue, limit


class ContextFullError(ResourceError):
    """The session would exceed the model's context limit."""

    reason = "CONTEXT_FULL"

    def __init__(self, session: str, needed: int, limit: int) -> None:
        super().__init__(f"{session}: {needed} tokens exceed the model's context limit of {limit}")
        self.session, self.needed, self.limit = session, needed, limit


class UnavailableError(ForkpointError):
    """Try again: the only errors that a client retries by itself."""

    reason = "UNAVAILABLE"


class SessionRelocatingError(UnavailableError):
    """Another node owns the session."""

    reason = "SESSION_RELOCATING"

    def __init__(self, session: str, owner: str, address: str, resume_position: int | None = None) -> None:
        super().__init__(f"{session} is owned by {owner} at {address}")
        self.session, self.owner, self.address, self.resume_position = session, owner, address, resume_position


class NodeDrainingError(UnavailableError):
    """This node is going away."""

    reason = "NODE_DRAINING"

    def __init__(self, node: str, resume_position: int | None = None) -> None:
        super().__init__(f"node {node} is draining")
        self.node, self.resume_position = node, resume_position


class StoreUnavailableError(UnavailableError):
    """The store can't be reached or refuses writes."""

    reason = "STORE_UNAVAILABLE"

    def __init__(self, store: str, cause: str) -> None:
        super().__init__(f"{store} is unavailable: {cause}")
        self.store, self.cause = store, cause


class DataLossError(ForkpointError):
    """Acknowledged tokens are gone or damaged. Never retried."""

    reason = "DATA_LOSS"


class LogTailMissingError(DataLossError):
    """The store knows less than its client."""

    reason = "LOG_TAIL_MISSING"

    def __init__(self, session: str, client_position: int, head: int) -> None:
        super().__init__(f"{session}: the client knows position {client_position}, the store's head is {head}")
        self.session, self.client_position, self.head = session, client_position, head


class LogCorruptError(DataLossError):
    """A log record does not match its checksum or the hash chain."""

    reason = "LOG_CORRUPT"

    def __init__(self, session: str, first_bad_position: int, last_good_position: int, cause: str) -> None:
        super().__init__(
            f"{session}: the log is damaged from position {first_bad_position} on, good up to {last_good_position}: "
            f"{cause}"
        )
        self.session, self.cause = session, cause
        self.first_bad_position, self.last_good_position = first_bad_position, last_good_position


class BlobError(ForkpointError):
    """A blob can't be had. Costs time, never data: restore falls back to an older checkpoint."""

    reason = "BLOB"


class BlobMissingError(BlobError):
    """No blob under that digest."""

    reason = "BLOB_MISSING"

    def __init__(self, digest: str) -> None:
        super().__init__(f"blob {digest} is missing")
        self.digest = digest


class BlobDamagedError(BlobError):
    """A blob's bytes do not match its frame or digest."""

    reason = "BLOB_DAMAGED"

    def __init__(self, digest: str, problem: str) -> None:
        super().__init__(f"blob {digest} is damaged: {problem}")
        self.digest, self.problem = digest, problem


class ConfigError(ForkpointError):
    """A setting is wrong."""

    reason = "CONFIG"

    def __init__(self, key: str, source: str, problem: str) -> None:
        super().__init__(f"{key} (from {source}): {problem}")
        self.key, self.source, self.problem = key, source, problem
