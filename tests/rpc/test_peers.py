"""The port `Peers` over gRPC, against a small node that answers as the test says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo

from forkpoint import errors
from forkpoint.ids import SessionName
from forkpoint.move_errors import MigrationEndedError, MigrationUnderwayError, MoveFailedError
from forkpoint.proto.forkpoint.internal.v1 import peer_pb2 as pb
from forkpoint.proto.forkpoint.internal.v1.peer_pb2_grpc import PeerServiceServicer, add_PeerServiceServicer_to_server
from forkpoint.proto.forkpoint.v1 import common_pb2
from forkpoint.proto.forkpoint.v1.session_service_pb2 import ReadTokensRequest, TokenChunk
from forkpoint.proto.forkpoint.v1.session_service_pb2_grpc import (
    SessionServiceServicer,
    add_SessionServiceServicer_to_server,
)
from forkpoint.server.rpc.channels import Channels
from forkpoint.server.rpc.peers import GrpcPeers
from forkpoint.server.rpc.status import code_of, status_of, trailer
from forkpoint.server.session.ports import CutOverAsk, FollowAsk, FollowReport, TailedTokens
from forkpoint.statestore.records import Kind, NodeRow
from tests.rpc.test_status import SESSION, TABLE

NAME = SessionName("w", "s")
ASK = FollowAsk(NAME, 4, "i-owner", "owner:1", "m-1")
CUT = CutOverAsk(NAME, 4, 17, b"h" * 32, "m-1")
MOVES = [
    MigrationUnderwayError(SESSION, "m-1", "i-2"),
    MigrationEndedError(SESSION, "m-1"),
    MoveFailedError(SESSION, "i-2", "no room"),
]


class OtherNode(PeerServiceServicer, SessionServiceServicer):
    """Answers; remembers who asked what."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.peers: set[str] = set()
        self.markers: list[str] = []
        self.error: errors.ForkpointError | None = None
        self.reason = ""
        """Of the error, when it is not the class's own."""
        self.hangs = False
        self.open = 0
        self.sent = 0
        self.reports = [pb.FollowProgress(restored_tokens=16, restored_bytes=9, applied=20, known=24)]
        self.chunks: list[TokenChunk] = []

    async def _enter(self, request: Any, context: Any) -> None:
        self.asked.append(request)
        self.peers.add(context.peer())
        self.markers += [value for key, value in context.invocation_metadata() if key == "forkpoint-forwarded"]
        if self.error is not None:
            status = status_of(self.error)
            if self.reason:
                status.details[0].Pack(ErrorInfo(reason=self.reason, domain="forkpoint"))
            await context.abort(code_of(self.error), status.message, trailer(status))

    async def CutOver(self, request: pb.CutOverRequest, context: Any) -> pb.CutOverResponse:
        await self._enter(request, context)
        if self.hangs:
            await asyncio.sleep(60)
        return pb.CutOverResponse(epoch=5)

    async def Follow(self, request: pb.FollowRequest, context: Any) -> AsyncIterator[pb.FollowProgress]:
        await self._enter(request, context)
        self.open += 1
        try:
            for report in self.reports:
                yield report
            if self.hangs:
                await asyncio.sleep(60)
        finally:
            self.open -= 1

    async def ReadTokens(self, request: ReadTokensRequest, context: Any) -> AsyncIterator[TokenChunk]:
        await self._enter(request, context)
        for chunk in self.chunks:
            self.sent += 1
            yield chunk

    async def all_closed(self) -> None:
        """Wait until no stream is open."""
        async with asyncio.timeout(10):
            while self.open:
                await asyncio.sleep(0.005)


@pytest.fixture
async def other() -> AsyncIterator[tuple[OtherNode, NodeRow]]:
    servicer: Any = OtherNode()  # type: ignore[abstract]  # it answers what is asked here, no more
    server = grpc.aio.server()
    add_PeerServiceServicer_to_server(servicer, server)
    add_SessionServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer, NodeRow("i-2", "b", address, "cpu")
    await server.stop(None)


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    opened = Channels()
    yield opened
    await opened.close()


