"""The store fails or loses answers: nothing that was not durable is seen, and decoding resumes by itself."""

import asyncio
import contextlib
import random
from dataclasses import replace

import apsw
import pytest

from forkpoint.errors import (
    ForkpointError,
    LogCorruptError,
    SessionQuarantinedError,
    StoreFullError,
    StoreUnavailableError,
)
from forkpoint.ids import SessionName
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import CreateSession, ForkCall, GenerateCall
from forkpoint.statestore.calls import BeginGeneration, BeginOutcome, StepCommit, StepStatus
from forkpoint.statestore.records import FinishReason
from tests.support.hash_engine import continuation
from tests.support.session_site import Read, Running, Site, background, key, until

PROMPT = list(b"if it is not written it was not said")
GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)


async def test_a_full_disk_ends_streams_clearly_and_decoding_resumes_when_it_is_freed(node: Running) -> None:
    name = await node.session("s")
    node.engine.step_pause = 0.001
    await node.append(name, PROMPT)
    read, task = node.reading(GenerateCall(name, key("g"), max_tokens=80))
    await until(lambda: len(read.tokens) > 20)
    node.faults.fill()
    with pytest.raises(StoreFullError):
        await task
    assert await node.log(name) == PROMPT + read.tokens, "no token was shown that is not in the log"
    steps = len(node.engine.steps)
    await asyncio.sleep(0.15)
    assert len(node.engine.steps) - steps < 20, "no hot loop against a full disk"
    with pytest.raises(ForkpointError):
        await node.generate(GenerateCall(name, key("g"), max_tokens=80))
    other = await node.session("other")
    with pytest.raises(StoreFullError):
        await node.append(other, b"x")
    node.faults.heal()
    await until(lambda: node.node.counters.generations_finished == 1)
    rest = await node.generate(GenerateCall(name, key("g"), max_tokens=80, resume_position=read.position))
    assert read.tokens + rest.tokens == continuation(PROMPT, 80, GREEDY)[0]
    await node.append(other, b"x")


