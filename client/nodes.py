"""The nodes that share the service's store, and what moves sessions between them."""

from __future__ import annotations  # grpc's classes are generic in their stubs only

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import Message

from forkpoint.client.errors import RemoteError
from forkpoint.client.events import Events
from forkpoint.client.resume import Patience, resumed
from forkpoint.client.wire import Connection, Wire
from forkpoint.proto.forkpoint.v1 import admin_pb2 as pb


class Nodes:
    """All nodes, through whichever of them answers."""

    def __init__(self, wire: Wire, patience: Patience) -> None:
        self._wire = wire
        self._patience = replace(patience, idle_s=None)

    async def list(self) -> AsyncIterator[pb.Node]:
        """Incarnations, in order of registration."""
        request = pb.ListNodesRequest()
        while True:
            page = await self._wire.unary(lambda c: c.admin.ListNodes, request)
            for node in page.nodes:
                yield node
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def get(self, node: str) -> pb.Node:
        """By id or name: its newest incarnation."""
        return await self._wire.unary(lambda c: c.admin.GetNode, pb.GetNodeRequest(name=node_name(node)))

    def watch(self) -> Events[pb.NodeEvent]:
        """Every node as it is, then whatever comes, goes or changes beside its lease's counter. Outlives the node that
        tells it: what is told again by another one is left out."""
        return Events(self._watch())

    async def _watch(self) -> AsyncGenerator[pb.NodeEvent, None]:
        known: dict[str, pb.Node] = {}
        breaks: list[RemoteError] = []

        def opened(connection: Connection) -> grpc.aio.UnaryStreamCall[Message, pb.NodeEvent]:
            call: Any = connection.admin.WatchNodes
            return call(pb.WatchNodesRequest(), metadata=connection.metadata)  # type: ignore[no-any-return]

        async with aclosing(resumed(self._wire, opened, "", self._patience, breaks.append)) as events:
            async for event in events:
                if breaks:
                    breaks.clear()
                    for gone in await self._gone(known):
                        del known[gone.incarnation]
                        yield pb.NodeEvent(node=gone, gone=True)
                node = event.node
                if event.gone:
                    if known.pop(node.incarnation, None) is None:
                        continue
                elif _same(known.get(node.incarnation), node):
                    continue
                else:
                    known[node.incarnation] = node
                yield event

    async def _gone(self, known: dict[str, pb.Node]) -> tuple[pb.Node, ...]:
        """Those of `known` that left while nobody told us."""
        left = {node.incarnation async for node in self.list()}
        return tuple(node for incarnation, node in known.items() if incarnation not in left)

    def drain(self, node: str) -> Events[pb.DrainProgress]:
        """Place nothing on the node any more, and move its sessions to others or park them. Cancelling stops the moves;
        the node stays drained."""
        request = pb.DrainNodeRequest(name=node_name(node))
        return Events(self._wire.stream(lambda c: c.admin.DrainNode(request, metadata=c.metadata)))

    async def undrain(self, node: str) -> pb.Node:
        """Let sessions be placed on the node again."""
        return await self._wire.unary(lambda c: c.admin.UndrainNode, pb.UndrainNodeRequest(name=node_name(node)))

    def rebalance(self, *, moves_max: int = 0, dry_run: bool = False) -> Events[pb.RebalanceProgress]:
        """Move sessions from the nodes that have the most to those that have the least: one event a move. `moves_max`
        0: as many as it takes. `dry_run`: only say what would move."""
        request = pb.RebalanceRequest(moves_max=moves_max, dry_run=dry_run)
        return Events(self._wire.stream(lambda c: c.admin.Rebalance(request, metadata=c.metadata)))


def node_name(node: str) -> str:
    """The resource name of a node that was given by id or name."""
    return node if node.startswith("nodes/") else f"nodes/{node}"


def _same(before: pb.Node | None, now: pb.Node) -> bool:
    """Whether nothing but the lease's counter has changed."""
    if before is None:
        return False
    counted = pb.Node()
    counted.CopyFrom(before)
    counted.lease_counter = now.lease_counter
    return counted == now