@pytest.fixture
def peers(channels: Channels) -> GrpcPeers:
    return GrpcPeers(channels, "i-owner")


async def test_a_follower_is_asked_for_and_reports(peers: GrpcPeers, other: tuple[OtherNode, NodeRow]) -> None:
    servicer, node = other
    assert [report async for report in peers.follow(node, ASK)] == [FollowReport(16, 9, 20, 24)]
    assert servicer.asked == [
        pb.FollowRequest(name=str(NAME), epoch=4, owner="i-owner", owner_address="owner:1", migration="m-1")
    ]
    assert servicer.markers == ["i-owner"]


async def test_closing_the_reports_ends_the_follower(peers: GrpcPeers, other: tuple[OtherNode, NodeRow]) -> None:
    servicer, node = other
    servicer.hangs = True
    async with aclosing(peers.follow(node, ASK)) as reports:
        await anext(reports)
        assert servicer.open == 1
    await servicer.all_closed()


async def test_cancelling_who_waits_for_a_report_cancels_the_call_there(
    peers: GrpcPeers, other: tuple[OtherNode, NodeRow]
) -> None:
    servicer, node = other
    servicer.hangs = True
    first = asyncio.Event()

    async def watch() -> None:
        async for _ in peers.follow(node, ASK):
            first.set()

    task = asyncio.create_task(watch())  # owner: this test
    await first.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await servicer.all_closed()


async def test_a_cut_over_returns_the_new_epoch(peers: GrpcPeers, other: tuple[OtherNode, NodeRow]) -> None:
    servicer, node = other
    assert await peers.cut_over(node, CUT, 5.0) == 5
    assert servicer.asked == [pb.CutOverRequest(name=str(NAME), epoch=4, head=17, head_hash=b"h" * 32, migration="m-1")]


@pytest.mark.parametrize("error", [row[0] for row in TABLE] + MOVES, ids=lambda error: type(error).__name__)
async def test_an_error_of_a_peer_is_the_same_error_here(
    peers: GrpcPeers, other: tuple[OtherNode, NodeRow], error: errors.ForkpointError
) -> None:
    servicer, node = other
    servicer.error = error
    with pytest.raises(type(error)) as caught:
        await peers.cut_over(node, CUT, 5.0)
    assert type(caught.value) is type(error)
    assert (str(caught.value), caught.value.facts()) == (str(error), error.facts())


async def test_numbers_of_an_error_are_numbers_again(peers: GrpcPeers, other: tuple[OtherNode, NodeRow]) -> None:
    servicer, node = other
    servicer.error = errors.NodeDrainingError("b")
    with pytest.raises(errors.NodeDrainingError) as draining:
        await anext(peers.follow(node, ASK))
    assert draining.value.resume_position is None
    servicer.error = errors.StaleEpochError(str(NAME), 4, 6)
    with pytest.raises(errors.StaleEpochError) as stale:
        await anext(peers.follow(node, ASK))
    assert stale.value.current_epoch == 6


async def test_an_error_of_a_newer_version_is_of_the_kind_that_its_code_tells(
    peers: GrpcPeers, other: tuple[OtherNode, NodeRow]
) -> None:
    servicer, node = other
    servicer.error, servicer.reason = errors.PreconditionError("later"), "NOT_KNOWN_HERE"
    with pytest.raises(errors.PreconditionError) as caught:
        await peers.cut_over(node, CUT, 5.0)
    assert type(caught.value) is errors.PreconditionError
    assert str(caught.value) == "later"


async def test_a_peer_that_hangs_is_unavailable_after_the_deadline(
    peers: GrpcPeers, other: tuple[OtherNode, NodeRow]
) -> None:
    servicer, node = other
    servicer.hangs = True
    with pytest.raises(errors.UnavailableError):
        await peers.cut_over(node, CUT, 0.1)


async def test_a_peer_that_is_not_there_is_unavailable(peers: GrpcPeers) -> None:
    nobody = NodeRow("i-3", "c", "127.0.0.1:1", "cpu")
    with pytest.raises(errors.UnavailableError):
        await peers.cut_over(nobody, CUT, 5.0)
    with pytest.raises(errors.UnavailableError):
        await anext(peers.follow(nobody, ASK))
    with pytest.raises(errors.UnavailableError):
        await anext(peers.tail(nobody.address, NAME, 0))


