"""The client's streams survive their server: each position once, in order, across drains, restarts and kills."""

import asyncio
from pathlib import Path

import pytest

from forkpoint.client.client import Client
from forkpoint.client.errors import PositionGapError, RemoteError
from forkpoint.client.generation import Generation
from forkpoint.client.resume import Patience
from forkpoint.client.wire import Wire
from forkpoint.proto.forkpoint.v1 import common_pb2, session_pb2
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from forkpoint.server.app import serving
from forkpoint.server.engine.batch import Sample
from tests.support.hash_engine import continuation
from tests.support.rpc_site import Served, config_for, parts_for, served, server_process, settled, start_server

GREEDY = Sample(0.0, 0, 1.0, 0.0, 0)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def test_a_generation_goes_on_after_a_drain_and_a_start_on_the_same_port(tmp_path: Path) -> None:
    async with served(tmp_path) as site:
        port = port_of(site.address)
        session = await site.session(text="hello")
        site.engine.step_pause = 0.002
    async with Client(f"127.0.0.1:{port}") as client:
        generation = client.sessions.open(session.name).generate(max_tokens=400, logprobs=True)
        for _ in range(3):
            config = config_for(tmp_path, port=port)
            parts = parts_for(config)
            parts.engine.step_pause = 0.002  # type: ignore[attr-defined]
            async with serving(config, parts):
                before = len(generation.token_ids)
                async for _chunk in generation:
                    if len(generation.token_ids) > before + 50:
                        break
        async with serving(config, parts_for(config)):
            await generation.result()
        expected, logprobs = continuation(b"hello", 400, Sample(0.0, 0, 1.0, 0.0, 0, True))
        assert generation.token_ids == expected
        assert generation.logprobs == pytest.approx(logprobs)
        assert generation.text == bytes(expected)
        assert len(generation.reconnects) >= 3
        assert {error.reason for error in generation.reconnects} >= {"NODE_DRAINING"}


async def test_a_generation_and_a_follower_go_on_after_a_kill(tmp_path: Path) -> None:
    with server_process(tmp_path, step_pause=0.004) as first:
        async with asyncio.timeout(60), Client(first.address) as client:
            await client.workflows.create("w")
            session = await client.sessions.create("w", "s", seed=7)
            await session.append(text="hello")
            generation = session.generate(max_tokens=300)
            reader = session.tokens(0, 305, follow=True)
            async with asyncio.TaskGroup() as group:
                following = group.create_task(reader.result())
                while len(generation.token_ids) < 60:
                    await anext(generation)
                first.kill()
                second = await asyncio.to_thread(start_server, tmp_path, port_of(first.address))
                try:
                    await generation.result()
                    await following
                    assert (await settled(session)).state == session_pb2.Session.ACTIVE
                    assert await asyncio.to_thread(second.terminate) == 0
                finally:
                    second.close()
            expected, _ = continuation(b"hello", 300, GREEDY)
            assert generation.token_ids == expected
            assert generation.reconnects and reader.reconnects
            assert reader.token_ids == [*b"hello", *expected]


async def test_a_session_that_moved_is_found_at_its_new_owner(site: Served, tmp_path: Path) -> None:
    session = await site.session(text="hello")
    async with served(tmp_path / "data", workflow=False, node="other") as second, Client(second.address) as client:
        elsewhere = client.sessions.open(session.name)
        assert (await elsewhere.append(text="!")).head == 6, "the second node names the first, and the call goes there"
        assert (await elsewhere.get()).node == "nodes/node"
        generation = elsewhere.generate(max_tokens=10)
        assert len((await generation.result()).token_ids) == 10
        await session.pause()
        resumed = await second.client.sessions.open(session.name).resume()
        assert resumed.session.node == "nodes/other"
        assert (await session.append(text="?")).head == 17, "and back again"


