"""What the server refused, and why, as an exception."""

from collections.abc import Mapping
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DETAILS_KEY = "grpc-status-details-bin"
TRANSPORT_CODES = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED})
"""Codes that a broken connection or a dying server gives. Errors that a server means carry a reason besides."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of the request that was refused."""

    field: str
    description: str


class RemoteError(Exception):
    """A call failed. `code` is the gRPC code's name; `reason` is ErrorInfo's, "" when the failure was the connection's;
    `metadata` holds the error's facts; `retry_after_s` is what the server proposed, if anything."""

    def __init__(
        self,
        code: str,
        reason: str,
        message: str,
        metadata: Mapping[str, str],
        retry_after_s: float | None = None,
        violations: tuple[FieldViolation, ...] = (),
    ) -> None:
        super().__init__(f"{code}{'/' + reason if reason else ''}: {message}")
        self.code, self.reason, self.message = code, reason, message
        self.metadata = dict(metadata)
        self.retry_after_s = retry_after_s
        self.violations = violations

    @property
    def is_retryable(self) -> bool:
        """Whether the same call may be sent again by itself, here or elsewhere: UNAVAILABLE says so, and a CANCELLED
        without a reason, which gRPC answers to calls that reach a server in the moment in which it stops."""
        stopping = self.code == grpc.StatusCode.CANCELLED.name and not self.reason
        return stopping or self.code == grpc.StatusCode.UNAVAILABLE.name

    @property
    def is_transport(self) -> bool:
        """Whether a stream that knows its position should be opened again, perhaps elsewhere: the node is gone, going,
        or not the owner."""
        if self.reason:
            return self.is_retryable
        return self.code in {code.name for code in TRANSPORT_CODES}


class ClientClosedError(Exception):
    """The client was closed before the call, or while it waited."""

    def __init__(self) -> None:
        super().__init__("the client is closed")


class PositionGapError(RemoteError):
    """A stream sent a position twice or left one out: a bug of the server, never passed on to the caller's tokens."""

    def __init__(self, expected: int, got: int) -> None:
        message = f"the stream sent position {got}, expected {expected}"
        super().__init__("DATA_LOSS", "POSITION_GAP", message, {"expected": str(expected), "got": str(got)})


def remote_error(error: grpc.aio.AioRpcError) -> RemoteError:
    """A failed call as RemoteError, with the details that the server attached."""
    reason, metadata, retry_after_s = "", dict[str, str](), None
    violations: list[FieldViolation] = []
    for detail in _status(error).details:
        if detail.TypeName() == "google.rpc.ErrorInfo":
            info = error_details_pb2.ErrorInfo.FromString(detail.value)
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.TypeName() == "google.rpc.RetryInfo":
            retry_after_s = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay.ToMilliseconds() / 1000
        elif detail.TypeName() == "google.rpc.BadRequest":
            for violation in error_details_pb2.BadRequest.FromString(detail.value).field_violations:
                violations.append(FieldViolation(violation.field, violation.description))
    return RemoteError(error.code().name, reason, error.details() or "", metadata, retry_after_s, tuple(violations))


def _status(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The rich status in the trailer; empty when there is none or it can't be read."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()
