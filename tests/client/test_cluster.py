"""The client against three nodes: streams and calls go on whichever of them dies, leaves or hands a session over."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forkpoint.client import sync
from forkpoint.client.client import Client
from forkpoint.client.generation import Generation
from forkpoint.client.session import Session
from forkpoint.proto.forkpoint.v1 import admin_pb2
from forkpoint.server.engine.batch import Sample
from tests.support.hash_engine import continuation
from tests.support.rpc_nodes import Nodes, nodes

GREEDY = Sample(0.0, 0, 1.0, 0.0, 0)
TOKENS = 200


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[Nodes]:
    async with nodes(tmp_path, "abc") as running:
        for site in running.by_name.values():
            site.engine.step_pause = 0.003
        yield running


def addresses(three: Nodes, order: str = "abc") -> list[str]:
    return [three.by_name[name].address for name in order]


async def begun(generation: Generation) -> Generation:
    """Read the first tokens."""
    while len(generation.token_ids) < 20:
        await anext(generation)
    return generation


async def created(three: Nodes, owner: str, name: str = "s") -> Session:
    """A session that `owner` has."""
    return await three.by_name[owner].session(name, "hello")


async def finished(*streams: Generation) -> None:
    """Read to the end, where each must have every token once."""
    async with asyncio.timeout(60):
        await asyncio.gather(*(stream.result() for stream in streams))
    for stream in streams:
        assert stream.token_ids == continuation(b"hello", TOKENS, GREEDY)[0]


@pytest.mark.parametrize("dies", ["a", "b"])
async def test_a_stream_goes_on_when_the_node_that_sends_it_or_the_owner_dies(three: Nodes, dies: str) -> None:
    session = await created(three, "b")
    async with Client(addresses(three)) as client:
        stream = await begun(client.sessions.open(session.name).generate(max_tokens=TOKENS))
        reader = client.sessions.open(session.name).tokens(0, 5 + TOKENS, follow=True)
        assert (await anext(reader)).start == 0
        await three.vanish(dies)
        await asyncio.gather(finished(stream), reader.result())
        assert reader.token_ids == [*b"hello", *stream.token_ids]
        assert bool(stream.reconnects) == (dies == "a"), "what the owner's death is to the node that sends is its own"
        left = await client.sessions.open(session.name).get()
        assert left.node == ("nodes/b" if dies == "a" else left.node) != f"nodes/{dies}"


async def test_a_stream_that_is_moved_is_one_stream_forwarded_or_not(three: Nodes) -> None:
    session = await created(three, "b")
    async with Client(addresses(three)) as client, Client(addresses(three, "bca"), direct=True) as direct:
        streams = [
            await begun(one.sessions.open(session.name).generate(max_tokens=TOKENS, request_id="g"))
            for one in (client, direct)
        ]
        events = [event async for event in client.sessions.open(session.name).migrate("c")]
        assert (events[-1].session.node, events[-1].phase) == ("nodes/c", admin_pb2.MigrateProgress.MOVED)
        await finished(*streams)
        forwarded, straight = streams
        assert forwarded.reconnects == []
        assert {error.reason for error in straight.reconnects} == {"SESSION_RELOCATING"}
        assert (await direct.sessions.open(session.name).get()).node == "nodes/c"


async def test_a_call_for_a_session_whose_owner_died_is_answered_by_whoever_is_left(three: Nodes) -> None:
    session = await created(three, "a")
    async with Client(addresses(three)) as client:
        away = client.sessions.open(session.name)
        assert (await away.append(text="!", request_id="r")).head == 6
        await three.vanish("a")
        again = await away.append(text="!", request_id="r")
        assert (again.head, again.replayed) == (6, True), "a retry is the same call, whoever answers it"
        assert (await away.append(text="?")).head == 7


async def test_a_watch_sees_a_node_die_and_another_come(three: Nodes) -> None:
    async with Client(addresses(three)) as client, asyncio.timeout(60), client.nodes.watch() as events:
        assert {(await anext(events)).node.name for _ in range(3)} == {"nodes/a", "nodes/b", "nodes/c"}
        await three.vanish("c")
        async for event in events:
            if event.node.name == "nodes/c" and (event.gone or event.node.state == admin_pb2.Node.DEAD):
                break
        await three.start("d")
        async for event in events:
            if event.node.name == "nodes/d":
                assert event.node.state == admin_pb2.Node.SERVING
                break


async def test_standbys_are_kept_by_session_and_by_workflow(three: Nodes) -> None:
    async with Client(addresses(three)) as client, asyncio.timeout(60):
        await client.workflows.create("ready", standbys=2)
        session = await client.sessions.create("ready", "s")
        assert (await session.get()).standbys == 2
        assert (await session.update(standbys=1)).standbys == 1
        assert (await client.workflows.update("ready", standbys=0)).standbys == 0
        assert (await (await client.sessions.create("ready", "t")).get()).standbys == 0
        await session.append(text="hello")
        await session.generate(max_tokens=5).result()
        while sum([node.following async for node in client.nodes.list()]) != 1:
            await asyncio.sleep(0.05)


async def test_draining_a_node_moves_what_it_has_and_streams_go_on(three: Nodes) -> None:
    sessions = [await created(three, "a", name) for name in ("s", "t")]
    async with Client(addresses(three)) as client:
        streams = [client.sessions.open(session.name).generate(max_tokens=TOKENS) for session in sessions]
        for stream in streams:
            await begun(stream)
        progress = await client.nodes.drain("a").result()
        assert (progress.sessions_left, progress.sessions_moved, progress.sessions_parked) == (0, 2, 0)
        assert (await client.nodes.get("a")).state == admin_pb2.Node.DRAINING
        await finished(*streams)
        assert [stream.reconnects for stream in streams] == [[], []]
        assert (await client.nodes.undrain("a")).state == admin_pb2.Node.SERVING


async def test_the_blocking_client_follows_a_session_as_well(three: Nodes) -> None:
    session = await created(three, "b")

    def read() -> list[int]:
        with sync.Client(addresses(three)) as client:
            own = client.sessions.open(session.name)
            stream = own.generate(max_tokens=TOKENS)
            next(stream)
            assert own.migrate("c").result().session.node == "nodes/c"
            return stream.result().token_ids

    assert await asyncio.to_thread(read) == continuation(b"hello", TOKENS, GREEDY)[0]
