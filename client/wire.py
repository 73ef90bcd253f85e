"""Connections to nodes, and calls that find the right one.

Any configured address will do for a first call. A node that does not own a session names the owner's address: the call
goes there, and the session's next calls too. A call that can't reach its node tries the others.
"""

from __future__ import annotations  # grpc's classes are generic, and its stubs async, for type checkers only

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import grpc
from google.protobuf.message import Message

from forkpoint.client.errors import RemoteError, remote_error
from forkpoint.limits import MESSAGE_BYTES_MAX
from forkpoint.proto.forkpoint.v1.admin_pb2_grpc import AdminServiceStub
from forkpoint.proto.forkpoint.v1.checkpoint_pb2_grpc import CheckpointServiceStub
from forkpoint.proto.forkpoint.v1.session_service_pb2_grpc import SessionServiceStub
from forkpoint.proto.forkpoint.v1.workflow_pb2_grpc import WorkflowServiceStub

if TYPE_CHECKING:
    from forkpoint.proto.forkpoint.v1.admin_pb2_grpc import AdminServiceAsyncStub
    from forkpoint.proto.forkpoint.v1.checkpoint_pb2_grpc import CheckpointServiceAsyncStub
    from forkpoint.proto.forkpoint.v1.session_service_pb2_grpc import SessionServiceAsyncStub
    from forkpoint.proto.forkpoint.v1.workflow_pb2_grpc import WorkflowServiceAsyncStub

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

DEADLINE_SECONDS: Final = 30.0
"""Of a unary call that says nothing else."""
LONG_DEADLINE_SECONDS: Final = 600.0
"""Of calls that may replay a long log or write a large checkpoint."""
REDIRECTS_MAX: Final = 16
"""A dead owner is named until its lease expires: so often a call asks again."""

SERVICE_CONFIG: Final = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
OPTIONS: Final[Sequence[tuple[str, int | str]]] = (
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
    ("grpc.enable_retries", 1),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class Connection:
    """One node: its channel and the stubs on it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self.sessions: SessionServiceAsyncStub = SessionServiceStub(self.channel)
        self.checkpoints: CheckpointServiceAsyncStub = CheckpointServiceStub(self.channel)
        self.workflows: WorkflowServiceAsyncStub = WorkflowServiceStub(self.channel)
        self.admin: AdminServiceAsyncStub = AdminServiceStub(self.channel)


class Wire:
    """All connections of one client."""

    def __init__(self, addresses: Sequence[str]) -> None:
        if not addresses:
            raise ValueError("a client needs at least one address")
        self.addresses = tuple(addresses)
        self._next = 0
        self._routes: dict[str, str] = {}
        self._open: dict[str, Connection] = {}

    def connection(self, route: str = "") -> Connection:
        """The connection for a session's calls ("": any)."""
        address = self._routes.get(route) or self.addresses[self._next]
        if address not in self._open:
            self._open[address] = Connection(address)
        return self._open[address]

    def follow(self, error: RemoteError, route: str, tried: Connection) -> bool:
        """After a failure on `tried`, choose where the next try goes. False: nowhere that was not just tried."""
        owner = error.metadata.get("address", "")
        if error.reason == "SESSION_RELOCATING" and owner and owner != tried.address:
            self._routes[route] = owner
            return True
        if self._routes.pop(route, tried.address) != tried.address:
            return True
        if tried.address == self.addresses[self._next]:
            self._next = (self._next + 1) % len(self.addresses)
        return self.addresses[self._next] != tried.address

    async def unary(
        self,
        pick: Callable[[Connection], grpc.aio.UnaryUnaryMultiCallable[Q, R]],
        request: Q,
        route: str = "",
        timeout_s: float = DEADLINE_SECONDS,
    ) -> R:
        """Call a method; as `call`."""
        return await self.call(lambda connection: pick(connection)(request, timeout=timeout_s), route)

    async def call(self, send: Callable[[Connection], Awaitable[R]], route: str = "") -> R:
        """Send a call, which may upload a stream, and return its answer; raises RemoteError. gRPC itself repeats
        UNAVAILABLE a few times; then other nodes are tried, each once, and the owner that a node names. The request's
        id makes all that one call."""
        failed = set[str]()
        tries_left = REDIRECTS_MAX + len(self.addresses)
        while True:
            tries_left -= 1
            connection = self.connection(route)
            try:
                return await send(connection)
            except grpc.aio.AioRpcError as failure:
                error = remote_error(failure)
            if error.code != "UNAVAILABLE" or not tries_left:
                raise error
            moved = self.follow(error, route, connection)
            if error.reason == "SESSION_RELOCATING":
                await asyncio.sleep(error.retry_after_s or 0.1)
                continue
            failed.add(connection.address)
            if not moved or self.connection(route).address in failed:
                raise error

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        connections = list(self._open.values())
        self._open.clear()
        for connection in connections:
            await connection.channel.close()
