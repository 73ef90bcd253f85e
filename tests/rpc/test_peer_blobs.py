"""Blobs that only another node has, fetched from it, whatever lies, stalls, breaks off or is gone beside it."""

from __future__ import annotations  # grpc's classes are generic in their stubs only

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest

from forkpoint.clock import SystemClock
from forkpoint.errors import BlobMissingError, StoreUnavailableError
from forkpoint.limits import PEER_ASK_DIGESTS_MAX, PEER_FRAME_BYTES_MAX
from forkpoint.proto.forkpoint.internal.v1 import peer_pb2 as pb
from forkpoint.proto.forkpoint.internal.v1 import peer_pb2_grpc
from forkpoint.server.rpc import peerblobs
from forkpoint.server.rpc.blobs import BlobDesk, NodeTier
from forkpoint.server.rpc.channels import Channels
from forkpoint.server.rpc.guard import Guard
from forkpoint.server.rpc.peer import Peer
from forkpoint.server.rpc.peerblobs import PeerBlobs
from forkpoint.server.rpc.stream import Drain
from forkpoint.server.session.api import SessionNode
from forkpoint.statestore.codec import digest_of, encode
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.records import NodeRow
from forkpoint.statestore.tiers import Tier, TieredBlobs
from forkpoint.statestore.whole import is_whole

if TYPE_CHECKING:
    from forkpoint.proto.forkpoint.internal.v1.peer_pb2_grpc import PeerServiceAsyncStub

