"""Streams end well: on drain with a cursor, and when their client is gone, however it went."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest

from forkpoint.client.wire import Connection
from forkpoint.errors import NodeDrainingError
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from forkpoint.server.rpc.guard import Guard
from forkpoint.server.rpc.stream import Drain, Source, relay
from tests.support.rpc_site import ROOT, Refusal, Served, served, settled

READER = """
import asyncio, sys
from forkpoint.client.client import Client

async def main():
    address, mode, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    async with Client(address) as client:
        session = client.sessions.open("workflows/w/sessions/s")
        if mode == "follow":
            readers = [session.tokens(0, 10**6, follow=True) for _ in range(count)]
        else:
            readers = [
                session.generate(max_tokens=100000, request_id="g", cancel_on_disconnect=mode == "cancel")
                for _ in range(count)
            ]
        for reader in readers:
            await anext(reader)
        print("reading", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def start_reader(address: str, mode: str, count: int) -> "subprocess.Popen[str]":
    """A client process with `count` open streams on session s."""
    return subprocess.Popen(
        [sys.executable, "-c", READER, address, mode, str(count)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        text=True,
    )


async def gone(site: Served, left: int = 0) -> None:
    """Wait until only `left` streams are answered."""
    async with asyncio.timeout(15):
        while site.running.rpc.guard.open_streams > left:
            await asyncio.sleep(0.01)


async def fewest_tasks(enough: int = 0, seconds: float = 1) -> int:
    """The fewest tasks seen within `seconds`, or the first count of at most `enough`: gRPC's tasks outlive a stream."""
    fewest = len(asyncio.all_tasks())
    try:
        async with asyncio.timeout(seconds):
            while fewest > enough:
                await asyncio.sleep(0.02)
                fewest = min(fewest, len(asyncio.all_tasks()))
    except TimeoutError:
        pass
    return fewest


@pytest.mark.parametrize(("mode", "count"), [("cancel", 1), ("follow", 50)])
async def test_a_client_that_is_killed_frees_its_readers(site: Served, mode: str, count: int) -> None:
    session = await site.session(text="hello")
    site.engine.step_pause = 0.001
    reader = start_reader(site.address, mode, count)
    try:
        assert reader.stdout is not None
        assert await asyncio.to_thread(reader.stdout.readline) == "reading\n"
        assert site.running.rpc.guard.open_streams == count
    finally:
        reader.kill()
        reader.wait()
        if reader.stdout is not None:
            reader.stdout.close()
    await gone(site)
    if mode == "cancel":
        now = await settled(session)
        assert now.head < 100_000, "the generation ended with its reader"
    await session.pause()
    assert site.engine.sequences == {}, "nothing is held for the dead client"


async def test_a_client_that_stops_reading_and_closes_frees_its_reader(site: Served) -> None:
    session = await site.session(text="hello")
    site.engine.step_pause = 0.001
    generation = session.generate(max_tokens=300, request_id="g")
    await anext(generation)
    await generation.detach()
    await gone(site)
    assert len((await session.generate(max_tokens=300, request_id="g").result()).token_ids) == 300


async def test_streams_dropped_by_the_thousand_leave_nothing(site: Served) -> None:
    """Connections with fifty streams each go away after the first message of each."""
    session = await site.session(text="hello")
    generate = session.generate(max_tokens=300, request_id="g")
    await generate.result()
    follow = pb.ReadTokensRequest(name=session.name, follow=True)

    async def drop(connections: int) -> None:
        for _ in range(connections):
            raw = Connection(site.address)
            for _ in range(25):
                await raw.sessions.Generate(generate.request).read()
                await raw.sessions.ReadTokens(follow).read()
            await raw.channel.close()
        await gone(site)

    await drop(2)
    before = await fewest_tasks()
    await drop(18)
    assert await fewest_tasks(before + 5, seconds=30) <= before + 5
    await session.pause()
    assert site.engine.sequences == {}


async def test_drain_ends_streams_with_their_position_and_refuses_new_calls(site: Served) -> None:
    session = await site.session(text="hello")
    site.engine.step_pause = 0.005
    raw = site.raw.sessions
    generating = raw.Generate(pb.GenerateRequest(name=session.name, request_id="g", max_tokens=5000))
    following = raw.ReadTokens(pb.ReadTokensRequest(name=session.name, follow=True))
    await generating.read()
    event = await generating.read()
    assert isinstance(event, pb.GenerateResponse)
    position = event.chunk.start + len(event.chunk.token_ids)
    await following.read()
    await site.running.rpc.begin_drain()
    async with Refusal(grpc.StatusCode.UNAVAILABLE, "NODE_DRAINING") as refusal:
        while isinstance(event := await generating.read(), pb.GenerateResponse):
            if event.HasField("chunk"):
                assert event.chunk.start == position
                position += len(event.chunk.token_ids)
    assert refusal.kinds == {"ErrorInfo", "RetryInfo"}
    assert refusal.info.metadata["resume_position"] == str(position)
    async with Refusal(grpc.StatusCode.UNAVAILABLE, "NODE_DRAINING"):
        while await following.read() is not grpc.aio.EOF:
            continue
    async with Refusal(grpc.StatusCode.UNAVAILABLE, "NODE_DRAINING"):
        await raw.Append(pb.AppendRequest(name=session.name, text_utf8=b"x"))


async def test_a_node_that_stops_with_many_streams_loses_no_cursor(tmp_path: Path) -> None:
    async with served(tmp_path) as site:
        session = await site.session(text="hello")
        site.engine.step_pause = 0.002
        calls = [
            site.raw.sessions.Generate(pb.GenerateRequest(name=session.name, request_id="g", max_tokens=2000))
            for _ in range(200)
        ]
        for call in calls:
            await call.read()

        async def ends(call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]") -> int:
            position = 5
            async with Refusal(grpc.StatusCode.UNAVAILABLE, "NODE_DRAINING") as refusal:
                while isinstance(event := await call.read(), pb.GenerateResponse):
                    if event.HasField("chunk"):
                        assert event.chunk.start == position
                        position += len(event.chunk.token_ids)
            assert refusal.info.metadata["resume_position"] == str(position)
            return position

        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            tasks = [group.create_task(ends(call)) for call in calls]
            await asyncio.sleep(0.2)
            group.create_task(site.running.rpc.begin_drain())
        assert all(task.result() >= 5 for task in tasks)
        await gone(site)


async def test_a_drain_does_not_cancel_for_callers_that_did_not_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as site:
        session = await site.session(text="hello")
        site.engine.step_pause = 0.005
        generation = session.generate(max_tokens=400, cancel_on_disconnect=True, request_id="g", patience_s=0.2)
        await anext(generation)
        drain = site.running.rpc.begin_drain

        async def slow_drain() -> None:
            await drain()
            await asyncio.sleep(0.2)

        monkeypatch.setattr(site.running.rpc, "begin_drain", slow_drain)
    async with served(tmp_path, workflow=False) as site:
        session = site.client.sessions.open(session.name)
        again = session.generate(max_tokens=400, cancel_on_disconnect=True, request_id="g")
        assert len((await again.result()).token_ids) == 400


class FakeCall:
    """A call whose client goes away without anybody saying so."""

    def __init__(self) -> None:
        self.gone = False

    def done(self) -> bool:
        return self.gone


class Counting:
    """A source that yields once, then waits for ever, and notes that it was closed."""

    def __init__(self) -> None:
        self.closed = False

    async def messages(self) -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            self.closed = True


async def test_a_relay_looks_for_itself_whether_its_client_is_still_there() -> None:
    counting, call, written = Counting(), FakeCall(), list[int]()

    async def write(message: int) -> None:
        written.append(message)
        call.gone = True

    async with asyncio.timeout(5):
        await relay(Source(counting.messages()), write, call, Drain("n"), heartbeat_seconds=0.02)
    assert (written, counting.closed) == ([1], True)


async def test_a_relay_that_is_cancelled_or_can_not_write_closes_its_source() -> None:
    counting = Counting()

    async def nowhere(_: int) -> None:
        raise ConnectionError("the transport is gone")

    with pytest.raises(ConnectionError):
        await relay(Source(counting.messages()), nowhere, FakeCall(), Drain("n"))
    assert counting.closed
    counting = Counting()

    async def fine(_: int) -> None:
        return

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await relay(Source(counting.messages()), fine, FakeCall(), Drain("n"))
    assert counting.closed


async def test_a_relay_passes_what_its_source_raises_and_ends_with_it() -> None:
    async def fails() -> AsyncGenerator[int, None]:
        yield 1
        raise NodeDrainingError("n", 4)

    written: list[int] = []

    async def write(message: int) -> None:
        written.append(message)

    async with aclosing(fails()) as messages:
        with pytest.raises(NodeDrainingError):
            await relay(Source(messages), write, FakeCall(), Drain("n"))
    assert written == [1]


async def test_a_stream_that_is_old_ends_with_its_position_and_cancels_nothing(tmp_path: Path) -> None:
    async with asyncio.timeout(30), served(tmp_path, stream_age_seconds=1) as site:
        session = await site.session(text="hello")
        site.engine.step_pause = 0.005
        request = pb.GenerateRequest(name=session.name, request_id="g", max_tokens=400, cancel_on_disconnect=True)
        generating = site.raw.sessions.Generate(request)
        following = site.raw.sessions.ReadTokens(pb.ReadTokensRequest(name=session.name, follow=True))
        position = 5
        async with Refusal(grpc.StatusCode.UNAVAILABLE, "NODE_DRAINING") as refusal:
            while isinstance(event := await generating.read(), pb.GenerateResponse):
                if event.HasField("chunk"):
                    position += len(event.chunk.token_ids)
        assert refusal.kinds == {"ErrorInfo", "RetryInfo"}
        assert refusal.info.metadata["resume_position"] == str(position)
        assert "draining" not in refusal.message
        read = 0
        async with Refusal(grpc.StatusCode.UNAVAILABLE, "NODE_DRAINING") as refusal:
            while isinstance(chunk := await following.read(), pb.TokenChunk):
                read += len(chunk.token_ids)
        assert refusal.info.metadata["resume_position"] == str(read)
        assert (await settled(session)).head == 405, "a stream that the server ends is not a caller that left"


async def test_only_streams_that_can_go_on_grow_old() -> None:
    class Resumable(Source[int]):
        def let_go(self) -> bool:
            return True

        def cursor(self) -> int | None:
            return 4

    async def write(_: int) -> None:
        return

    counting = Counting()
    with pytest.raises(NodeDrainingError) as error:
        async with asyncio.timeout(5):
            await relay(Resumable(counting.messages()), write, FakeCall(), Drain("n"), age_seconds=0.02)
    assert (error.value.resume_position, counting.closed) == (4, True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await relay(Source(Counting().messages()), write, FakeCall(), Drain("n"), age_seconds=0.02)


def test_streams_do_not_grow_old_together() -> None:
    ages = {Guard(Drain("n"), stream_age_seconds=100).stream_age() for _ in range(50)}
    assert len(ages) > 1 and all(age is not None and 90 <= age <= 110 for age in ages)
    assert Guard(Drain("n"), stream_age_seconds=0).stream_age() is None
