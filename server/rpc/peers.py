"""The other nodes as the session layer sees them: its port `Peers`, over gRPC."""

from __future__ import annotations  # grpc's classes are generic, and its stubs async, for type checkers only

import math
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Final

import grpc

from forkpoint.errors import UnavailableError
from forkpoint.ids import SessionName
from forkpoint.proto.forkpoint.internal.v1 import peer_pb2 as pb
from forkpoint.proto.forkpoint.internal.v1.peer_pb2_grpc import PeerServiceStub
from forkpoint.proto.forkpoint.v1.session_service_pb2 import ReadTokensRequest, TokenChunk
from forkpoint.proto.forkpoint.v1.session_service_pb2_grpc import SessionServiceStub
from forkpoint.server.rpc import responses
from forkpoint.server.rpc.channels import Channels
from forkpoint.server.rpc.remote import error_of
from forkpoint.server.rpc.routes import FORWARDED
from forkpoint.server.session.ports import CutOverAsk, FollowAsk, FollowReport, Peers, TailedTokens
from forkpoint.statestore.records import NodeRow

if TYPE_CHECKING:
    from forkpoint.proto.forkpoint.internal.v1.peer_pb2_grpc import PeerServiceAsyncStub
    from forkpoint.proto.forkpoint.v1.session_service_pb2_grpc import SessionServiceAsyncStub

KINDS: Final = {number: kind for kind, number in responses.KINDS.items()}


class GrpcPeers(Peers):
    """Calls on behalf of the node `sender`, over its channels."""

    def __init__(self, channels: Channels, sender: str) -> None:
        self._channels = channels
        self._metadata = ((FORWARDED, sender),)

    async def follow(self, node: NodeRow, ask: FollowAsk) -> AsyncGenerator[FollowReport, None]:
        request = pb.FollowRequest(
            name=str(ask.name),
            epoch=ask.epoch,
            owner=ask.owner,
            owner_address=ask.owner_address,
            migration=ask.migration,
        )

        def start(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall[pb.FollowRequest, pb.FollowProgress]:
            stub: PeerServiceAsyncStub = PeerServiceStub(channel)
            return stub.Follow(request, metadata=self._metadata)

        try:
            async with self._channels.streaming(node.address, start) as messages:
                async for told in messages:
                    yield FollowReport(told.restored_tokens, told.restored_bytes, told.applied, told.known)
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure, node.address) from failure

    async def cut_over(self, node: NodeRow, ask: CutOverAsk, timeout_seconds: float) -> int:
        request = pb.CutOverRequest(
            name=str(ask.name),
            epoch=ask.epoch,
            head=ask.head,
            head_hash=ask.head_hash,
            migration=ask.migration,
        )
        async with self._channels.use(node.address) as link:
            stub: PeerServiceAsyncStub = PeerServiceStub(link.channel)
            try:
                answer = await link.answer(stub.CutOver(request, metadata=self._metadata, timeout=timeout_seconds))
            except grpc.aio.AioRpcError as failure:
                raise error_of(failure, node.address) from failure
        return answer.epoch

    async def tail(self, address: str, name: SessionName, start: int) -> AsyncGenerator[TailedTokens, None]:
        request = ReadTokensRequest(name=str(name), start=start, follow=True)

        def begin(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall[ReadTokensRequest, TokenChunk]:
            stub: SessionServiceAsyncStub = SessionServiceStub(channel)
            return stub.ReadTokens(request, metadata=self._metadata)

        try:
            async with self._channels.streaming(address, begin) as chunks:
                async for chunk in chunks:
                    if chunk.token_ids:
                        yield _tailed(chunk)
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure, address) from failure
        raise UnavailableError(f"the node at {address} ended the tokens of {name}")


def _tailed(chunk: TokenChunk) -> TailedTokens:
    logprobs = [None if math.isnan(value) else value for value in chunk.logprobs]
    return TailedTokens(
        start=chunk.start,
        token_ids=tuple(chunk.token_ids),
        kinds=tuple(KINDS[kind] for kind in chunk.kinds),
        logprobs=tuple(logprobs) or (None,) * len(chunk.token_ids),
    )
