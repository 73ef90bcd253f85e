"""The interceptor around every method of ours: it refuses what is not honoured, and maps what is raised."""

from __future__ import annotations  # grpc's classes are generic in their stubs only

import logging
import random
import secrets
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from forkpoint.errors import ForkpointError, NodeDrainingError, SessionRelocatingError
from forkpoint.limits import HEARTBEAT_SECONDS, STREAM_AGE_JITTER, STREAM_AGE_SECONDS_DEFAULT
from forkpoint.server.rpc.errors import MethodNotImplementedError
from forkpoint.server.rpc.fields import check_request, is_served
from forkpoint.server.rpc.status import internal_status, status_of, trailer
from forkpoint.server.rpc.stream import Drain, Source, relay

Q = TypeVar("Q")
R = TypeVar("R")
Servicer = Any
"""grpc.aio.ServicerContext, which is generic in its stubs only."""
OURS = "/forkpoint."
LOG = logging.getLogger("forkpoint.rpc")


class Guard(grpc.aio.ServerInterceptor):
    """Checks each request's fields, refuses calls on a draining node, relays streams, and turns errors into statuses.

    An error that is none of ours becomes INTERNAL with an incident id; the log line of that id says where it was
    raised. Neither repeats the error's text, which may hold tokens.
    """

    def __init__(
        self,
        drain: Drain,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        stream_age_seconds: float = STREAM_AGE_SECONDS_DEFAULT,
    ) -> None:
        self._drain = drain
        self._heartbeat_seconds = heartbeat_seconds
        self._stream_age_seconds = stream_age_seconds
        self.open_streams = 0
        """Streams that are being answered now."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Q, R] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Q, R] | None:
        """Wrap the method's handler; methods of other packages (health, reflection) pass."""
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(OURS):
            return handler  # type: ignore[no-any-return]  # as it came
        coders = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._unary(method, handler.unary_unary), **coders)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(self._upload(method, handler.stream_unary), **coders)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._stream(method, handler.unary_stream), **coders)
        return handler  # type: ignore[no-any-return]  # no method of ours streams both ways

    def _unary(self, method: str, behaviour: Any) -> Any:
        async def call(request: Message, context: Servicer) -> Any:
            try:
                self._admit(method, request)
                return await behaviour(request, context)
            except Exception as error:  # noqa: BLE001 (every error becomes a status)
                await self._abort(method, error, context)

        return call

    def _upload(self, method: str, behaviour: Any) -> Any:
        async def call(requests: AsyncIterator[Message], context: Servicer) -> Any:
            try:
                return await behaviour(self._admitted(method, requests), context)
            except Exception as error:  # noqa: BLE001 (every error becomes a status)
                await self._abort(method, error, context)

        return call

    def _stream(self, method: str, behaviour: Any) -> Any:
        async def call(request: Message, context: Servicer) -> None:
            self.open_streams += 1
            try:
                self._admit(method, request)
                answer = behaviour(request, context)
                source = answer if isinstance(answer, Source) else Source(answer)
                beat, age = self._heartbeat_seconds, self.stream_age()
                await relay(source, context.write, context, self._drain, beat, age)
            except Exception as error:  # noqa: BLE001 (every error becomes a status)
                await self._abort(method, error, context)
            finally:
                self.open_streams -= 1

        return call

    def stream_age(self) -> float | None:
        """Seconds that the next stream may last; None: for ever."""
        if self._stream_age_seconds == 0:
            return None
        return self._stream_age_seconds * random.uniform(1 - STREAM_AGE_JITTER, 1 + STREAM_AGE_JITTER)

    def _admit(self, method: str, request: Message) -> None:
        if self._drain.started:
            raise NodeDrainingError(self._drain.node)
        if not is_served(request):
            raise MethodNotImplementedError(method.removeprefix(OURS))
        check_request(request)

    async def _admitted(self, method: str, requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
        async for request in requests:
            self._admit(method, request)
            yield request

    async def _abort(self, method: str, error: Exception, context: Servicer) -> None:
        """End the call with the error's status. A call whose client is gone just ends."""
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if context.done():
            return
        if isinstance(error, ForkpointError):
            status = status_of(error)
        else:
            incident = secrets.token_hex(8)
            status = internal_status(incident)
            LOG.error("incident", extra={"facts": incident_facts(incident, method, error)})
        code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
        await context.abort(code, status.message, (*trailer(status), *pushback(error)))


def pushback(error: Exception) -> tuple[tuple[str, str], ...]:
    """Tells gRPC's own retries not to repeat a call here when another node is the right one."""
    return (("grpc-retry-pushback-ms", "-1"),) if isinstance(error, SessionRelocatingError) else ()


def incident_facts(incident: str, method: str, error: BaseException) -> dict[str, object]:
    """What the log says of an unforeseen error: its types and where it was raised, never its text."""
    causes: list[dict[str, object]] = []
    seen: BaseException | None = error
    while seen is not None and len(causes) < 4:
        frames = traceback.extract_tb(seen.__traceback__)
        causes.append(
            {
                "type": type(seen).__qualname__,
                "frames": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-12:]],
            }
        )
        seen = seen.__cause__ or seen.__context__
    return {"incident": incident, "method": method, "errors": causes}
