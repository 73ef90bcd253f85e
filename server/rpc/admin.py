"""AdminService."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final

from forkpoint.clock import Clock
from forkpoint.errors import InvalidFieldError, NotFoundError, SessionRelocatingError
from forkpoint.ids import SessionName, check_id
from forkpoint.proto.forkpoint.v1 import admin_pb2 as pb
from forkpoint.proto.forkpoint.v1.admin_pb2_grpc import AdminServiceServicer
from forkpoint.proto.forkpoint.v1.session_pb2 import Session
from forkpoint.server.rpc import responses
from forkpoint.server.rpc.identity import request_key
from forkpoint.server.rpc.moves import Moves, planned
from forkpoint.server.rpc.paging import cut_page, page_size, page_start
from forkpoint.server.rpc.served import Served
from forkpoint.server.rpc.stream import closed_after
from forkpoint.server.session.api import NodeView, SessionNode
from forkpoint.server.session.placement import NodeState

PROGRESS_SECONDS: Final = 0.5
"""How often a collection under way is told about."""


class Admin(AdminServiceServicer):
    """Reads nodes, moves sessions, collects garbage."""

    def __init__(self, node: SessionNode, served: Served, clock: Clock, moves: Moves) -> None:
        self._moves = moves
        self._node = node
        self._served = served
        self._clock = clock

    async def ListNodes(self, request: pb.ListNodesRequest, context: Any) -> pb.ListNodesResponse:
        after = page_start(request.page_token, "nodes")
        size = page_size(request.page_size)
        rows = [responses.node(view) for view in await self._node.list_nodes()]
        known = [row.incarnation for row in rows]
        if after and after not in known:
            raise InvalidFieldError("page_token", "its node is gone: list again from the start")
        left = rows[known.index(after) + 1 :] if after else rows
        page, token = cut_page(left, size, lambda node: node.incarnation, "nodes")
        return pb.ListNodesResponse(nodes=page, next_page_token=token)

    async def GetNode(self, request: pb.GetNodeRequest, context: Any) -> pb.Node:
        return responses.node(await self._newest(request.name))

    async def WatchNodes(self, request: pb.WatchNodesRequest, context: Any) -> AsyncIterator[pb.NodeEvent]:
        async with closed_after(self._node.watch_nodes()) as events:
            async for event in events:
                yield pb.NodeEvent(node=responses.node(event.node), gone=event.gone)

    async def MigrateSession(
        self, request: pb.MigrateSessionRequest, context: Any
    ) -> AsyncIterator[pb.MigrateProgress]:
        target = node_id(request.target_node, "target_node") if request.target_node else ""
        async with aclosing(self._node.migrate(SessionName.parse(request.name), target)) as reports:
            async for report in reports:
                yield responses.move(report, self._served)

    async def DrainNode(self, request: pb.DrainNodeRequest, context: Any) -> AsyncIterator[pb.DrainProgress]:
        await self._be(request.name)
        async with closed_after(self._node.drain()) as reports:
            async for report in reports:
                yield pb.DrainProgress(
                    sessions_left=report.left, sessions_moved=report.moved, sessions_parked=report.parked
                )

    async def UndrainNode(self, request: pb.UndrainNodeRequest, context: Any) -> pb.Node:
        await self._be(request.name)
        await self._node.undrain()
        return responses.node(await self._newest(request.name))

    async def Rebalance(self, request: pb.RebalanceRequest, context: Any) -> AsyncIterator[pb.RebalanceProgress]:
        if request.moves_max < 0:
            raise InvalidFieldError("moves_max", f"{request.moves_max} is no number of moves")
        moves = await self._node.plan_rebalance(request.moves_max)
        if request.dry_run:
            for move in moves:
                yield planned(move)
            return
        async with closed_after(self._moves.run(moves)) as events:
            async for event in events:
                yield event

    async def CollectGarbage(self, request: pb.CollectGarbageRequest, context: Any) -> AsyncIterator[pb.GcProgress]:
        told = self._clock.monotonic()
        async with closed_after(self._node.collect_garbage(request.dry_run)) as reports:
            async for report in reports:
                now = self._clock.monotonic()
                if report.done or now - told >= PROGRESS_SECONDS:
                    told = now
                    yield responses.progress(report)

    async def ReleaseQuarantine(self, request: pb.ReleaseQuarantineRequest, context: Any) -> Session:
        name = SessionName.parse(request.name)
        view = await self._node.release_quarantine(name, request_key(request, name.workflow, request.request_id))
        return responses.session(view, self._served)

    async def _newest(self, name: str) -> NodeView:
        """The newest incarnation of the node `nodes/N`."""
        node = node_id(name, "name")
        for view in reversed(await self._node.list_nodes()):
            if view.row.node == node:
                return view
        raise NotFoundError(name)

    async def _be(self, name: str) -> None:
        """Raises SessionRelocatingError, with the address, when the call is for another node: there it is sent on to;
        NotFoundError when that one is dead."""
        view = await self._newest(name)
        if view.row.incarnation == self._node.incarnation:
            return
        if view.state is NodeState.DEAD:
            raise NotFoundError(name, "is dead")
        raise SessionRelocatingError(name, view.row.node, view.row.address)


def node_id(name: str, field: str) -> str:
    """The id in a node's name `nodes/N`. Raises InvalidFieldError."""
    collection, _, node = name.partition("/")
    if collection != "nodes":
        raise InvalidFieldError(field, f"{name!r} is no node name: expected nodes/N")
    check_id(node, field)
    return node
