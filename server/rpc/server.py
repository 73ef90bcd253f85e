"""The gRPC server: services, health, reflection, limits, keepalive, and how it ends."""

from collections.abc import Sequence
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from forkpoint.clock import Clock
from forkpoint.limits import HEARTBEAT_SECONDS, MESSAGE_BYTES_MAX, STREAM_AGE_SECONDS_DEFAULT
from forkpoint.proto.forkpoint.internal.v1 import peer_pb2_grpc
from forkpoint.proto.forkpoint.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    session_service_pb2,
    session_service_pb2_grpc,
    workflow_pb2,
    workflow_pb2_grpc,
)
from forkpoint.server.rpc import health
from forkpoint.server.rpc.admin import Admin
from forkpoint.server.rpc.blobs import BlobDesk, NodeTier
from forkpoint.server.rpc.channels import Channels
from forkpoint.server.rpc.checkpoints import Checkpoints
from forkpoint.server.rpc.forward import Forwarder
from forkpoint.server.rpc.guard import Guard
from forkpoint.server.rpc.moves import Moves
from forkpoint.server.rpc.peer import Peer
from forkpoint.server.rpc.served import Served
from forkpoint.server.rpc.sessions import Sessions
from forkpoint.server.rpc.stream import Drain
from forkpoint.server.rpc.workflows import Workflows
from forkpoint.server.session.api import SessionNode

SERVICES = tuple(
    service.full_name
    for module in (session_service_pb2, checkpoint_pb2, workflow_pb2, admin_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
)
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"

OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
    ("grpc.keepalive_time_ms", 20_000),  # a client whose machine died is gone after these two
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # clients may ping this often
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


class RpcServer:
    """One port. Bind it, attach the sessions (which want to know the address), start."""

    def __init__(
        self,
        node_name: str,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        stream_age_seconds: float = STREAM_AGE_SECONDS_DEFAULT,
    ) -> None:
        self.drain = Drain(node_name)
        self.health = health.Health(SERVICES)
        self.guard = Guard(self.drain, heartbeat_seconds, stream_age_seconds)
        self._server = grpc.aio.server(interceptors=[self.guard], options=OPTIONS)

    def bind(self, address: str) -> int:
        """Take a port of `host:port` (0: any) and return it. Raises OSError when it is taken."""
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"can't listen on {address}") from error
        if port == 0:
            raise OSError(f"can't listen on {address}")
        return port

    def attach(
        self, node: SessionNode, served: Served, clock: Clock, channels: Channels, tiers: Sequence[NodeTier] = ()
    ) -> None:
        """Add the services. `channels`: to other nodes; `tiers`: the blobs that these can have of this one alone."""
        server = self._server
        session_service_pb2_grpc.add_SessionServiceServicer_to_server(Sessions(node, served, clock), server)
        checkpoint_pb2_grpc.add_CheckpointServiceServicer_to_server(Checkpoints(node, clock), server)
        workflow_pb2_grpc.add_WorkflowServiceServicer_to_server(Workflows(node, clock), server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(Admin(node, served, clock, Moves(node, channels)), server)
        peer_pb2_grpc.add_PeerServiceServicer_to_server(Peer(BlobDesk(tiers), node), server)
        self.health.fit = lambda: not node.stalled
        server.add_generic_rpc_handlers((self.health.handler(),))
        _add_reflection(server)

    def forward(self, forwarder: Forwarder) -> None:
        """Send calls to other nodes from the start on."""
        self.guard.forwarder = forwarder

    async def start(self) -> None:
        """Answer calls, and say so."""
        if self.guard.forwarder is not None:
            self.guard.forwarder.start()
        await self._server.start()
        await self.health.serve()

    async def begin_drain(self) -> None:
        """Say NOT_SERVING, refuse new calls, end streams with their cursor. Idempotent."""
        await self.health.stop()
        self.drain.start()

    async def stop(self, grace_seconds: float) -> None:
        """Drain, and let running calls end for at most `grace_seconds`. Idempotent."""
        await self.begin_drain()
        await self._server.stop(grace_seconds)
        if self.guard.forwarder is not None:
            await self.guard.forwarder.close()


def _add_reflection(server: grpc.aio.Server) -> None:
    """Reflection under its v1 name and under the older one; the messages are the same on the wire."""
    names = (*SERVICES, health.SERVICE, REFLECTION_V1, reflection.SERVICE_NAME)
    servicer: Any = reflection.aio.ReflectionServicer(service_names=names)
    for name in (REFLECTION_V1, reflection.SERVICE_NAME):
        method = grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})
        server.add_generic_rpc_handlers((handler,))
