"""Errors to gRPC status: the one place that knows which error has which code and which details.

Every status carries ErrorInfo{domain "forkpoint", reason, metadata}, and at most one detail of each type. Details
travel in a trailer, and HTTP/2 peers refuse headers of more than 8 KiB: so texts are cut.
"""

from collections.abc import Iterator

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from forkpoint import errors
from forkpoint.server.rpc.errors import MethodNotImplementedError

DOMAIN = "forkpoint"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
MESSAGE_CHARACTERS_MAX = 1000
FACT_CHARACTERS_MAX = 256
FACTS_MAX = 12

_CODES: tuple[tuple[type[errors.ForkpointError], grpc.StatusCode], ...] = (
    (MethodNotImplementedError, grpc.StatusCode.UNIMPLEMENTED),
    (errors.InvalidArgumentError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
    (errors.AlreadyExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (errors.AbortedError, grpc.StatusCode.ABORTED),
    (errors.PreconditionError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.OutOfRangeError, grpc.StatusCode.OUT_OF_RANGE),
    (errors.ResourceError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.DataLossError, grpc.StatusCode.DATA_LOSS),
    (errors.ForkpointError, grpc.StatusCode.INTERNAL),
)

_RETRY_SECONDS: tuple[tuple[type[errors.ForkpointError], float], ...] = (
    (errors.SessionBusyError, 0.2),
    (errors.NodeCapacityError, 1.0),
    (errors.SessionRelocatingError, 0.1),
    (errors.UnavailableError, 0.5),
)
"""What RetryInfo says, for the errors that waiting can cure."""

_FIELDS: tuple[tuple[type[errors.ForkpointError], str], ...] = (
    (errors.TokenOutOfRangeError, "token_ids"),
    (errors.RequestIdReusedError, "request_id"),
    (errors.EmptySessionError, "name"),
)
"""Fields to blame where the error does not name one itself."""

_RESOURCE_TYPES = {"workflows": "Workflow", "sessions": "Session", "checkpoints": "Checkpoint", "nodes": "Node"}


def code_of(error: errors.ForkpointError) -> grpc.StatusCode:
    """The gRPC code of an error."""
    return next(code for kind, code in _CODES if isinstance(error, kind))


def status_of(error: errors.ForkpointError) -> status_pb2.Status:
    """The rich status of an error."""
    status = status_pb2.Status(code=code_of(error).value[0], message=cut(str(error), MESSAGE_CHARACTERS_MAX))
    for detail in (_error_info(error), *_details(error)):
        packed = Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def internal_status(incident: str) -> status_pb2.Status:
    """The status of an error that nobody foresaw: its facts are in the log, under the incident's id."""
    message = f"internal error, incident {incident}"
    status = status_pb2.Status(code=grpc.StatusCode.INTERNAL.value[0], message=message)
    packed = Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason="INTERNAL", domain=DOMAIN, metadata={"incident": incident}))
    status.details.append(packed)
    return status


def trailer(status: status_pb2.Status) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata that carries a rich status."""
    return ((DETAILS_KEY, status.SerializeToString()),)


def cut(text: str, characters: int) -> str:
    """`text`, shortened to at most `characters`."""
    return text if len(text) <= characters else text[: characters - 1] + "…"


def _error_info(error: errors.ForkpointError) -> error_details_pb2.ErrorInfo:
    facts = list(error.facts().items())[:FACTS_MAX]
    metadata = {key: cut(value, FACT_CHARACTERS_MAX) for key, value in facts}
    return error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)


def _details(error: errors.ForkpointError) -> Iterator[Message]:
    description = cut(str(error), FACT_CHARACTERS_MAX)
    facts = error.facts()
    if isinstance(error, errors.InvalidArgumentError):
        field = facts.get("field") or next((name for kind, name in _FIELDS if isinstance(error, kind)), "")
        yield error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(
                    field=cut(field, FACT_CHARACTERS_MAX), description=description, reason=error.reason
                )
            ]
        )
    elif isinstance(error, errors.PreconditionError):
        subject = facts.get("session") or facts.get("what") or facts.get("asked") or ""
        yield error_details_pb2.PreconditionFailure(
            violations=[
                error_details_pb2.PreconditionFailure.Violation(
                    type=error.reason, subject=cut(subject, FACT_CHARACTERS_MAX), description=description
                )
            ]
        )
    elif isinstance(error, errors.ResourceError):
        subject = facts.get("what") or facts.get("store") or facts.get("queue") or facts.get("session") or ""
        violation = error_details_pb2.QuotaFailure.Violation(
            subject=cut(subject, FACT_CHARACTERS_MAX), description=description
        )
        yield error_details_pb2.QuotaFailure(violations=[violation])
    elif isinstance(error, errors.NotFoundError | errors.AlreadyExistsError):
        name = error.resource
        kinds = [_RESOURCE_TYPES[part] for part in name.split("/") if part in _RESOURCE_TYPES]
        yield error_details_pb2.ResourceInfo(
            resource_type=f"forkpoint.dev/{kinds[-1]}" if kinds else "",
            resource_name=cut(name, FACT_CHARACTERS_MAX),
            description=description,
        )
    seconds = next((seconds for kind, seconds in _RETRY_SECONDS if isinstance(error, kind)), None)
    if seconds is not None:
        delay = Duration()
        delay.FromMilliseconds(int(seconds * 1000))
        yield error_details_pb2.RetryInfo(retry_delay=delay)
