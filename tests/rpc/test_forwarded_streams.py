"""Streams at a node that does not own the session: the client sees one stream, whatever becomes of the owner."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from forkpoint.client.client import Client
from forkpoint.client.session import Session
from forkpoint.proto.forkpoint.v1 import common_pb2, session_pb2
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from forkpoint.server.engine.batch import Sample
from forkpoint.server.rpc import forward, relayed
from tests.rpc.test_streams import start_reader
from tests.support.hash_engine import HashEngine, continuation
from tests.support.rpc_nodes import Nodes, nodes
from tests.support.rpc_site import Refusal, Served, settled, start_server

Code = grpc.StatusCode
GREEDY = Sample(0.0, 0, 1.0, 0.0, 0)
PAUSE = 0.004
"""Seconds a step."""


def slow() -> HashEngine:
    """An engine that can be seen at work."""
    engine = HashEngine()
    engine.step_pause = PAUSE
    return engine


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Nodes]:
    """Nodes a and b."""
    async with nodes(tmp_path, "ab", slow) as running:
        yield running


@pytest.fixture
def a(pair: Nodes) -> Served:
    return pair.by_name["a"]


@pytest.fixture
def b(pair: Nodes) -> Served:
    return pair.by_name["b"]


class Stream:
    """A generation's raw stream, checked message by message."""

    def __init__(self, site: Served, name: str, count: int, **fields: Any) -> None:
        request = pb.GenerateRequest(name=name, request_id="g", max_tokens=count, **fields)
        self.call = site.raw.sessions.Generate(request)
        self.tokens: list[int] = []
        self.text = b""
        self.started = 0
        self.heartbeats: list[int] = []
        self.finished: pb.Finished | None = None

    async def read(self, tokens: int | None = None) -> None:
        """Until there are so many tokens, or to the end."""
        while tokens is None or len(self.tokens) < tokens:
            event = await self.call.read()
            if not isinstance(event, pb.GenerateResponse):
                assert self.finished is not None
                return
            self._take(event)

    def _take(self, event: pb.GenerateResponse) -> None:
        match event.WhichOneof("event"):
            case "started":
                self.started += 1
                self.start = event.started.start
                assert not self.tokens
            case "chunk":
                assert event.chunk.start == self.start + len(self.tokens), "each position once, in order"
                self.tokens += event.chunk.token_ids
                self.text += event.chunk.text_utf8
            case "heartbeat":
                self.heartbeats.append(event.heartbeat.position)
            case "finished":
                self.finished = event.finished

    async def whole(self, prompt: bytes, count: int) -> None:
        """Read the rest; all of it is what one undisturbed stream would be."""
        async with asyncio.timeout(30):
            await self.read()
        assert self.tokens == continuation(prompt, count, GREEDY)[0]
        assert (self.text, self.started) == (bytes(self.tokens), 1)
        assert self.finished is not None and self.finished.reason == common_pb2.LENGTH


async def kill(pair: Nodes) -> None:
    await pair.vanish("a")


async def stop(pair: Nodes) -> None:
    await pair.stop("a")


@pytest.mark.parametrize("end", [kill, stop])
async def test_a_generation_goes_on_when_its_owner_ends(
    pair: Nodes, a: Served, b: Served, end: Callable[[Nodes], Any]
) -> None:
    session = await a.session(text="hello")
    stream = Stream(b, session.name, 150)
    await stream.read(20)
    await end(pair)
    await stream.whole(b"hello", 150)
    assert (await b.client.sessions.open(session.name).get()).node == "nodes/b"


async def test_a_generation_goes_on_when_one_owner_after_the_other_dies(tmp_path: Path) -> None:
    async with nodes(tmp_path, "abcd", slow) as four:
        session = await four.by_name["a"].session(text="hello")
        front = four.by_name["d"]
        front.running.node._core.cordoned = True  # it only sends calls on
        stream = Stream(front, session.name, 200)
        away = front.client.sessions.open(session.name)
        for count in (20, 80):
            await stream.read(count)
            owner = (await away.get()).node.removeprefix("nodes/")
            assert owner != "d"
            await four.vanish(owner)
        await stream.whole(b"hello", 200)
        assert (await away.get()).epoch == 3


async def test_a_client_of_several_nodes_goes_on_when_the_node_it_talks_to_and_the_owner_die(tmp_path: Path) -> None:
    async with nodes(tmp_path, "abc", slow) as three:
        a, b, c = (three.by_name[name] for name in "abc")
        session = await a.session(text="hello")
        async with Client([b.address, c.address]) as client:
            generation = client.sessions.open(session.name).generate(max_tokens=150)
            async for _ in generation:
                if len(generation.token_ids) > 20:
                    break
            await asyncio.gather(three.vanish("a"), three.vanish("b"))
            await generation.result()
        assert generation.token_ids == continuation(b"hello", 150, GREEDY)[0]


