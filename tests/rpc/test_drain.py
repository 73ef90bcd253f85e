"""Draining, leaving and rebalancing over the API: streams go on, and calls find their way at once."""

import asyncio
from collections import Counter
from pathlib import Path

import grpc
import pytest

from forkpoint.client.client import Client
from forkpoint.client.errors import remote_error
from forkpoint.client.generation import Generation
from forkpoint.client.session import Session
from forkpoint.client.wire import Connection
from forkpoint.ids import SessionName
from forkpoint.proto.forkpoint.v1 import admin_pb2 as pb
from forkpoint.proto.forkpoint.v1 import session_service_pb2
from forkpoint.server.engine.batch import Sample
from tests.support.hash_engine import HashEngine, continuation
from tests.support.rpc_nodes import Nodes, nodes
from tests.support.rpc_site import Refusal, Served

GREEDY = Sample(0.0, 0, 1.0, 0.0, 0)
TEXT = "what runs on a node that is to go"


def small() -> HashEngine:
    """Room for all sessions of a test, at 100 tokens a second."""
    engine = HashEngine(slots=6)
    engine.step_pause = 0.01
    return engine


async def running(client: Client, at: Served, count: int) -> list[tuple[Session, Generation]]:
    """Generations that begin on a node; returns once all have."""
    pairs = list[tuple[Session, Generation]]()
    for number in range(count):
        session = client.sessions.open((await at.session(f"s{number}", TEXT)).name)
        pairs.append((session, session.generate(max_tokens=5000)))
    await asyncio.gather(*(anext(generation) for _, generation in pairs))
    return pairs


async def cut_short(pairs: list[tuple[Session, Generation]]) -> None:
    """Read on for a while, then cancel: each stream had all tokens of its generation, once and in order."""
    for session, generation in pairs:
        seen = len(generation.token_ids)
        while len(generation.token_ids) < seen + 10:
            await anext(generation)
        await session.cancel_generation()
        await generation.result()
        assert generation.finished is not None and generation.finished.head == len(TEXT) + len(generation.token_ids)
        assert generation.token_ids == continuation(TEXT.encode(), len(generation.token_ids), GREEDY)[0]


async def drain(at: Served, name: str) -> list[pb.DrainProgress]:
    """Drain a node by a call at any."""
    return [event async for event in at.raw.admin.DrainNode(pb.DrainNodeRequest(name=f"nodes/{name}"))]


async def owners(pairs: list[tuple[Session, Generation]]) -> list[str]:
    """Who has the sessions."""
    return [(await session.get()).node for session, _ in pairs]


async def test_a_node_drained_through_another_keeps_its_streams_and_its_address(tmp_path: Path) -> None:
    async with asyncio.timeout(60), nodes(tmp_path, "a", small) as cluster:
        a = cluster.by_name["a"]
        pairs = await running(a.client, a, 3)
        b = await cluster.start("b")
        events = await drain(b, "a")
        assert (events[-1].sessions_left, events[-1].sessions_moved, events[-1].sessions_parked) == (0, 3, 0)
        assert await owners(pairs) == ["nodes/b"] * 3
        await cut_short(pairs)
        assert not any(generation.reconnects for _, generation in pairs), "the streams went through a all the time"
        name = pb.GetNodeRequest(name="nodes/a")
        assert (await b.raw.admin.GetNode(name)).state == pb.Node.DRAINING
        fresh = await a.session("fresh", TEXT)
        await fresh.generate(max_tokens=5).result()
        assert (await fresh.get()).node == "nodes/b", "the drained node sent the call on"
        assert not a.engine.sequences
        again = await b.raw.admin.UndrainNode(pb.UndrainNodeRequest(name="nodes/a"))
        assert again.state == pb.Node.SERVING == (await a.raw.admin.GetNode(name)).state


