"""Connections to nodes, and calls that find the right one.

Any configured address will do: nodes forward calls to the session's owner. A node that can't, or is asked not to, names
the owner's address instead: the call goes there, and the session's next calls too. A call that can't reach its node
tries the others.
"""

from __future__ import annotations  # grpc's classes are generic, and its stubs async, for type checkers only

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from forkpoint.client.errors import ClientClosedError, RemoteError, remote_error
from forkpoint.client.forked import check_process
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
ROUTES_MAX: Final = 65_536
"""Sessions whose owner is remembered. What is forgotten costs a redirect."""
DIRECT_METADATA: Final = (("forkpoint-direct", "1"),)
"""Asks a node not to forward the call, but to name the owner's address."""

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
    """One node: its channel, the stubs on it, and the metadata that each call on it is to carry."""

    def __init__(self, address: str, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self.address, self.metadata = address, tuple(metadata)
        self.channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self.sessions: SessionServiceAsyncStub = SessionServiceStub(self.channel)
        self.checkpoints: CheckpointServiceAsyncStub = CheckpointServiceStub(self.channel)
        self.workflows: WorkflowServiceAsyncStub = WorkflowServiceStub(self.channel)
        self.admin: AdminServiceAsyncStub = AdminServiceStub(self.channel)


class Wire:
    """All connections of one client. `direct`: ask nodes to name a session's owner, and go there."""

    def __init__(self, addresses: Sequence[str], direct: bool = False) -> None:
        if not addresses:
            raise ValueError("a client needs at least one address")
        self.addresses = tuple(addresses)
        self._metadata = DIRECT_METADATA if direct else ()
        self._next = 0
        self._routes: dict[str, str] = {}
        self._open: dict[str, Connection] = {}
        self._closed = False

    def connection(self, route: str = "") -> Connection:
        """The connection for a session's calls ("": any). Raises ClientClosedError, ForkedProcessError."""
        if self._closed:
            raise ClientClosedError
        check_process()
        address = self._routes.get(route) or self.addresses[self._next]
        if address not in self._open:
            self._open[address] = Connection(address, self._metadata)
        return self._open[address]

    def follow(self, error: RemoteError, route: str, tried: Connection) -> bool:
        """After a failure on `tried`, choose where the next try goes. False: nowhere that was not just tried."""
        owner = error.metadata.get("address", "")
        if error.reason == "SESSION_RELOCATING" and owner and owner != tried.address:
            if len(self._routes) >= ROUTES_MAX:
                del self._routes[next(iter(self._routes))]
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

        def send(connection: Connection, left_s: float) -> Awaitable[R]:
            return pick(connection)(request, timeout=left_s, metadata=connection.metadata)

        return await self.call(send, route, timeout_s)

    async def call(
        self,
        send: Callable[[Connection, float], Awaitable[R]],
        route: str = "",
        timeout_s: float = LONG_DEADLINE_SECONDS,
    ) -> R:
        """Send a call, which may upload a stream, and return its answer; raises RemoteError. `send` gets a connection
        and the seconds that are left of `timeout_s`, which is for all tries together. gRPC itself repeats UNAVAILABLE a
        few times; then other nodes are tried, each once, and the owner that a node names."""
        loop, tries = asyncio.get_running_loop(), Tries(self, route)
        ends_at = loop.time() + timeout_s
        while True:
            connection = self.connection(route)
            try:
                with self.closing_told():
                    return await send(connection, ends_at - loop.time())
            except grpc.aio.AioRpcError as failure:
                error = remote_error(failure)
            await tries.again(error, connection)
            if loop.time() >= ends_at:
                raise error

    async def stream(
        self, send: Callable[[Connection], grpc.aio.UnaryStreamCall[Any, R]], route: str = ""
    ) -> AsyncGenerator[R, None]:
        """Messages of a call that can't go on where it broke off: it is sent again as `call` does until its first
        message has come; later failures are the caller's. Raises RemoteError. Closing the iterator cancels the call."""
        tries, heard = Tries(self, route), False
        while True:
            connection = self.connection(route)
            call = send(connection)
            try:
                with self.closing_told():
                    async for message in call:
                        heard = True
                        yield message
                return
            except grpc.aio.AioRpcError as failure:
                error = remote_error(failure)
            finally:
                call.cancel()
            if heard:
                raise error
            await tries.again(error, connection)

    @contextmanager
    def closing_told(self) -> Iterator[None]:
        """Closing a channel cancels whoever waits for it, who did not ask for that: it gets ClientClosedError."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):
                raise ClientClosedError from None
            raise

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        self._closed = True
        connections = list(self._open.values())
        self._open.clear()
        for connection in connections:
            await connection.channel.close()


class Tries:
    """The tries of one call: after a failure, whether it is sent again, and where. Only what is UNAVAILABLE is; the
    request's id makes all tries one call."""

    def __init__(self, wire: Wire, route: str) -> None:
        self._wire, self._route = wire, route
        self._failed = set[str]()
        self._left = REDIRECTS_MAX + len(wire.addresses)

    async def again(self, error: RemoteError, tried: Connection) -> None:
        """Return when the call may be sent again, to the wire's connection for its route; else raise `error`."""
        self._left -= 1
        if not error.is_retryable or not self._left:
            raise error
        moved = self._wire.follow(error, self._route, tried)
        if error.reason == "SESSION_RELOCATING":
            await asyncio.sleep(error.retry_after_s or 0.1)
            return
        self._failed.add(tried.address)
        if not moved or self._wire.connection(self._route).address in self._failed:
            raise error