RAW = bytes(range(256)) * 4
DIGEST, FRAME = digest_of(RAW), encode(RAW)
LARGE = random.Random(5).randbytes(5 * PEER_FRAME_BYTES_MAX // 2)
"""Three pieces, as it does not compress."""
NO_SESSIONS = cast(SessionNode, object())


class Rude(Peer):
    """A peer that says it has everything and answers a fetch as `answer` does."""

    def __init__(self, answer: Callable[[bytes], AsyncIterator[pb.BlobFrame]]) -> None:
        super().__init__(BlobDesk([]), NO_SESSIONS)
        self._answer = answer

    async def HasBlobs(self, request: pb.HasBlobsRequest, context: Any) -> pb.HasBlobsResponse:
        return pb.HasBlobsResponse(held=[True] * len(request.digests))

    def FetchBlob(self, request: pb.FetchBlobRequest, context: Any) -> AsyncIterator[pb.BlobFrame]:
        return self._answer(request.digest)


class Broken:
    """A tier whose disk is gone."""

    async def get(self, digest: str) -> bytes:
        raise StoreUnavailableError("blobs", "gone")

    async def has(self, digest: str) -> bool:
        raise StoreUnavailableError("blobs", "gone")


class Neighbours:
    """Servers of this test, and what asks them."""

    def __init__(self) -> None:
        self.rows: list[NodeRow] = []
        self._servers: list[grpc.aio.Server] = []
        self._channels = Channels()
        self.asking = PeerBlobs(is_whole, SystemClock())
        self.asking.attach(lambda: self.rows, self._channels)

    async def add(self, peer: Peer) -> NodeRow:
        """A server that answers as `peer` does, behind the product's interceptor."""
        server = grpc.aio.server(interceptors=[Guard(Drain("n"))])
        port = server.add_insecure_port("127.0.0.1:0")
        peer_pb2_grpc.add_PeerServiceServicer_to_server(peer, server)
        await server.start()
        self._servers.append(server)
        row = NodeRow(f"i-{len(self.rows)}", f"n{len(self.rows)}", f"127.0.0.1:{port}", "x")
        self.rows.append(row)
        return row

    async def holding(self, *tiers: NodeTier) -> BlobDesk:
        """A node with these tiers."""
        desk = BlobDesk(tiers)
        await self.add(Peer(desk, NO_SESSIONS))
        return desk

    @asynccontextmanager
    async def raw(self) -> AsyncIterator[PeerServiceAsyncStub]:
        """The first node's stub."""
        async with self._channels.use(self.rows[0].address) as link:
            yield peer_pb2_grpc.PeerServiceStub(link.channel)

    async def close(self) -> None:
        await self._channels.close()
        for server in self._servers:
            await server.stop(0)


@pytest.fixture
async def neighbours() -> AsyncIterator[Neighbours]:
    site = Neighbours()
    yield site
    await site.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Silence is noticed at once."""
    monkeypatch.setattr(peerblobs, "ASK_SECONDS", 0.2)
    monkeypatch.setattr(peerblobs, "FRAME_SECONDS", 0.2)
    yield


async def holder(*raws: bytes) -> MemoryBlobs:
    """A tier with these blobs."""
    blobs = MemoryBlobs()
    await blobs.open()
    for raw in raws:
        await blobs.put(digest_of(raw), encode(raw))
    return blobs


def frames(*datas: bytes, total: int) -> Callable[[bytes], AsyncIterator[pb.BlobFrame]]:
    """An answer of these pieces, the first of which tells `total`."""

    async def answer(_: bytes) -> AsyncIterator[pb.BlobFrame]:
        for number, data in enumerate(datas):
            yield pb.BlobFrame(total_bytes=0 if number else total, data=data)

    return answer


async def silence(_: bytes) -> AsyncIterator[pb.BlobFrame]:
    """One piece, and then nothing for ever."""
    yield pb.BlobFrame(total_bytes=len(FRAME), data=FRAME[:9])
    await asyncio.Event().wait()


LIES = {
    "other bytes": frames(encode(RAW[1:]), total=len(encode(RAW[1:]))),
    "a flipped bit": frames(FRAME[:40] + bytes([FRAME[40] ^ 1]) + FRAME[41:], total=len(FRAME)),
    "too few bytes": frames(FRAME[:-1], total=len(FRAME)),
    "too many bytes": frames(FRAME, b"x", total=len(FRAME)),
    "no bytes": frames(total=0),
    "a length beyond all blobs": frames(FRAME, total=1 << 40),
    "a negative length": frames(FRAME, total=-1),
    "pieces beyond a mebibyte": frames(bytes(PEER_FRAME_BYTES_MAX + 1), total=PEER_FRAME_BYTES_MAX + 1),
}


async def test_a_blob_comes_from_the_one_node_that_has_it_and_then_from_there_at_once(neighbours: Neighbours) -> None:
    await neighbours.holding(await holder())
    having = await neighbours.holding(await holder(), await holder(RAW, LARGE))
    await neighbours.holding()
    assert await neighbours.asking.get(DIGEST) == FRAME
    whole = await neighbours.asking.get(digest_of(LARGE))
    assert whole == encode(LARGE) and len(whole) > 2 * PEER_FRAME_BYTES_MAX
    assert having.sent_bytes == neighbours.asking.fetched_bytes == len(FRAME) + len(whole)


async def test_what_nobody_has_is_missing_and_so_is_all_without_a_neighbour(neighbours: Neighbours) -> None:
    for _ in range(2):
        with pytest.raises(BlobMissingError):
            await neighbours.asking.get(DIGEST)
        await neighbours.holding(await holder(LARGE))
    await neighbours.asking.close()
    with pytest.raises(BlobMissingError):
        await neighbours.asking.get(digest_of(LARGE))


@pytest.mark.parametrize("lie", LIES)
async def test_a_peer_that_sends_something_else_is_passed_over_and_left_alone(neighbours: Neighbours, lie: str) -> None:
    await neighbours.add(Rude(LIES[lie]))
    with pytest.raises(BlobMissingError):
        await neighbours.asking.get(DIGEST)
    assert neighbours.asking.refused_blobs == 1
    await neighbours.holding(await holder(RAW))
    assert await neighbours.asking.get(DIGEST) == FRAME
    assert neighbours.asking.refused_blobs == 1, "it was not asked again"


@pytest.mark.usefixtures("impatient")
async def test_silent_gone_and_broken_peers_cost_time_only(neighbours: Neighbours) -> None:
    await neighbours.add(Rude(silence))
    neighbours.rows.append(NodeRow("i-gone", "gone", "127.0.0.1:1", "x"))
    await neighbours.holding(Broken())
    await neighbours.holding(Broken(), await holder(RAW))
    assert await neighbours.asking.get(DIGEST) == FRAME


async def test_a_fetch_that_is_cancelled_ends_at_the_peer_too(neighbours: Neighbours) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow(_: bytes) -> AsyncIterator[pb.BlobFrame]:
        begun.set()
        try:
            await asyncio.Event().wait()
            yield pb.BlobFrame()
        finally:
            ended.set()

    await neighbours.add(Rude(slow))
    fetch = asyncio.get_running_loop().create_task(neighbours.asking.get(DIGEST))  # owner: this test
    async with asyncio.timeout(10):
        await begun.wait()
        fetch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await fetch
        await ended.wait()


async def test_a_slow_reader_holds_back_the_sender(neighbours: Neighbours) -> None:
    """128 MiB, of which nothing is read: far less than that has been sent when the sender stands still."""
    huge = bytes(128 * PEER_FRAME_BYTES_MAX)
    tier = MemoryBlobs()
    await tier.open()
    await tier.put(DIGEST, huge)
    desk = await neighbours.holding(tier)
    async with neighbours.raw() as stub, asyncio.timeout(10):
        call = stub.FetchBlob(pb.FetchBlobRequest(digest=bytes.fromhex(DIGEST)))
        await call.read()
        sent = -1
        while desk.sent_bytes != sent:
            sent = desk.sent_bytes
            await asyncio.sleep(0.1)
        call.cancel()
    assert sent < len(huge) // 4, "gRPC widens a window to 16 MiB at most"


async def test_a_stack_takes_from_a_peer_what_no_tier_has_and_keeps_it(neighbours: Neighbours) -> None:
    await neighbours.add(Rude(LIES["other bytes"]))
    await neighbours.holding(await holder(RAW))
    own = MemoryBlobs()
    stack = TieredBlobs([Tier("own", own)], [neighbours.asking])
    await stack.open()
    assert await stack.get(DIGEST) == FRAME
    await stack.settle()
    assert await own.get(DIGEST) == FRAME
    with pytest.raises(BlobMissingError):
        await stack.get(digest_of(LARGE))
    await stack.close()


async def test_questions_that_are_none_are_refused(neighbours: Neighbours) -> None:
    await neighbours.holding(await holder(RAW))
    too_many = pb.HasBlobsRequest(digests=[bytes(32)] * (PEER_ASK_DIGESTS_MAX + 1))
    async with neighbours.raw() as stub:
        for call in (
            stub.HasBlobs(too_many),
            stub.HasBlobs(pb.HasBlobsRequest(digests=[b"short"])),
            stub.FetchBlob(pb.FetchBlobRequest(digest=b"short")).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        answer = await stub.HasBlobs(pb.HasBlobsRequest(digests=[bytes(32), bytes.fromhex(DIGEST)]))
        assert list(answer.held) == [False, True]