async def test_lost_answers_of_commits_are_found_out(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    read = Read()
    call = GenerateCall(name, key("g"), max_tokens=30)
    node.faults.lost["commit_step"] = 1
    with pytest.raises(StoreUnavailableError):
        await node.generate(call)
    node.faults.lost["commit_step"] = 1
    await asyncio.gather(node.generate(call), return_exceptions=True)
    await until(lambda: node.node.counters.generations_finished == 1)
    read = await node.generate(call)
    assert read.tokens == continuation(PROMPT, 30, GREEDY)[0]
    assert node.node.counters.commit_failures == 2


async def test_a_step_that_the_store_is_ahead_of_catches_up(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    await node.idle(name)
    expected = continuation(PROMPT, 30, GREEDY)[0]
    node.engine.step_pause = 0.05
    read, task = node.reading(GenerateCall(name, key("g"), max_tokens=30))
    await until(lambda: read.started is not None)
    assert read.started is not None
    ahead = StepCommit(name, read.started.epoch, 36, tuple(expected[:4]), read.started.row.generation)
    assert (await node.catalog.commit_step([ahead]))[0].status is StepStatus.COMMITTED
    node.engine.step_pause = 0.0
    await task
    assert (read.tokens, read.reason) == (expected, FinishReason.LENGTH)
    assert node.node.counters.commit_conflicts == 1


async def test_the_lost_answer_of_the_last_commit_is_the_end(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    await node.idle(name)
    node.faults.lost["commit_step"] = 1
    call = GenerateCall(name, key("g"), max_tokens=1)
    await asyncio.gather(node.generate(call), return_exceptions=True)
    read = await node.generate(call)
    assert (read.tokens, read.reason) == (continuation(PROMPT, 1, GREEDY)[0], FinishReason.LENGTH)
    assert (await node.generate(GenerateCall(name, key("h"), max_tokens=1))).tokens == continuation(PROMPT, 2, GREEDY)[
        0
    ][1:]


@pytest.mark.parametrize("method", ["append", "begin_generation", "fork", "rewind", "create_session", "acquire"])
async def test_a_call_whose_answer_was_lost_can_be_sent_again(node: Running, method: str) -> None:
    name = await node.session("s")
    first = await node.append(name, PROMPT)
    await node.idle(name)

    async def call() -> object:
        if method == "append":
            return (await node.append(name, b"more", request="a")).outcome.head
        if method == "begin_generation":
            return (await node.generate(GenerateCall(name, key("g"), max_tokens=9))).tokens
        if method == "fork":
            return (await node.node.fork(ForkCall(name, 2, request=key("f"))))[1]
        if method == "rewind":
            return (await node.node.rewind(name, 20, key("r"))).row.head
        if method == "create_session":
            create = CreateSession(SessionName("w", "new"), request=key("c"))
            return (await node.node.create_session(create)).row.head
        return (await node.append(SessionName("w", "child"), b"x", request="x")).outcome.head

    expected = {"append": 40, "begin_generation": continuation(PROMPT, 9, GREEDY)[0], "fork": 36, "rewind": 20}
    if method == "acquire":
        await node.fork(name, "child")
    assert first.outcome.head == 36
    node.faults.lost[method] = 1
    with pytest.raises(StoreUnavailableError):
        await call()
    assert await call() == expected.get(method, 37 if method == "acquire" else 0)
    log = await node.log(name)
    read = await node.generate(GenerateCall(name, key("after"), max_tokens=12))
    assert read.tokens == continuation(log, 12, GREEDY)[0]


async def test_a_generation_whose_begin_was_not_answered_runs_without_a_client(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    node.faults.lost["begin_generation"] = 1
    with pytest.raises(StoreUnavailableError):
        await node.generate(GenerateCall(name, key("g"), max_tokens=15))
    await until(lambda: node.node.counters.generations_finished == 1)
    assert await node.log(name) == PROMPT + continuation(PROMPT, 15, GREEDY)[0]


async def test_random_failures_of_every_write_lose_and_invent_nothing(node: Running, rng: random.Random) -> None:
    name = await node.session("s")
    log: list[int] = []
    for number in range(25):
        for method in ("append", "begin_generation", "commit_step", "put_checkpoint", "acquire"):
            if rng.random() < 0.3:
                node.faults.lost[method] = rng.randrange(1, 3)
        tokens = [rng.randrange(256) for _ in range(rng.randrange(1, 9))]
        log += tokens
        count = rng.randrange(1, 12)
        call = GenerateCall(name, key(f"g{number}"), max_tokens=count)
        async with asyncio.timeout(20):
            while True:
                try:
                    await node.append(name, tokens, request=f"a{number}")
                    read = await node.generate(call)
                    break
                except ForkpointError:
                    await asyncio.sleep(0.002)
        expected = continuation(log, count, GREEDY)[0]
        assert read.tokens == expected
        log += expected
    assert await node.log(name) == log


async def test_failing_restores_rest_between_tries_and_then_succeed(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    await node.idle(name)
    await node.node.pause(name, None)
    node.faults.before["find_manifests"] = StoreUnavailableError("catalog", "gone")
    with pytest.raises(StoreUnavailableError):
        await node.node.resume(name, None)
    await asyncio.sleep(0.1)
    assert node.node.counters.session_failures < 15
    node.faults.heal()
    result = await node.node.resume(name, None)
    assert result.restored_tokens == 32


async def test_a_pause_that_the_store_refuses_leaves_the_session_usable(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    await node.idle(name)
    node.faults.before["release"] = StoreUnavailableError("catalog", "gone")
    with pytest.raises(StoreUnavailableError):
        await node.node.pause(name, None)
    node.faults.heal()
    read = await node.generate(GenerateCall(name, key("g"), max_tokens=5))
    assert read.tokens == continuation(PROMPT, 5, GREEDY)[0]


async def test_a_session_whose_log_refuses_more_stops_nobody_else(disk: Site) -> None:
    node = await disk.node()
    await node.workflow()
    node.engine.step_pause = 0.001
    bad, good = await node.session("bad"), await node.session("good")
    for name in (bad, good):
        await node.append(name, PROMPT)
    reads = [node.reading(GenerateCall(name, key(name.session), max_tokens=150)) for name in (bad, good)]
    await until(lambda: all(len(read.tokens) > 5 for read, _ in reads))
    row = await node.catalog.get_session(bad)
    with contextlib.closing(apsw.Connection(str(disk.folder / "catalog.db"))) as database:
        database.set_busy_timeout(10_000)
        values = [(int(row.branch), row.head + ahead, b"not a record") for ahead in range(1, 40)]
        with database:
            database.executemany("INSERT OR IGNORE INTO log (branch, start, record) VALUES (?, ?, ?)", values)
    async with asyncio.timeout(20):
        await reads[1][1]
        with pytest.raises(LogCorruptError):
            await reads[0][1]
    assert reads[1][0].tokens == continuation(PROMPT, 150, GREEDY)[0]
    assert node.node.counters.commit_failures == 0, "the store as such is well"
    await until(lambda: node.node.counters.sessions_quarantined == 1)
    with pytest.raises(SessionQuarantinedError):
        await node.generate(GenerateCall(bad, key("bad"), max_tokens=150))


async def test_an_answer_that_fails_one_session_is_settled_for_the_others(
    node: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """One session's conflict needs another look at the store, and that look fails."""
    node.engine.step_pause = 0.01
    names = [await node.session(f"s{number}") for number in range(3)]
    for name in names:
        await node.append(name, PROMPT)
    reads = [node.reading(GenerateCall(name, key(name.session), max_tokens=40)) for name in names]
    await until(lambda: all(len(read.tokens) > 3 for read, _ in reads))
    row = await node.catalog.get_session(names[0])
    expected = continuation(PROMPT, 40, GREEDY)[0]
    at = row.head - len(PROMPT)
    node.faults.before["read_log"] = StoreUnavailableError("catalog", "gone")
    ahead = StepCommit(names[0], row.epoch, row.head, tuple(expected[at : at + 2]), names[0].session)
    generation = await node.catalog.open_generation(names[0])
    assert generation is not None
    await node.catalog.commit_step([replace(ahead, generation=generation.generation)])
    heads = [len(read.tokens) for read, _ in reads[1:]]
    await until(lambda: all(len(read.tokens) > head for (read, _), head in zip(reads[1:], heads, strict=True)))
    node.faults.heal()
    await asyncio.gather(*(task for _, task in reads), return_exceptions=True)
    for name in names:
        read = await node.generate(GenerateCall(name, key(name.session), max_tokens=40))
        assert read.tokens == expected
    assert "a step failed" not in caplog.text, "it was foreseen"


async def test_what_comes_after_a_generation_whose_end_is_known_to_its_reader_alone_is_taken(node: Running) -> None:
    """The commit of the end has taken effect, and its answer is on its way; the reader came again meanwhile."""
    name = await node.session("s")
    await node.append(name, PROMPT)
    ended, answered = asyncio.Event(), asyncio.Event()

    async def keep(method: str, done: bool) -> None:
        if done and method == "commit_step" and await node.catalog.open_generation(name) is None:
            ended.set()
            await answered.wait()

    node.faults.watch = keep
    call = GenerateCall(name, key("g"), max_tokens=5)
    first = background(node.generate(call))
    await ended.wait()
    assert (await node.generate(call)).tokens == continuation(PROMPT, 5, GREEDY)[0]
    following = background(node.append(name, b"and on"))
    await asyncio.sleep(0.05)
    assert not following.done(), "it waits for the answer, which may be another one"
    answered.set()
    assert (await following).outcome.start == len(PROMPT) + 5
    assert (await first).tokens == continuation(PROMPT, 5, GREEDY)[0]


async def test_a_generation_whose_beginning_took_effect_long_after_it_was_given_up_runs_when_it_is_asked_for(
    site: Site,
) -> None:
    """The node asked the store meanwhile, which knew nothing of it yet."""
    node = await site.node()
    await node.workflow()
    name = await node.session("s")
    await node.append(name, PROMPT)
    really_begin, late = node.catalog.begin_generation, list[BeginGeneration]()

    async def give_up(begin: BeginGeneration) -> BeginOutcome:
        if late:
            return await really_begin(begin)
        late.append(begin)
        raise StoreUnavailableError("catalog", "no answer")

    node.catalog.begin_generation = give_up  # type: ignore[method-assign]
    call = GenerateCall(name, key("g"), max_tokens=12)
    with pytest.raises(StoreUnavailableError):
        await node.generate(call)
    await until(lambda: not node.node._core.lives[name].suspect)
    await really_begin(late[0])
    async with asyncio.timeout(5):
        read = await node.generate(call)
    assert read.tokens == continuation(PROMPT, 12, GREEDY)[0]