async def test_after_a_node_left_the_next_call_goes_elsewhere_at_once(tmp_path: Path) -> None:
    """As on SIGTERM: nobody waits for a lease to end, and no session counts as lost by its owner."""
    async with asyncio.timeout(60), nodes(tmp_path, "a", small) as cluster:
        a = cluster.by_name["a"]
        b = await cluster.start("b")
        async with Client([a.address, b.address]) as client:
            pairs = await running(client, a, 3)
            idle = client.sessions.open((await a.session("idle", TEXT)).name)
            await cluster.stop("a")
            began = asyncio.get_running_loop().time()
            assert (await idle.append(text="!")).start == len(TEXT)
            assert asyncio.get_running_loop().time() - began < 3.0, "a lease's time"
            await cut_short(pairs)
            assert await owners([*pairs, (idle, pairs[0][1])]) == ["nodes/b"] * 4
            for session, _ in pairs:
                view = await b.running.node.get_session(SessionName.parse(session.name))
                assert view.row.takeovers == 0


async def test_running_sessions_are_spread_evenly_by_a_node_that_has_none(tmp_path: Path) -> None:
    async with asyncio.timeout(60), nodes(tmp_path, "a", small) as cluster:
        a = cluster.by_name["a"]
        pairs = await running(a.client, a, 5)
        await cluster.start("b")
        c = await cluster.start("c")
        await told(cluster)
        planned = [move async for move in c.raw.admin.Rebalance(pb.RebalanceRequest(dry_run=True))]
        assert [(move.source_node, move.moved, move.problem) for move in planned] == [("nodes/a", False, "")] * 3
        assert await owners(pairs) == ["nodes/a"] * 5, "a dry run moves nothing"
        one = [move async for move in c.raw.admin.Rebalance(pb.RebalanceRequest(moves_max=1))]
        assert [move.moved for move in one] == [True]
        moved = [move async for move in c.raw.admin.Rebalance(pb.RebalanceRequest())]
        assert [(move.moved, move.problem) for move in moved] == [(True, "")] * 2
        assert sorted(Counter(await owners(pairs)).values()) == [1, 2, 2]
        assert [move async for move in c.raw.admin.Rebalance(pb.RebalanceRequest())] == []
        await cut_short(pairs)


async def told(cluster: Nodes) -> None:
    """Until every node knows how many slots each has."""
    for site in cluster.by_name.values():
        while not all(node.status.slots_total for node in site.running.node.members.nodes):
            await asyncio.sleep(0.02)


async def test_nodes_that_are_none_are_refused(tmp_path: Path) -> None:
    async with asyncio.timeout(60), nodes(tmp_path, "ab", small) as cluster:
        a = cluster.by_name["a"]
        async with Refusal(grpc.StatusCode.NOT_FOUND, "NOT_FOUND"):
            await drain(a, "nobody")
        async with Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"):
            await a.raw.admin.UndrainNode(pb.UndrainNodeRequest(name="workflows/w"))
        async with Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"):
            await a.raw.admin.Rebalance(pb.RebalanceRequest(moves_max=-1)).read()
        await cluster.vanish("b")
        await a.running.node.members.refresh()
        async with Refusal(grpc.StatusCode.NOT_FOUND, "NOT_FOUND"):
            await drain(a, "b")


async def test_calls_that_are_refused_while_a_node_stops_get_their_status_or_are_to_come_again(tmp_path: Path) -> None:
    async with asyncio.timeout(60), nodes(tmp_path, "a") as cluster:
        direct = Connection(cluster.by_name["a"].address)
        request = session_service_pb2.GetSessionRequest(name="workflows/w/sessions/nobody")

        told = 0
        busy = asyncio.Event()

        async def ask() -> None:
            """Until the node is gone."""
            nonlocal told
            for _ in range(100_000):
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await direct.sessions.GetSession(request, timeout=10)
                error = remote_error(failure.value)
                if error.is_retryable:
                    return
                assert (error.code, error.reason) == ("NOT_FOUND", "NOT_FOUND"), error
                told += 1
                if told > 80:
                    busy.set()
            raise AssertionError("the node never went")

        try:
            asking = asyncio.gather(*(ask() for _ in range(40)))
            await busy.wait()
            await cluster.stop("a")
            await asking
        finally:
            await direct.channel.close()
