"""What nodes tell of themselves over the API, and how a quarantine ends."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

from forkpoint.ids import SessionName
from forkpoint.limits import TAKEOVERS_ALONE_MAX
from forkpoint.proto.forkpoint.v1 import admin_pb2 as pb
from forkpoint.proto.forkpoint.v1 import session_pb2, session_service_pb2
from forkpoint.server.engine.batch import Sampled, Work
from forkpoint.statestore.calls import BeginGeneration
from tests.support.hash_engine import HashEngine
from tests.support.rpc_nodes import nodes
from tests.support.rpc_site import Refusal, Served, served
from tests.support.store import PARAMS


@asynccontextmanager
async def watched(at: Served) -> AsyncIterator[AsyncIterator[pb.NodeEvent]]:
    """WatchNodes, ended with the block."""
    call = at.raw.admin.WatchNodes(pb.WatchNodesRequest())
    try:
        yield aiter(call)
    finally:
        call.cancel()


async def test_a_node_tells_its_room_and_what_it_has(site: Served) -> None:
    session = await site.session("s", "a text that takes a page")
    await session.generate(max_tokens=5).result()
    async with asyncio.timeout(10):
        while True:
            node = await site.raw.admin.GetNode(pb.GetNodeRequest(name="nodes/node"))
            if node.slots_free < node.slots_total:
                break
            await asyncio.sleep(0.05)
    assert (node.state, node.slots_total, node.slots_free) == (pb.Node.SERVING, 8, 7)
    assert (node.pages_total, node.pages_free) == (1024, 1023)
    assert (node.sessions, node.waiting, node.following) == (1, 0, 0)
    (listed,) = (await site.raw.admin.ListNodes(pb.ListNodesRequest())).nodes
    assert listed.incarnation == node.incarnation


async def test_who_watches_the_nodes_sees_them_come_drain_and_go(tmp_path: Path) -> None:
    async with asyncio.timeout(60), nodes(tmp_path, "a") as cluster, watched(cluster.by_name["a"]) as events:
        first = await anext(events)
        assert (first.node.name, first.node.state, first.gone) == ("nodes/a", pb.Node.SERVING, False)

        async def next_of(name: str, state: "pb.Node.State.ValueType") -> pb.NodeEvent:
            async for event in events:
                if event.node.name == name and (event.gone or event.node.state == state):
                    return event
            raise AssertionError("the stream ended")

        b = await cluster.start("b")
        assert not (await next_of("nodes/b", pb.Node.SERVING)).gone
        b.running.node._core.cordoned = True
        assert not (await next_of("nodes/b", pb.Node.DRAINING)).gone
        await cluster.stop("b")
        assert (await next_of("nodes/b", pb.Node.DEAD)).gone


async def test_a_quarantined_session_is_released_by_an_admin_and_takes_calls_again(site: Served) -> None:
    session = await site.session("s")
    catalog, name = site.parts.catalog, SessionName.parse(session.name)
    await catalog.acquire(name, "dead-0", 0)
    await catalog.begin_generation(BeginGeneration(name, 1, "g", PARAMS, (1, 2)))
    for epoch in range(1, TAKEOVERS_ALONE_MAX):
        await catalog.acquire(name, f"dead-{epoch}", epoch)
    append = session_service_pb2.AppendRequest(name=session.name, text_utf8=b"x")
    async with Refusal(grpc.StatusCode.FAILED_PRECONDITION, "SESSION_QUARANTINED"):
        await site.raw.sessions.Append(append)
    now = await session.get()
    assert now.state == session_pb2.Session.QUARANTINED
    lost = f"{TAKEOVERS_ALONE_MAX} owners in a row were lost that had it"
    assert now.state_reason == f"{lost}, and none wrote a token behind 2", "nobody knows which nodes they were"
    release = pb.ReleaseQuarantineRequest(name=session.name, request_id="release")
    released = await site.raw.admin.ReleaseQuarantine(release)
    assert (released.state, released.state_reason) == (session_pb2.Session.ACTIVE, "")
    await session.cancel_generation()
    assert (await site.raw.sessions.Append(append)).head > 2
    assert (await site.raw.admin.ReleaseQuarantine(release)).name == session.name, "the same call again"
    async with Refusal(grpc.StatusCode.FAILED_PRECONDITION, "FAILED_PRECONDITION"):
        await site.raw.admin.ReleaseQuarantine(pb.ReleaseQuarantineRequest(name=session.name, request_id="other"))


class StandingEngine(HashEngine):
    """Its steps wait for the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def step(self, works: Sequence[Work]) -> list[Sampled | None]:
        self.gate.wait(30)
        return super().step(works)


async def test_a_node_whose_work_stands_still_is_not_serving_and_takes_no_appends(tmp_path: Path) -> None:
    engine = StandingEngine()
    async with asyncio.timeout(60), served(tmp_path, engine, stall_seconds=1) as site:
        check = site.raw.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

        async def becomes(status: int) -> None:
            while (await check(health_pb2.HealthCheckRequest())).status != status:
                await asyncio.sleep(0.05)

        await becomes(health_pb2.HealthCheckResponse.SERVING)
        engine.gate.clear()
        session = await site.session("s", "text")
        while site.running.node.stalled != "a step":  # the event loop of a busy machine may stall as well, and recover
            await asyncio.sleep(0.05)
        await becomes(health_pb2.HealthCheckResponse.NOT_SERVING)
        append = session_service_pb2.AppendRequest(name=session.name, text_utf8=b"x")
        async with Refusal(grpc.StatusCode.UNAVAILABLE, "NODE_STALLED") as refusal:
            await site.raw.sessions.Append(append)
        assert "does not get on" in refusal.message
        assert (await session.get()).head == 4, "reading is no promise"
        node = await site.raw.admin.GetNode(pb.GetNodeRequest(name="nodes/node"))
        assert node.state == pb.Node.STALLED
        engine.gate.set()
        await becomes(health_pb2.HealthCheckResponse.SERVING)
        assert (await site.raw.sessions.Append(append)).head == 5
