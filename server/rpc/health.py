"""grpc.health.v1 over the event loop: Check, Watch, List; a status for the server ("") and one for each service."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2

from forkpoint.proto.forkpoint.internal.v1.health_list_pb2 import HealthListRequest, HealthListResponse, HealthStatus
from forkpoint.server.rpc.stream import LOOK_SECONDS

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """NOT_SERVING until `serve`, and again after `stop`, for good; and while the node is not `fit`."""

    def __init__(self, services: Iterable[str]) -> None:
        self._statuses = dict.fromkeys(["", *services], NOT_SERVING)
        self._changed = asyncio.Condition()
        self.fit: Callable[[], bool] = lambda: True
        self._stopped = False

    async def serve(self) -> None:
        """The engine is warm and calls are welcome."""
        if not self._stopped:
            await self._set(SERVING)

    async def stop(self) -> None:
        """The node is going away. Watchers are told."""
        self._stopped = True
        await self._set(NOT_SERVING)

    async def _set(self, status: Any) -> None:
        async with self._changed:
            self._statuses = dict.fromkeys(self._statuses, status)
            self._changed.notify_all()

    def _status(self, service: str, unknown: Any = None) -> Any:
        status = self._statuses.get(service, unknown)
        return NOT_SERVING if status == SERVING and not self.fit() else status

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service[:100]!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: HealthListRequest, context: Any) -> HealthListResponse:
        return HealthListResponse(
            statuses={name: HealthStatus(status=int(self._status(name) or 0)) for name in self._statuses}
        )

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        sent = None
        while not context.done():
            status = self._status(request.service, SERVICE_UNKNOWN)
            if status != sent:
                sent = status
                yield health_pb2.HealthCheckResponse(status=status)
                continue
            try:
                async with asyncio.timeout(LOOK_SECONDS), self._changed:
                    await self._changed.wait()
            except TimeoutError:
                continue

    def handler(self) -> grpc.GenericRpcHandler:
        """The three methods under the standard service name."""
        check = health_pb2.HealthCheckRequest.FromString
        answer = health_pb2.HealthCheckResponse.SerializeToString
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(
                    cast(Any, self.Check), request_deserializer=check, response_serializer=answer
                ),
                "Watch": grpc.unary_stream_rpc_method_handler(
                    cast(Any, self.Watch), request_deserializer=check, response_serializer=answer
                ),
                "List": grpc.unary_unary_rpc_method_handler(
                    cast(Any, self.List),
                    request_deserializer=HealthListRequest.FromString,
                    response_serializer=HealthListResponse.SerializeToString,
                ),
            },
        )