async def test_streams_go_on_when_their_session_moves(tmp_path: Path) -> None:
    """One at the node that it leaves, one at the node that it comes to, one at a third."""
    async with nodes(tmp_path, "abc", slow) as three:
        a = three.by_name["a"]
        session = await a.session(text="hello")
        streams = [Stream(site, session.name, 150) for site in three.by_name.values()]
        await asyncio.gather(*(stream.read(30) for stream in streams))
        moved = [event async for event in session.migrate(to="nodes/b")]
        assert moved[-1].session.node == "nodes/b"
        await asyncio.gather(*(stream.whole(b"hello", 150) for stream in streams))
        assert (await session.get()).epoch == 2


async def test_a_follower_goes_on_in_the_middle_of_a_character(tmp_path: Path) -> None:
    def polyglot() -> HashEngine:
        engine = HashEngine(alphabet=(0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0x61))
        engine.step_pause = PAUSE
        return engine

    async with nodes(tmp_path, "abc", polyglot) as three:
        a, c = three.by_name["a"], three.by_name["c"]
        session = await a.session(text="hello")
        reader = c.client.sessions.open(session.name).tokens(0, 155, follow=True)
        await session.generate(max_tokens=20, request_id="one").result()
        running = session.generate(max_tokens=130, request_id="two")
        await anext(running)
        async for _ in reader:
            if len(reader.token_ids) > 60:
                break
        await three.vanish("a")
        async with asyncio.timeout(30):
            await reader.result()
        whole = await c.client.sessions.open(session.name).tokens(0, 155).result()
        assert (reader.token_ids, reader.text) == (whole.token_ids, whole.text)
        assert reader.reconnects == []


async def test_the_node_that_is_asked_keeps_the_line_alive(a: Served, b: Served) -> None:
    a.running.rpc.guard._heartbeat_seconds, b.running.rpc.guard._heartbeat_seconds = 0.02, 0.1
    session = await a.session(text="hello")
    stream = Stream(b, session.name, 12)
    await stream.read(6)
    a.engine.step_pause = 0.7
    await stream.whole(b"hello", 12)
    assert stream.heartbeats and set(stream.heartbeats) <= set(range(11, 18))
    assert len(stream.heartbeats) < 60, "the owner's are not passed on"


async def test_an_owner_that_falls_silent_is_asked_again(a: Served, b: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayed.RelayedGeneration, "silence_seconds", 0.1)
    session = await a.session(text="hello")
    stream = Stream(b, session.name, 14)
    await stream.read(6)
    a.engine.step_pause = 0.4
    await stream.whole(b"hello", 14)


async def test_what_ends_a_generation_for_good_is_told_by_the_owner(a: Served, b: Served) -> None:
    session = await a.session(text="hello")
    stream = Stream(b, session.name, 500)
    await stream.read(5)
    await session.rewind(5)
    await stream.read()
    assert stream.finished is not None and stream.finished.reason == common_pb2.CANCELLED
    again = b.raw.sessions.Generate(pb.GenerateRequest(name=session.name, request_id="g", max_tokens=500))
    async with Refusal(Code.ABORTED, "ABORTED"):
        while await again.read() is not grpc.aio.EOF:
            continue
    beyond = pb.GenerateRequest(name=session.name, request_id="h", max_tokens=5, resume_position=999)
    async with Refusal(Code.DATA_LOSS, "LOG_TAIL_MISSING") as refusal:
        while await b.raw.sessions.Generate(beyond).read() is not grpc.aio.EOF:
            continue
    assert refusal.info.metadata["client_position"] == "999"


async def freed(*sites: Served) -> None:
    """Wait until no stream is answered at any of them."""
    async with asyncio.timeout(15):
        while any(site.running.rpc.guard.open_streams for site in sites):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("cancels", [True, False])
async def test_a_client_that_leaves_ends_a_generation_elsewhere_only_if_it_said_so(
    a: Served, b: Served, cancels: bool
) -> None:
    session = await a.session(text="hello")
    stream = Stream(b, session.name, 150, cancel_on_disconnect=cancels)
    await stream.read(10)
    stream.call.cancel()
    await freed(a, b)
    now = await settled(session)
    assert (now.head < 155) == cancels


