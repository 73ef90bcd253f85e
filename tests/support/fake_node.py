"""A node of which tests say, call by call, what it answers: for what a client does about failures that a real node
gives only now and then. Everything but the answers is real: gRPC, a port, the wire."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2

from forkpoint.proto.forkpoint.v1 import admin_pb2, session_service_pb2, workflow_pb2

_SERVICES = {
    service.full_name: service
    for module in (admin_pb2, session_service_pb2, workflow_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
}


HEALTH = "/grpc.health.v1.Health/Check"


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, code: grpc.StatusCode, reason: str = "", **metadata: str) -> None:
        super().__init__(code, reason)
        self.code, self.reason, self.metadata = code, reason, metadata

    def trailer(self) -> tuple[tuple[str, str | bytes], ...]:
        """As the server's; without a reason none, as when a connection breaks."""
        if not self.reason:
            return ()
        packed = Packed()
        packed.Pack(error_details_pb2.ErrorInfo(reason=self.reason, domain="forkpoint", metadata=self.metadata))
        status = status_pb2.Status(code=self.code.value[0], message=self.reason, details=[packed])
        return (("grpc-status-details-bin", status.SerializeToString()), ("grpc-retry-pushback-ms", "-1"))


class Silence:
    """An answer that goes on only when a test says so."""

    def __init__(self) -> None:
        self.over = asyncio.Event()


Answer = Sequence[Message | Refused | Silence]


@dataclass
class FakeNode:
    """`script`: method -> answers, one a call; the last is for all calls after it, too. An answer is messages, a
    Silence, a Refused at the end. `calls`: (method, request, metadata) as they came."""

    address: str = ""
    script: dict[str, Sequence[Answer]] = field(default_factory=dict)
    calls: list[tuple[str, Any, dict[str, str]]] = field(default_factory=list)
    left_s: list[float | None] = field(default_factory=list)
    """Seconds that each call had left when it came; None without a deadline."""
    ended: list[str] = field(default_factory=list)
    """Methods whose client went away before the answer's end."""

    def methods(self) -> list[str]:
        """Names of the methods that were called."""
        return [method for method, _, _ in self.calls]

    async def answer(self, method: str, request: Message, context: Any) -> AsyncIterator[Message]:
        """The messages that the script has for this call."""
        metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        self.calls.append((method, request, metadata))
        self.left_s.append(context.time_remaining())
        answers = self.script[method]
        for message in answers[min(self.methods().count(method), len(answers)) - 1]:
            if isinstance(message, Refused):
                await context.abort(message.code, message.reason, message.trailer())
            elif isinstance(message, Silence):
                await message.over.wait()
            else:
                yield message


async def _serves(request: Any, context: Any) -> Any:
    return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, node: FakeNode) -> None:
        self._node = node

    def service(self, handler_call_details: Any) -> Any:
        """A handler for every method that the script names."""
        _, service, name = handler_call_details.method.split("/")
        if handler_call_details.method == HEALTH:
            return grpc.unary_unary_rpc_method_handler(
                _serves, health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
            )
        if service not in _SERVICES or name not in self._node.script:
            return None
        method = _SERVICES[service].methods_by_name[name]
        coders = {
            "request_deserializer": method.input_type._concrete_class.FromString,
            "response_serializer": method.output_type._concrete_class.SerializeToString,
        }
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(self._stream(name), **coders)
        return grpc.unary_unary_rpc_method_handler(self._unary(name), **coders)

    def _unary(self, name: str) -> Any:
        async def call(request: Message, context: Any) -> Message:
            async for message in self._node.answer(name, request, context):
                return message
            raise AssertionError(f"the script of {name} has no answer")

        return call

    def _stream(self, name: str) -> Any:
        async def call(request: Message, context: Any) -> AsyncIterator[Message]:
            try:
                async for message in self._node.answer(name, request, context):
                    yield message
            except BaseException:
                self._node.ended.append(name)
                raise

        return call


@asynccontextmanager
async def fake_node(**script: Sequence[Answer]) -> AsyncIterator[FakeNode]:
    """A node that answers by `script`, on a port of its own."""
    node = FakeNode(script=script)
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    server.add_generic_rpc_handlers((_Handlers(node),))
    node.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield node
    finally:
        await server.stop(0)
