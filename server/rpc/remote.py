"""A peer's status as the error that it was there: what status.py wrote, read back."""

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from forkpoint import (
    errors,
    move_errors,  # noqa: F401 (found by their base)
)
from forkpoint.server.rpc.errors import MethodNotImplementedError
from forkpoint.server.rpc.status import DETAILS_KEY, DOMAIN

TRANSPORT: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)
"""Codes that a connection or a dying process gives, when no ErrorInfo says that the node meant them."""

_BY_CODE: Final[dict[grpc.StatusCode, type[errors.ForkpointError]]] = {
    grpc.StatusCode.UNIMPLEMENTED: MethodNotImplementedError,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgumentError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExistsError,
    grpc.StatusCode.ABORTED: errors.AbortedError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.PreconditionError,
    grpc.StatusCode.OUT_OF_RANGE: errors.OutOfRangeError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.ResourceError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DATA_LOSS: errors.DataLossError,
}


def rich_status(failure: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The status in a failed call's trailer; an empty one when there is none or it can't be read."""
    for key, value in failure.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()


def error_info(failure: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    """What the node says of its error; None when it did not come from a node of ours."""
    for detail in rich_status(failure).details:
        if detail.TypeName() == "google.rpc.ErrorInfo":
            info = error_details_pb2.ErrorInfo.FromString(detail.value)
            return info if info.domain == DOMAIN else None
    return None


def error_of(failure: grpc.aio.AioRpcError, address: str) -> errors.ForkpointError:
    """The error that the node at `address` raised, with its facts; UnavailableError when it was not reached. An error
    of a kind that this version does not know is the kind that its code tells."""
    info = error_info(failure)
    text = failure.details() or failure.code().name
    if info is None:
        if failure.code() in TRANSPORT:
            return errors.UnavailableError(f"the node at {address} can't be reached: {text}")
        kind = _BY_CODE.get(failure.code(), errors.ForkpointError)
        return _rebuilt(kind, text, {})
    kind = _kinds().get(info.reason) or _BY_CODE.get(failure.code(), errors.ForkpointError)
    return _rebuilt(kind, text, dict(info.metadata))


@cache
def _kinds() -> dict[str, type[errors.ForkpointError]]:
    """Reason -> the class that has it; the widest where several have."""
    kinds: dict[str, type[errors.ForkpointError]] = {}
    for kind in _and_below(errors.ForkpointError):
        kinds.setdefault(kind.reason, kind)
    return kinds


def _and_below(kind: type[errors.ForkpointError]) -> Iterator[type[errors.ForkpointError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _and_below(child)


def _rebuilt(kind: type[errors.ForkpointError], text: str, facts: dict[str, str]) -> errors.ForkpointError:
    """An error with the given text and facts: numbers where the class has numbers, None for one that was not told."""
    error = kind.__new__(kind, text)
    error.args = (text,)
    annotations = inspect.get_annotations(kind.__init__)
    for name, annotation in annotations.items():
        if annotation == int | None:
            setattr(error, name, None)
    for name, told in facts.items():
        setattr(error, name, int(told) if annotations.get(name) in (int, int | None) else told)
    return error
