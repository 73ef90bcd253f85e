"""PeerBlobs: blobs that only another node has, fetched from it. The last place where a restore looks."""

from __future__ import annotations  # grpc's classes are generic, and its stubs async, for type checkers only

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import grpc

from forkpoint.clock import Clock
from forkpoint.errors import BlobMissingError, UnavailableError
from forkpoint.limits import PEER_BLOB_BYTES_MAX, PEER_FRAME_BYTES_MAX
from forkpoint.proto.forkpoint.internal.v1 import peer_pb2 as pb
from forkpoint.proto.forkpoint.internal.v1.peer_pb2_grpc import PeerServiceStub
from forkpoint.server.rpc.channels import Channels
from forkpoint.server.rpc.together import together
from forkpoint.statestore.records import NodeRow

if TYPE_CHECKING:
    from forkpoint.proto.forkpoint.internal.v1.peer_pb2_grpc import PeerServiceAsyncStub

LOG: Final = logging.getLogger("forkpoint.rpc.peerblobs")
ASKED_AT_ONCE: Final = 8
"""Nodes that are asked for one blob at the same time."""
ASK_SECONDS: Final = 2.0
"""A node that does not say for so long whether it has a blob has none."""
FRAME_SECONDS: Final = 5.0
"""A node that sends nothing for so long is given up."""
BLOB_SECONDS: Final = 60.0
"""One that has not sent a whole blob after so long is, too: it is faster to replay."""
REST_SECONDS: Final = 5.0
"""A node that could not be asked, or sent something else, is left alone for so long."""


class _UnusableError(Exception):
    """What a peer sent is not the blob."""


class PeerBlobs:
    """A BlobSource (statestore/tiers.py). A peer that is gone, silent, or sends something else costs time and is asked
    again later; it never makes the store of blobs unavailable. Attach the node before others may be asked."""

    def __init__(self, is_whole: Callable[[str, bytes], Awaitable[bool]], clock: Clock) -> None:
        """`is_whole`: whether bytes are a frame whose content has that digest."""
        self._is_whole = is_whole
        self._clock = clock
        self._nodes: Callable[[], Sequence[NodeRow]] = tuple
        self._channels: Channels | None = None
        self._rests: dict[str, float] = {}
        """Incarnation -> when it may be asked again, on our clock."""
        self._last = ""
        """Incarnation that had the last blob: it probably has the next one of the same state as well."""
        self.fetched_blobs = self.fetched_bytes = self.refused_blobs = 0
        """Of the refused, what a peer sent was something else."""

    def attach(self, nodes: Callable[[], Sequence[NodeRow]], channels: Channels) -> None:
        """`nodes`: the living others, as of now."""
        self._nodes, self._channels = nodes, channels

    async def open(self) -> None:
        """There is nothing to reach before somebody is attached."""

    async def close(self) -> None:
        """Ask nobody any more. Idempotent."""
        self._channels = None

    async def get(self, digest: str) -> bytes:
        """The frame, whole. Raises BlobMissingError when no peer gave one."""
        now = self._clock.monotonic()
        nodes = [node for node in self._nodes() if self._rests.get(node.incarnation, now) <= now]
        last = [node for node in nodes if node.incarnation == self._last]
        for node in last:
            frame = await self._fetch(node, digest)
            if frame is not None:
                return frame
        asked = [partial(self._has, node, digest) for node in nodes if node not in last]
        async with together(asked, ASKED_AT_ONCE) as answers:
            async for holder in answers:
                frame = None if holder is None else await self._fetch(holder, digest)
                if holder is not None and frame is not None:
                    self._last = holder.incarnation
                    return frame
        raise BlobMissingError(digest)

    async def _has(self, node: NodeRow, digest: str) -> NodeRow | None:
        """The node, when it has the blob."""
        if self._channels is None:
            return None
        request = pb.HasBlobsRequest(digests=[bytes.fromhex(digest)])
        try:
            async with self._channels.use(node.address) as link:
                stub: PeerServiceAsyncStub = PeerServiceStub(link.channel)
                answer = await link.answer(stub.HasBlobs(request, timeout=ASK_SECONDS))
        except (grpc.aio.AioRpcError, UnavailableError) as error:
            self._rest(node, f"it does not say what it has: {_why(error)}")
            return None
        return node if list(answer.held) == [True] else None

    async def _fetch(self, node: NodeRow, digest: str) -> bytes | None:
        """The node's blob; None when it has none, breaks off, or sends something else."""
        if self._channels is None:
            return None
        request = pb.FetchBlobRequest(digest=bytes.fromhex(digest))

        def start(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall[pb.FetchBlobRequest, pb.BlobFrame]:
            stub: PeerServiceAsyncStub = PeerServiceStub(channel)
            return stub.FetchBlob(request, timeout=BLOB_SECONDS)

        try:
            async with self._channels.streaming(node.address, start) as pieces:
                frame = await _received(pieces)
            if not await self._is_whole(digest, frame):
                raise _UnusableError("its content has another digest")
        except (grpc.aio.AioRpcError, UnavailableError, TimeoutError) as error:
            if not (isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.NOT_FOUND):
                self._rest(node, f"blob {digest} broke off: {_why(error)}")
            return None
        except _UnusableError as error:
            self.refused_blobs += 1
            self._rest(node, f"it sent something else than blob {digest}: {error}")
            return None
        self.fetched_blobs += 1
        self.fetched_bytes += len(frame)
        return frame

    def _rest(self, node: NodeRow, why: str) -> None:
        """Leave the node alone for a while."""
        self._rests[node.incarnation] = self._clock.monotonic() + REST_SECONDS
        known = {other.incarnation for other in self._nodes()}
        self._rests = {incarnation: until for incarnation, until in self._rests.items() if incarnation in known}
        LOG.warning("node %s at %s is not asked for blobs for a while: %s", node.node, node.address, why)


async def _received(pieces: AsyncIterator[pb.BlobFrame]) -> bytes:
    """The blob, piece by piece, as gRPC's flow control lets them come. Raises _UnusableError, TimeoutError."""
    whole, total = bytearray(), -1
    while (piece := await _next(pieces)) is not None:
        total = piece.total_bytes if total < 0 else total
        if not 0 <= total <= PEER_BLOB_BYTES_MAX or len(piece.data) > PEER_FRAME_BYTES_MAX:
            raise _UnusableError(f"a piece of {len(piece.data)} bytes of {total}")
        whole += piece.data
        if len(whole) > total:
            raise _UnusableError(f"more than the {total} bytes that were told")
    if len(whole) != total:
        raise _UnusableError(f"{len(whole)} bytes of {total}")
    return bytes(whole)


async def _next(pieces: AsyncIterator[pb.BlobFrame]) -> pb.BlobFrame | None:
    async with asyncio.timeout(FRAME_SECONDS):
        return await anext(pieces, None)


def _why(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code().name
    return str(error) or f"nothing came for {FRAME_SECONDS:g} s"