@pytest.mark.parametrize("cancels", [True, False])
async def test_a_client_that_leaves_while_its_generation_has_no_owner_still_has_its_will(
    pair: Nodes, a: Served, b: Served, cancels: bool
) -> None:
    session = await a.session(text="hello")
    stream = Stream(b, session.name, 150, cancel_on_disconnect=cancels)
    await stream.read(10)
    async with asyncio.TaskGroup() as group:
        group.create_task(pair.vanish("a"))
        stream.call.cancel()
    now = await settled(b.client.sessions.open(session.name))
    assert (now.head < 155) == cancels


@asynccontextmanager
async def reading(site: Served, session: Session, count: int) -> AsyncIterator[Any]:
    """A client process that reads a generation which is to end with it."""
    reader = start_reader(site.address, "cancel", count)
    try:
        assert reader.stdout is not None
        assert await asyncio.to_thread(reader.stdout.readline) == "reading\n"
        yield reader
    finally:
        reader.kill()
        reader.wait()
        if reader.stdout is not None:
            reader.stdout.close()


async def test_a_client_that_is_killed_frees_its_stream_on_both_nodes(a: Served, b: Served) -> None:
    session = await a.session(text="hello")
    async with reading(b, session, 1) as reader:
        assert (a.running.rpc.guard.open_streams, b.running.rpc.guard.open_streams) == (1, 1)
        reader.kill()
        await freed(a, b)
    assert (await settled(session)).head < 100_000, "the generation ended with its reader"
    await session.pause()
    assert a.engine.sequences == b.engine.sequences == {}


async def test_a_node_that_drains_ends_its_streams_with_the_position_and_cancels_nothing(a: Served, b: Served) -> None:
    session = await a.session(text="hello")
    stream = Stream(b, session.name, 100, cancel_on_disconnect=True)
    await stream.read(10)
    await b.running.rpc.begin_drain()
    async with Refusal(Code.UNAVAILABLE, "NODE_DRAINING") as refusal:
        await stream.read()
    assert refusal.info.metadata["resume_position"] == str(5 + len(stream.tokens))
    await freed(a, b)
    assert (await settled(session)).head == 105


async def test_a_node_that_is_killed_cancels_nothing_at_the_owner(pair: Nodes, a: Served, b: Served) -> None:
    session = await a.session(text="hello")
    stream = Stream(b, session.name, 100, cancel_on_disconnect=True)
    await stream.read(10)
    await pair.vanish("b")
    with pytest.raises(grpc.aio.AioRpcError):
        await stream.read()
    await freed(a)
    assert (await settled(session)).head == 105


async def test_an_old_stream_ends_with_its_position_and_cancels_nothing(tmp_path: Path) -> None:
    async with nodes(tmp_path, "a", slow) as running:
        a = running.by_name["a"]
        b = await running.start("b", stream_age_seconds=1)
        session = await a.session(text="hello")
        stream = Stream(b, session.name, 400, cancel_on_disconnect=True)
        async with Refusal(Code.UNAVAILABLE, "NODE_DRAINING") as refusal:
            await stream.read()
        assert refusal.info.metadata["resume_position"] == str(5 + len(stream.tokens))
        assert (await settled(session)).head == 405


async def test_a_stream_that_no_node_answers_any_more_says_where_it_was(
    pair: Nodes, a: Served, b: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "FORWARD_SECONDS_MAX", 0.3)
    session = await a.session(text="hello")
    stream = Stream(b, session.name, 2000)
    await stream.read(10)
    await a.running.rpc._server.stop(None)  # its lease goes on
    async with Refusal(Code.UNAVAILABLE, "SESSION_RELOCATING") as refusal:
        await stream.read()
    assert refusal.info.metadata["resume_position"] == str(5 + len(stream.tokens))
    assert refusal.info.metadata["address"] == a.address


async def test_a_moved_session_shows_its_state_everywhere(a: Served, b: Served) -> None:
    session = await a.session(text="hello")
    running = Stream(b, session.name, 60)
    await running.read(10)
    for site in (a, b):
        now = await site.client.sessions.open(session.name).get()
        assert (now.state, now.node) == (session_pb2.Session.GENERATING, "nodes/a")
        assert now.consumed >= 14
    await running.whole(b"hello", 60)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_generation_goes_on_when_the_process_of_its_owner_is(tmp_path: Path, how: signal.Signals) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    owner = await asyncio.to_thread(start_server, folder, 0, PAUSE)
    try:
        async with Client(owner.address) as client, nodes(folder, "b", slow) as running:
            session = await client.sessions.create("w", "s", seed=7)
            await session.append(text="hello")
            stream = Stream(running.by_name["b"], session.name, 120)
            await stream.read(20)
            owner.process.send_signal(how)
            await stream.whole(b"hello", 120)
            assert (await running.by_name["b"].client.sessions.open(session.name).get()).epoch == 2
    finally:
        owner.close()