async def test_tokens_are_tailed_with_kinds_and_logprobs(peers: GrpcPeers, other: tuple[OtherNode, NodeRow]) -> None:
    servicer, node = other
    servicer.chunks = [
        TokenChunk(start=3, token_ids=[7, 8], kinds=[common_pb2.PROMPT, common_pb2.GENERATED], text_utf8=b"x"),
        TokenChunk(start=5, token_ids=[9, 1], kinds=[common_pb2.GENERATED] * 2, logprobs=[-0.5, float("nan")]),
        TokenChunk(start=7, text_utf8=b"rest"),
    ]
    got = list[TailedTokens]()
    with pytest.raises(errors.UnavailableError):
        async for tokens in peers.tail(node.address, NAME, 3):
            got.append(tokens)
    assert got == [
        TailedTokens(3, (7, 8), (Kind.PROMPT, Kind.GENERATED), (None, None)),
        TailedTokens(5, (9, 1), (Kind.GENERATED, Kind.GENERATED), (-0.5, None)),
    ]
    assert servicer.asked == [ReadTokensRequest(name=str(NAME), start=3, follow=True)]
    assert servicer.markers == ["i-owner"], "a peer must not send the call on"


async def test_all_calls_to_a_node_share_a_connection(
    peers: GrpcPeers, channels: Channels, other: tuple[OtherNode, NodeRow]
) -> None:
    servicer, node = other
    servicer.hangs = True
    followers = [peers.follow(node, ASK) for _ in range(20)]
    await asyncio.gather(*(anext(follower) for follower in followers))
    servicer.hangs = False
    await asyncio.gather(*(peers.cut_over(node, CUT, 5.0) for _ in range(20)))
    assert len(servicer.peers) == 1
    assert list(channels.addresses) == [node.address]
    for follower in followers:
        await follower.aclose()


async def test_a_channel_that_nobody_uses_is_closed(other: tuple[OtherNode, NodeRow]) -> None:
    servicer, node = other
    channels = Channels(idle_seconds=0.01)
    peers = GrpcPeers(channels, "i-owner")
    servicer.hangs = True
    follower = peers.follow(node, ASK)
    await anext(follower)
    await asyncio.sleep(0.05)
    assert list(channels.addresses) == [node.address], "it is in use"
    await follower.aclose()
    async with asyncio.timeout(5):
        while channels.addresses:
            await asyncio.sleep(0.005)
    servicer.hangs = False
    assert await peers.cut_over(node, CUT, 5.0) == 5, "and made anew when it is needed"
    await channels.close()


async def test_calls_to_a_node_that_is_given_up_end_as_unavailable(
    peers: GrpcPeers, channels: Channels, other: tuple[OtherNode, NodeRow]
) -> None:
    servicer, node = other
    servicer.hangs = True
    follower = peers.follow(node, ASK)
    await anext(follower)
    cut = asyncio.create_task(peers.cut_over(node, CUT, 30.0))  # owner: this test
    async with asyncio.timeout(10):
        while len(servicer.asked) < 2:
            await asyncio.sleep(0.005)
    channels.give_up(node.address)
    with pytest.raises(errors.UnavailableError):
        await anext(follower)
    with pytest.raises(errors.UnavailableError):
        await cut
    servicer.hangs = False
    assert await peers.cut_over(node, CUT, 5.0) == 5


async def test_a_reader_that_takes_its_time_makes_the_peer_wait(
    peers: GrpcPeers, other: tuple[OtherNode, NodeRow]
) -> None:
    servicer, node = other
    text = bytes(1024 * 1024)
    servicer.chunks = [
        TokenChunk(start=n, token_ids=[1], kinds=[common_pb2.GENERATED], text_utf8=text) for n in range(200)
    ]
    tail = peers.tail(node.address, NAME, 0)
    await anext(tail)
    sent = -1
    while sent != servicer.sent:
        sent = servicer.sent
        await asyncio.sleep(0.2)
    assert sent < 60, "the rest is not kept here"
    await tail.aclose()
