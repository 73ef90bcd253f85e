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
from forkpoint.server.rpc.forward import Forwarder, PeerStatusError
from forkpoint.server.rpc.relayed import relayed
from forkpoint.server.rpc.routes import Marks, may_go_on
from forkpoint.server.rpc.status import PUSHBACK_KEY, internal_status, status_of, trailer
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
        self.forwarder: Forwarder | None = None
        """Sends calls to other nodes; None: none are sent."""
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
                forwarder = self._forwarder(method, context)
                if forwarder is None:
                    return await behaviour(request, context)
                return await forwarder.unary(method, request, lambda: behaviour(request, context), context)
            except Exception as error:  # noqa: BLE001 (every error becomes a status)
                await self._abort(method, error, context)

        return call

    def _upload(self, method: str, behaviour: Any) -> Any:
        async def call(requests: AsyncIterator[Message], context: Servicer) -> Any:
            try:
                admitted = self._admitted(method, requests)
                forwarder = self._forwarder(method, context)
                if forwarder is None:
                    return await behaviour(admitted, context)
                return await forwarder.upload(method, admitted, lambda again: behaviour(again, context), context)
            except Exception as error:  # noqa: BLE001 (every error becomes a status)
                await self._abort(method, error, context)

        return call

    def _stream(self, method: str, behaviour: Any) -> Any:
        async def call(request: Message, context: Servicer) -> None:
            self.open_streams += 1
            position: int | None = None
            try:
                self._admit(method, request)
                source = self._source(method, request, behaviour, context)
                beat, age = self._heartbeat_seconds, self.stream_age()
                try:
                    await relay(source, context.write, context, self._drain, beat, age)
                finally:
                    position = source.cursor()
            except Exception as error:  # noqa: BLE001 (every error becomes a status)
                await self._abort(method, with_position(error, position), context)
            finally:
                self.open_streams -= 1

        return call

    def _source(self, method: str, request: Message, behaviour: Any, context: Servicer) -> Source[Any]:
        forwarder = self._forwarder(method, context)
        if forwarder is not None:
            remaining = context.time_remaining
            return relayed(forwarder, self._drain, method, request, lambda now: behaviour(now, context), remaining)
        answer = behaviour(request, context)
        return answer if isinstance(answer, Source) else Source(answer)

    def _forwarder(self, method: str, context: Servicer) -> Forwarder | None:
        """What answers a call that another node may have to answer; None for one that is answered here."""
        marks = Marks.of(context.invocation_metadata())
        return self.forwarder if may_go_on(method, marks) else None

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
        if isinstance(error, PeerStatusError):
            await context.abort(error.code, error.text, error.trailers)
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
    return ((PUSHBACK_KEY, "-1"),) if isinstance(error, SessionRelocatingError) else ()


def with_position(error: Exception, position: int | None) -> Exception:
    """The error, with the position to go on from where it says that another node has the session."""
    if not isinstance(error, SessionRelocatingError) or position is None:
        return error
    return SessionRelocatingError(error.session, error.owner, error.address, position)


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
