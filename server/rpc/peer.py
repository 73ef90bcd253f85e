"""PeerService: what other nodes ask of this one. One service in gRPC; here blobs and sessions part ways."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from forkpoint.ids import SessionName
from forkpoint.proto.forkpoint.internal.v1 import peer_pb2 as pb
from forkpoint.proto.forkpoint.internal.v1.peer_pb2_grpc import PeerServiceServicer
from forkpoint.server.rpc.blobs import BlobDesk
from forkpoint.server.session.api import SessionNode
from forkpoint.server.session.ports import CutOverAsk, FollowAsk


class Peer(PeerServiceServicer):
    """Passes each call to whom it concerns."""

    def __init__(self, blobs: BlobDesk, node: SessionNode) -> None:
        self._blobs = blobs
        self._node = node

    async def Follow(self, request: pb.FollowRequest, context: Any) -> AsyncIterator[pb.FollowProgress]:
        name = SessionName.parse(request.name)
        ask = FollowAsk(name, request.epoch, request.owner, request.owner_address, request.migration)
        async with aclosing(self._node.follow(ask)) as reports:
            async for told in reports:
                yield pb.FollowProgress(
                    restored_tokens=told.restored_tokens,
                    restored_bytes=told.restored_bytes,
                    applied=told.applied,
                    known=told.known,
                )

    async def CutOver(self, request: pb.CutOverRequest, context: Any) -> pb.CutOverResponse:
        name = SessionName.parse(request.name)
        ask = CutOverAsk(name, request.epoch, request.head, request.head_hash, request.migration)
        return pb.CutOverResponse(epoch=await self._node.cut_over(ask))

    async def HasBlobs(self, request: pb.HasBlobsRequest, context: Any) -> pb.HasBlobsResponse:
        return await self._blobs.has(request)

    def FetchBlob(self, request: pb.FetchBlobRequest, context: Any) -> AsyncIterator[pb.BlobFrame]:
        return self._blobs.fetch(request)
