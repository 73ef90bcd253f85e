"""PeerService: what other nodes ask of this one. One service in gRPC; here blobs and sessions part ways."""

from collections.abc import AsyncIterator
from typing import Any

from forkpoint.proto.forkpoint.internal.v1 import peer_pb2 as pb
from forkpoint.proto.forkpoint.internal.v1.peer_pb2_grpc import PeerServiceServicer
from forkpoint.server.rpc.blobs import BlobDesk
from forkpoint.server.rpc.errors import MethodNotImplementedError


class Peer(PeerServiceServicer):
    """Passes each call to whom it concerns."""

    def __init__(self, blobs: BlobDesk) -> None:
        self._blobs = blobs

    def Follow(self, request: pb.FollowRequest, context: Any) -> AsyncIterator[pb.FollowProgress]:
        raise MethodNotImplementedError("PeerService.Follow")

    async def CutOver(self, request: pb.CutOverRequest, context: Any) -> pb.CutOverResponse:
        raise MethodNotImplementedError("PeerService.CutOver")

    async def HasBlobs(self, request: pb.HasBlobsRequest, context: Any) -> pb.HasBlobsResponse:
        return await self._blobs.has(request)

    def FetchBlob(self, request: pb.FetchBlobRequest, context: Any) -> AsyncIterator[pb.BlobFrame]:
        return self._blobs.fetch(request)
