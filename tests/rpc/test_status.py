"""Every error has its code, its reason and its details, and fits a trailer."""

import inspect

import grpc
import pytest
from google.rpc import error_details_pb2

from forkpoint import errors
from forkpoint.move_errors import NodeStalledError
from forkpoint.server.rpc.errors import MethodNotImplementedError
from forkpoint.server.rpc.status import DOMAIN, code_of, status_of, trailer

Code = grpc.StatusCode
SESSION = "workflows/w/sessions/s"
TABLE = [
    (errors.InvalidFieldError("count", "is wrong"), Code.INVALID_ARGUMENT, "INVALID_FIELD", {"BadRequest"}),
    (errors.FieldNotSupportedError("budget"), Code.INVALID_ARGUMENT, "FIELD_NOT_SUPPORTED", {"BadRequest"}),
    (errors.RequestIdReusedError("r"), Code.INVALID_ARGUMENT, "REQUEST_ID_REUSED", {"BadRequest"}),
    (errors.TokenOutOfRangeError(9, 1, 8), Code.INVALID_ARGUMENT, "TOKEN_OUT_OF_RANGE", {"BadRequest"}),
    (errors.NotUtf8Error("text", 3), Code.INVALID_ARGUMENT, "NOT_UTF8", {"BadRequest"}),
    (errors.EmptySessionError(SESSION), Code.INVALID_ARGUMENT, "EMPTY_SESSION", {"BadRequest"}),
    (errors.NotFoundError(SESSION), Code.NOT_FOUND, "NOT_FOUND", {"ResourceInfo"}),
    (errors.AlreadyExistsError(SESSION), Code.ALREADY_EXISTS, "ALREADY_EXISTS", {"ResourceInfo"}),
    (errors.PositionConflictError(SESSION, 3, 4), Code.ABORTED, "POSITION_CONFLICT", set()),
    (errors.EtagMismatchError(SESSION, "3"), Code.ABORTED, "ETAG_MISMATCH", set()),
    (errors.SessionBusyError(SESSION, "Append", 4), Code.ABORTED, "SESSION_BUSY", {"RetryInfo"}),
    (errors.StaleEpochError(SESSION, 1, 2), Code.FAILED_PRECONDITION, "STALE_EPOCH", {"PreconditionFailure"}),
    (errors.SessionPausedError(SESSION), Code.FAILED_PRECONDITION, "SESSION_PAUSED", {"PreconditionFailure"}),
    (
        errors.SessionQuarantinedError(SESSION, "NaN"),
        Code.FAILED_PRECONDITION,
        "SESSION_QUARANTINED",
        {"PreconditionFailure"},
    ),
    (
        errors.StateIncompatibleError("model digest", "a", "b"),
        Code.FAILED_PRECONDITION,
        "STATE_INCOMPATIBLE",
        {"PreconditionFailure"},
    ),
    (
        errors.DurabilityNotReachedError("REPLICATED", "MEMORY"),
        Code.FAILED_PRECONDITION,
        "DURABILITY_NOT_REACHED",
        {"PreconditionFailure"},
    ),
    (errors.PositionBeyondHeadError(SESSION, 5, 4), Code.OUT_OF_RANGE, "POSITION_BEYOND_HEAD", set()),
    (errors.NodeCapacityError("slots", 1, 0), Code.RESOURCE_EXHAUSTED, "NODE_CAPACITY", {"QuotaFailure", "RetryInfo"}),
    (errors.StoreFullError("catalog", "disk"), Code.RESOURCE_EXHAUSTED, "STORE_FULL", {"QuotaFailure"}),
    (errors.QueueFullError("sessions", 4), Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", {"QuotaFailure"}),
    (errors.ContextFullError(SESSION, 9, 8), Code.RESOURCE_EXHAUSTED, "CONTEXT_FULL", {"QuotaFailure"}),
    (errors.SessionRelocatingError(SESSION, "i-1", "h:1"), Code.UNAVAILABLE, "SESSION_RELOCATING", {"RetryInfo"}),
    (errors.NodeDrainingError("n", 7), Code.UNAVAILABLE, "NODE_DRAINING", {"RetryInfo"}),
    (NodeStalledError("n", "a step"), Code.UNAVAILABLE, "NODE_STALLED", {"RetryInfo"}),
    (errors.StoreUnavailableError("catalog", "locked"), Code.UNAVAILABLE, "STORE_UNAVAILABLE", {"RetryInfo"}),
    (errors.LogTailMissingError(SESSION, 9, 4), Code.DATA_LOSS, "LOG_TAIL_MISSING", set()),
    (errors.LogCorruptError(SESSION, 5, 4, "crc"), Code.DATA_LOSS, "LOG_CORRUPT", set()),
    (errors.BlobMissingError("ab"), Code.INTERNAL, "BLOB_MISSING", set()),
    (errors.BlobDamagedError("ab", "crc"), Code.INTERNAL, "BLOB_DAMAGED", set()),
    (errors.ConfigError("port", "flag", "wrong"), Code.INTERNAL, "CONFIG", set()),
    (MethodNotImplementedError("Watch"), Code.UNIMPLEMENTED, "METHOD_NOT_IMPLEMENTED", set()),
]


@pytest.mark.parametrize(("error", "code", "reason", "kinds"), TABLE, ids=lambda value: type(value).__name__)
def test_an_error_becomes_its_row_of_the_table(
    error: errors.ForkpointError, code: grpc.StatusCode, reason: str, kinds: set[str]
) -> None:
    assert code_of(error) is code
    status = status_of(error)
    assert (status.code, status.message) == (code.value[0], str(error))
    names = [detail.TypeName().rpartition(".")[2] for detail in status.details]
    assert len(names) == len(set(names)), "one of each detail type at most"
    assert set(names) == {"ErrorInfo", *kinds}
    info = error_details_pb2.ErrorInfo.FromString(status.details[0].value)
    assert (info.reason, info.domain) == (reason, DOMAIN)
    assert dict(info.metadata) == error.facts()


def test_every_error_with_facts_of_its_own_is_in_the_table() -> None:
    concrete = {
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.ForkpointError) and "__init__" in vars(kind)
    }
    assert concrete <= {type(error) for error, *_ in TABLE}


def test_huge_texts_are_cut_so_that_the_trailer_fits_a_header() -> None:
    huge = errors.StateIncompatibleError("w" * 100_000, "s" * 100_000, "\N{SNOWMAN}" * 100_000)
    ((_, data),) = trailer(status_of(huge))
    assert len(data) < 6_000


def test_the_resume_position_of_a_draining_node_is_told() -> None:
    info = error_details_pb2.ErrorInfo.FromString(status_of(errors.NodeDrainingError("n", 7)).details[0].value)
    assert info.metadata["resume_position"] == "7"
