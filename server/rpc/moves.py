"""Moves between any two nodes, whoever asks for them."""

from __future__ import annotations  # grpc's classes are generic, and its stubs async, for type checkers only

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Final

import grpc

from forkpoint.errors import ForkpointError
from forkpoint.proto.forkpoint.v1 import admin_pb2 as pb
from forkpoint.proto.forkpoint.v1.admin_pb2_grpc import AdminServiceStub
from forkpoint.server.rpc.channels import Channels
from forkpoint.server.rpc.remote import error_of
from forkpoint.server.rpc.responses import node_name
from forkpoint.server.rpc.routes import FORWARDED
from forkpoint.server.rpc.together import together
from forkpoint.server.session.api import PlannedMove, SessionNode

if TYPE_CHECKING:
    from forkpoint.proto.forkpoint.v1.admin_pb2_grpc import AdminServiceAsyncStub

MOVES_AT_ONCE: Final = 4
"""As many as one node that drains."""


class Moves:
    """Carries out what was planned: each session's owner moves it."""

    def __init__(self, node: SessionNode, channels: Channels) -> None:
        self._node = node
        self._channels = channels

    async def run(self, moves: list[PlannedMove]) -> AsyncIterator[pb.RebalanceProgress]:
        """One event a move, as they end. Closing the iterator cancels those under way."""
        async with together([partial(self._try, move) for move in moves], MOVES_AT_ONCE) as events:
            async for event in events:
                yield event

    async def _try(self, move: PlannedMove) -> pb.RebalanceProgress:
        event = planned(move)
        try:
            if move.source.incarnation == self._node.incarnation:
                await self._here(move)
            else:
                await self._there(move)
        except ForkpointError as error:
            event.problem = str(error)
        else:
            event.moved = True
        return event

    async def _here(self, move: PlannedMove) -> None:
        async with aclosing(self._node.migrate(move.name, move.target.node)) as reports:
            async for _ in reports:
                pass

    async def _there(self, move: PlannedMove) -> None:
        """Ask the owner; raises what it raises. It answers by itself: should the session be elsewhere by now, it is not
        the move that was planned."""
        request = pb.MigrateSessionRequest(name=str(move.name), target_node=node_name(move.target.node))
        metadata = ((FORWARDED, self._node.incarnation),)

        def start(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall[pb.MigrateSessionRequest, pb.MigrateProgress]:
            stub: AdminServiceAsyncStub = AdminServiceStub(channel)
            return stub.MigrateSession(request, metadata=metadata)

        try:
            async with self._channels.streaming(move.source.address, start) as reports:
                async for _ in reports:
                    pass
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure, move.source.address) from failure


def planned(move: PlannedMove) -> pb.RebalanceProgress:
    """The event of a move that was not made (yet)."""
    return pb.RebalanceProgress(
        name=str(move.name), source_node=node_name(move.source.node), target_node=node_name(move.target.node)
    )