async def test_an_upload_finds_the_owner_as_well(site: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkpoint.client.session.is_large", lambda request: True)
    session = await site.session(text="hello")
    async with served(tmp_path / "data", workflow=False, node="other") as second, Client(second.address) as client:
        assert (await client.sessions.open(session.name).append(text="!" * 300)).head == 305
    async with Client(["127.0.0.1:1", site.address]) as client:
        assert (await client.sessions.open(session.name).append(text="?")).head == 306, "a dead address is passed over"


async def test_a_dead_address_is_passed_over(site: Served) -> None:
    async with Client(["127.0.0.1:1", site.address]) as client:
        await client.ready()
        assert [workflow.name async for workflow in client.workflows.list()] == ["workflows/w"]


async def test_patience_ends(tmp_path: Path) -> None:
    async with served(tmp_path) as site:
        session = await site.session(text="hello")
        address = site.address
    async with Client(address, patience_s=0.5) as client:
        with pytest.raises(RemoteError) as error:
            await client.sessions.open(session.name).generate(max_tokens=5).result()
        assert (error.value.code, error.value.reason) == ("UNAVAILABLE", "")
        assert error.value.is_transport
        assert "gave up after 0.5 s" in error.value.__notes__[0]


async def test_ready_waits_for_a_server_and_gives_up_in_time(tmp_path: Path) -> None:
    async with served(tmp_path) as site:
        address = site.address
        await site.client.ready(1)
    async with Client(address) as client:
        with pytest.raises(RemoteError):
            await client.ready(0.3)

        async def later() -> None:
            await asyncio.sleep(0.3)
            config = config_for(tmp_path, port=port_of(address))
            async with serving(config, parts_for(config)):
                await ready.wait()

        ready = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(later())
            await client.ready(20)
            ready.set()


async def test_a_refusal_is_no_reason_to_try_again(site: Served) -> None:
    generation = site.client.sessions.open("workflows/w/sessions/nobody").generate(max_tokens=5)
    with pytest.raises(RemoteError) as error:
        await generation.result()
    assert (error.value.code, error.value.reason) == ("NOT_FOUND", "NOT_FOUND")
    assert error.value.metadata["resource"] == "workflows/w/sessions/nobody"
    assert generation.reconnects == []


def chunk(start: int, *tokens: int) -> pb.TokenChunk:
    return pb.TokenChunk(start=start, token_ids=tokens)


@pytest.mark.parametrize("start", [4, 6, 8])
async def test_a_position_that_is_sent_twice_or_left_out_is_never_passed_on(start: int) -> None:
    wire = Wire(["127.0.0.1:1"])
    generation = Generation(wire, pb.GenerateRequest(name="workflows/w/sessions/s", resume_position=5), Patience())
    generation._take(chunk(5, 1, 2))
    with pytest.raises(PositionGapError) as error:
        generation._take(chunk(start, 3))
    assert (error.value.metadata["expected"], error.value.metadata["got"]) == ("7", str(start))
    assert generation.token_ids == [1, 2]
    await generation.detach()


async def test_a_stream_that_says_nothing_is_opened_again(site: Served) -> None:
    session = await site.session(text="hello")
    site.engine.step_pause = 0.5
    request = pb.GenerateRequest(name=session.name, request_id="g", max_tokens=3)
    wire = Wire([site.address])
    generation = Generation(wire, request, Patience(total_s=30, idle_s=0.2))
    await generation.result()
    await wire.close()
    assert len(generation.token_ids) == 3
    assert any("said nothing" in str(error) for error in generation.reconnects)


async def test_a_reader_that_stopped_waiting_or_left_goes_on_where_it_was(site: Served) -> None:
    session = await site.session(text="hello")
    site.engine.step_pause = 0.02
    generation = session.generate(max_tokens=40)
    reader = session.tokens(follow=True, end=45)
    timeouts = 0
    while generation.finished is None:
        try:
            async with asyncio.timeout(0.01):
                await anext(generation, None)
        except TimeoutError:
            timeouts += 1
        if len(generation.token_ids) == 20:
            await generation.detach()
        if len(reader.token_ids) < 45:
            await anext(reader)
            await reader.detach()
    assert timeouts > 0
    assert generation.token_ids == continuation(b"hello", 40, GREEDY)[0]
    assert (await reader.result()).token_ids == [*b"hello", *generation.token_ids]
    assert [chunk async for chunk in reader] == [chunk async for chunk in generation] == []
    assert site.running.node.counters.generations_started == 1


async def test_finish_reasons_survive_a_late_attach(site: Served) -> None:
    session = await site.session(text="hello")
    first = session.generate(max_tokens=5, request_id="g")
    async for _ in first:
        break
    await first.detach()
    second = await session.generate(max_tokens=5, request_id="g", resume_position=first.position).result()
    assert first.token_ids + second.token_ids == continuation(b"hello", 5, GREEDY)[0]
    assert second.finished is not None and second.finished.reason == common_pb2.LENGTH


async def test_streams_that_the_server_finds_old_go_on_without_a_word(tmp_path: Path) -> None:
    async with asyncio.timeout(60), served(tmp_path, stream_age_seconds=1) as site:
        session = await site.session(text="hello")
        site.engine.step_pause = 0.005
        generation = session.generate(max_tokens=500, cancel_on_disconnect=True)
        reader = session.tokens(0, 505, follow=True)
        await asyncio.gather(generation.result(), reader.result())
        expected, _ = continuation(b"hello", 500, GREEDY)
        assert (generation.token_ids, generation.text) == (expected, bytes(expected))
        assert reader.token_ids == [*b"hello", *expected]
        assert {error.reason for error in generation.reconnects + reader.reconnects} == {"NODE_DRAINING"}
        assert generation.finished is not None and generation.finished.reason == common_pb2.LENGTH
        assert site.running.node.counters.generations_started == 1
