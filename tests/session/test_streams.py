"""Readers: re-attach by position, slow ones, those that leave."""

import asyncio
import threading
from dataclasses import replace

import pytest

from forkpoint.errors import (
    LogTailMissingError,
    NotFoundError,
    PositionBeyondHeadError,
    StoreFullError,
    UnavailableError,
)
from forkpoint.limits import STREAM_BUFFER_TOKENS
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import Chunk, Finished, GenerateCall, Started
from forkpoint.server.session.live import TRIM_SLACK
from forkpoint.server.session.stream import GenerationStream
from forkpoint.server.session.usage import UsageCounter
from forkpoint.statestore.records import FinishReason, GenerationParams, GenerationRow, SamplingParams
from tests.support.hash_engine import continuation
from tests.support.session_site import Read, Running, background, key, until

PROMPT = list(b"a stream is a cursor over the log")
GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)


async def test_a_reader_attaches_again_at_any_position_also_after_the_end(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    whole = await node.generate(GenerateCall(name, key("g"), max_tokens=40, stop_text=(b"\xff\xff",)))
    for position in range(len(PROMPT), len(PROMPT) + 41):
        call = GenerateCall(
            name, key("g"), max_tokens=40, stop_text=(b"\xff\xff",), resume_position=position, cancel_on_disconnect=True
        )
        read = await node.generate(call)
        assert read.tokens == whole.tokens[position - len(PROMPT) :]
        assert read.finished == whole.finished
    with pytest.raises(LogTailMissingError):
        await node.generate(GenerateCall(name, key("g"), max_tokens=40, resume_position=len(PROMPT) + 41))


async def test_text_continues_where_the_last_reader_left_it(node: Running) -> None:
    """Held-back text depends on the tokens alone: cut anywhere, the texts join to the whole."""
    name = await node.session("s")
    await node.append(name, PROMPT)
    expected = bytes(continuation(PROMPT, 60, GREEDY)[0])
    stop = expected[20:24] + b"!"
    whole = await node.generate(GenerateCall(name, key("g"), max_tokens=60, stop_text=(stop,)))
    assert whole.text == expected
    texts = []
    for cut in range(61):
        rest = await node.generate(
            GenerateCall(name, key("g"), max_tokens=60, stop_text=(stop,), resume_position=len(PROMPT) + cut)
        )
        texts.append(rest.text)
        assert expected.endswith(rest.text)
        assert len(rest.text) >= 60 - cut
    assert texts[22] == expected[20:], "what was held back at position 22 comes to the reader that goes on there"


async def test_two_readers_of_one_generation_get_the_same(node: Running) -> None:
    name = await node.session("s")
    node.engine.step_pause = 0.001
    await node.append(name, PROMPT)
    first, one = node.reading(GenerateCall(name, key("g"), max_tokens=80))
    await until(lambda: len(first.tokens) > 20)
    second, two = node.reading(GenerateCall(name, key("g"), max_tokens=80))
    await asyncio.gather(one, two)
    assert first.tokens == second.tokens == continuation(PROMPT, 80, GREEDY)[0]


async def test_a_slow_reader_reads_again_from_the_store(memory: Running) -> None:
    node = memory
    name = await node.session("s")
    await node.append(name, PROMPT)
    count = STREAM_BUFFER_TOKENS + TRIM_SLACK + 300
    events = node.node.generate(GenerateCall(name, key("g"), max_tokens=count))
    read = Read()
    async for event in events:
        read.take(event)
        if isinstance(event, Started):
            other = await node.generate(GenerateCall(name, key("g"), max_tokens=count))
            assert other.finished is not None
    assert read.tokens == other.tokens
    assert max(len(chunk.token_ids) for chunk in read.chunks) <= STREAM_BUFFER_TOKENS
    assert read.finished == other.finished


async def test_leaving_a_stream_leaves_the_generation_running(node: Running) -> None:
    name = await node.session("s")
    node.engine.step_pause = 0.001
    await node.append(name, PROMPT)
    read, task = node.reading(GenerateCall(name, key("g"), max_tokens=70))
    await until(lambda: len(read.tokens) > 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await node.node.get_session(name)).state == "GENERATING"
    rest = await node.generate(GenerateCall(name, key("g"), max_tokens=70, resume_position=read.position))
    assert read.tokens + rest.tokens == continuation(PROMPT, 70, GREEDY)[0]


async def test_leaving_ends_the_generation_when_the_caller_said_so(node: Running) -> None:
    name = await node.session("s")
    node.engine.step_pause = 0.001
    await node.append(name, PROMPT)
    read, task = node.reading(GenerateCall(name, key("g"), cancel_on_disconnect=True))
    await until(lambda: len(read.tokens) > 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await node.idle(name)
    rest = await node.generate(GenerateCall(name, key("g"), resume_position=read.position))
    assert rest.reason is FinishReason.CANCELLED


async def test_closing_streams_early_frees_what_they_hold(node: Running) -> None:
    for number in range(30):
        name = await node.session(f"s{number}")
        await node.append(name, PROMPT)
        events = node.node.generate(GenerateCall(name, key(f"g{number}"), max_tokens=5 + number))
        async for _ in events:
            break
        await events.aclose()  # type: ignore[attr-defined]
        if number % 2:
            await node.node.cancel_generation(name)
        await node.node.delete_session(name, None)
    await until(lambda: node.engine.sequences == {})


async def test_reading_gives_kinds_text_and_stops_at_the_head(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, "né".encode())
    await node.generate(GenerateCall(name, key("g"), max_tokens=6))
    chunks = [chunk async for chunk in node.node.read_tokens(name, 1, None, False)]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert tokens == (await node.log(name))[1:]
    assert b"".join(chunk.text for chunk in chunks) == bytes(tokens)
    assert [kind.name for chunk in chunks for kind in chunk.kinds] == ["PROMPT"] * 2 + ["GENERATED"] * 6
    part = [chunk async for chunk in node.node.read_tokens(name, 2, 5, False)]
    assert [token for chunk in part for token in chunk.token_ids] == tokens[1:4]
    with pytest.raises(PositionBeyondHeadError):
        _ = [chunk async for chunk in node.node.read_tokens(name, 10, None, False)]
    with pytest.raises(PositionBeyondHeadError):
        _ = [chunk async for chunk in node.node.read_tokens(name, 0, 10, False)]
    assert [chunk async for chunk in node.node.read_tokens(name, 9, None, False)] == []


async def test_a_follower_gets_what_comes(node: Running) -> None:
    name = await node.session("s")
    got: list[int] = []

    async def follow() -> None:
        async for chunk in node.node.read_tokens(name, 0, len(PROMPT) + 10, True):
            got.extend(chunk.token_ids)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(follow())
        await asyncio.sleep(0.01)
        await node.append(name, PROMPT)
        await node.generate(GenerateCall(name, key("g"), max_tokens=10))
    assert got == await node.log(name)


async def test_a_follower_of_a_deleted_session_is_told(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    follower = node.node.read_tokens(name, 0, None, True)
    first = await anext(follower)
    assert isinstance(first, Chunk)
    await node.node.delete_session(name, None)
    with pytest.raises(NotFoundError):
        async with asyncio.timeout(5):
            await anext(follower)


async def test_a_session_deleted_while_it_comes_onto_the_engine_leaves_no_sequence_behind_at_the_stop(
    node: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, deleted, create = threading.Event(), threading.Event(), node.engine.create

    def slow() -> int:
        begun.set()
        deleted.wait(5)
        return create()

    monkeypatch.setattr(node.engine, "create", slow)
    name = await node.session("s")
    await node.append(name, PROMPT)
    await until(begun.is_set)
    await node.node.delete_session(name, None)
    stop = background(node.stop())
    await asyncio.sleep(0.2)
    deleted.set()
    await stop
    await asyncio.sleep(0.1)
    assert node.engine.sequences == {}


async def test_every_stream_begins_with_started_and_ends_with_finished(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    events = [event async for event in node.node.generate(GenerateCall(name, key("g"), max_tokens=9))]
    assert isinstance(events[0], Started) and events[0].row.start == len(PROMPT)
    assert isinstance(events[-1], Finished)
    assert all(isinstance(event, Chunk) and event.epoch == events[0].epoch for event in events[1:-1])


async def test_a_reader_behind_a_deletion_still_gets_all_tokens_and_the_end(node: Running) -> None:
    """It fetches nothing until the session is deleted: the store no longer answers for it."""
    name = await node.session("s")
    await node.append(name, PROMPT)
    read, gate = Read(), asyncio.Event()

    async def consume() -> None:
        async for event in node.node.generate(GenerateCall(name, key("g"))):
            read.take(event)
            if len(read.tokens) > 5:
                await gate.wait()

    task = background(consume())
    await until(lambda: len(read.tokens) > 5)
    seen = (await node.node.get_session(name)).row.head
    while (await node.node.get_session(name)).row.head < seen + 20:
        await asyncio.sleep(0.002)
    view = await node.node.delete_session(name, None)
    gate.set()
    async with asyncio.timeout(5):
        await task
    assert read.finished is not None and read.reason is FinishReason.CANCELLED
    assert read.finished.head == view.row.head == len(PROMPT) + len(read.tokens)
    assert read.finished.head_hash == view.row.head_hash
    usage = read.finished.usage
    assert (usage.prompt_tokens, usage.generated_tokens) == (len(PROMPT), len(read.tokens))
    assert read.tokens == continuation(PROMPT, len(read.tokens), GREEDY)[0]


async def test_a_caller_that_leaves_while_its_generation_begins_cancels_it_if_it_said_so(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    node.faults.gates["begin_generation"] = gate = asyncio.Event()
    read, task = node.reading(GenerateCall(name, key("g"), cancel_on_disconnect=True))
    await until(lambda: "begin_generation" in node.faults.waiting)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    gate.set()
    await until(lambda: node.node.counters.generations_finished == 1)
    rest = await node.generate(GenerateCall(name, key("g")))
    assert (read.started, rest.reason) == (None, FinishReason.CANCELLED)


async def test_a_reader_of_a_generation_that_does_not_run_here_is_told_to_come_again(node: Running) -> None:
    """What the store says and what the node runs can differ for a moment, when a session moves: clients retry."""
    name = await node.session("s")
    row = (await node.node.get_session(name)).row
    sampling = SamplingParams(0.0, 0, 1.0, 0.0, 7)
    open_row = GenerationRow("g", name, "r", 0, GenerationParams(sampling, 5), branch=row.branch)
    stream = GenerationStream(node.node._core, UsageCounter(node.catalog), open_row, row.branch, None, None)
    with pytest.raises(UnavailableError):
        _ = [event async for event in stream.events(None, 0, 1)]


async def test_a_stream_that_the_store_ends_leaves_its_generation_running(node: Running) -> None:
    """The caller did not go: it comes again, and finds its generation."""
    name = await node.session("s")
    node.engine.step_pause = 0.001
    await node.append(name, PROMPT)
    call = GenerateCall(name, key("g"), max_tokens=60, cancel_on_disconnect=True)
    read, task = node.reading(call)
    await until(lambda: len(read.tokens) > 5)
    node.faults.fill()
    with pytest.raises(StoreFullError):
        await task
    node.faults.heal()
    rest = await node.generate(replace(call, resume_position=read.position))
    assert rest.reason is FinishReason.LENGTH
    assert read.tokens + rest.tokens == continuation(PROMPT, 60, GREEDY)[0]
