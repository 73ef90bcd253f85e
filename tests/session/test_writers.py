"""Append and Generate: one at a time, once per request id, checked before anything happens."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import pytest

from forkpoint.chat import Chat, ChatTurn, PromptIds
from forkpoint.errors import (
    ContextFullError,
    DurabilityNotReachedError,
    ForkpointError,
    InvalidFieldError,
    LogTailMissingError,
    NotFoundError,
    NotUtf8Error,
    PositionConflictError,
    RequestIdReusedError,
    SessionBusyError,
    TokenOutOfRangeError,
)
from forkpoint.ids import SessionName
from forkpoint.limits import ENCODE_HERE_BYTES
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session import inputs
from forkpoint.server.session.api import AppendCall, GenerateCall, Input
from forkpoint.server.session.claims import Claims
from forkpoint.statestore.records import Durability
from tests.support.hash_engine import VOCAB_SIZE, ByteCodec, continuation
from tests.support.session_site import WORKFLOW, Running, key, until

PROMPT = list(b"one two three four five six seven")
GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)


async def test_an_append_says_where_its_tokens_lie(node: Running) -> None:
    name = await node.session("s")
    first = await node.node.append(AppendCall(name, Input(text="héllo".encode())))
    assert first.token_ids == tuple("héllo".encode())
    second = await node.node.append(AppendCall(name, Input(chat=Chat((ChatTurn("user", b"hi"),), True))))
    assert second.token_ids == (256, 104, 105, 258, 257)
    assert (second.outcome.start, second.outcome.head) == (6, 11)
    row = (await node.node.get_session(name)).row
    assert (row.head, row.head_hash) == (11, second.outcome.head_hash)


async def test_bad_input_changes_nothing(node: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "INPUT_TOKENS_MAX", 8)
    name = await node.session("s")
    bad: list[tuple[Input, type[ForkpointError]]] = [
        (Input(token_ids=(1,), text=b"x"), InvalidFieldError),
        (Input(text=b"ok\xff"), NotUtf8Error),
        (Input(chat=Chat((ChatTurn("user", b"\xc3"),))), NotUtf8Error),
        (Input(token_ids=(0, VOCAB_SIZE)), TokenOutOfRangeError),
        (Input(token_ids=(-1,)), TokenOutOfRangeError),
        (Input(text=b"123456789"), InvalidFieldError),
    ]
    for given, error in bad:
        with pytest.raises(error):
            await node.node.append(AppendCall(name, given, request=key("a")))
        with pytest.raises(error):
            await node.generate(GenerateCall(name, key("g"), given))
    with pytest.raises(InvalidFieldError):
        await node.node.append(AppendCall(name, Input(), request=key("a")))
    view = await node.node.get_session(name)
    assert (view.row.head, view.state) == (0, "ACTIVE")
    await node.node.append(AppendCall(name, Input(text=b"12345678"), request=key("a")))


async def test_bad_parameters_change_nothing(node: Running) -> None:
    name = await node.session("s")
    bad: list[dict[str, object]] = [
        {"max_tokens": -1},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 2.0},
        {"seed": 2**63},
        {"stop_text": (b"",)},
        {"stop_text": (b"x" * 257,)},
        {"stop_text": (b"x",) * 17},
        {"stop_ids": (VOCAB_SIZE,)},
    ]
    for change in bad:
        with pytest.raises((InvalidFieldError, TokenOutOfRangeError)):
            await node.generate(GenerateCall(name, key("g"), Input(token_ids=(1, 2)), **change))  # type: ignore[arg-type]
    assert (await node.node.get_session(name)).row.head == 0


async def test_an_unknown_session_is_not_found(node: Running) -> None:
    ghost = SessionName(WORKFLOW, "ghost")
    with pytest.raises(NotFoundError):
        await node.append(ghost, PROMPT)
    with pytest.raises(NotFoundError):
        await node.generate(GenerateCall(ghost, key("g")))


async def test_a_generation_keeps_other_writers_off(node: Running) -> None:
    name = await node.session("s")
    node.engine.step_pause = 0.002
    await node.append(name, PROMPT)
    read, task = node.reading(GenerateCall(name, key("g"), max_tokens=60))
    await until(lambda: len(read.tokens) > 3)
    with pytest.raises(SessionBusyError):
        await node.append(name, b"x")
    with pytest.raises(SessionBusyError):
        await node.generate(GenerateCall(name, key("h")))
    await task
    assert read.tokens == continuation(PROMPT, 60, GREEDY)[0]


async def test_of_two_appends_at_once_both_or_one_gets_busy_and_none_is_lost(node: Running) -> None:
    name = await node.session("s")
    results = await asyncio.gather(*(node.append(name, [n] * 3) for n in range(8)), return_exceptions=True)
    good = [n for n, result in enumerate(results) if not isinstance(result, BaseException)]
    assert good, "somebody goes first"
    assert all(isinstance(r, SessionBusyError) for r in results if isinstance(r, BaseException))
    log = await node.log(name)
    assert sorted(log) == sorted([n for n in good for _ in range(3)])


async def test_equal_request_ids_execute_once_also_at_the_same_time(node: Running) -> None:
    name = await node.session("s")
    results = await asyncio.gather(*(node.append(name, PROMPT, request="a") for _ in range(5)))
    assert {result.outcome.head for result in results} == {len(PROMPT)}
    assert sorted(result.outcome.replayed for result in results) == [False, True, True, True, True]
    assert await node.log(name) == PROMPT
    call = GenerateCall(name, key("g"), Input(token_ids=(5, 6)), max_tokens=30)
    reads = await asyncio.gather(*(node.generate(call) for _ in range(4)))
    assert all(read.tokens == reads[0].tokens and read.finished == reads[0].finished for read in reads)
    assert (await node.node.get_session(name)).row.head == len(PROMPT) + 32


async def test_a_request_id_with_other_content_is_refused(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT, request="a")
    with pytest.raises(RequestIdReusedError):
        await node.node.append(AppendCall(name, Input(token_ids=(1,)), request=key("a", "something else")))
    assert await node.log(name) == PROMPT


async def test_what_the_caller_expects_is_checked_on_first_execution_only(node: Running) -> None:
    name = await node.session("s")
    first = await node.append(name, PROMPT)
    expecting = AppendCall(
        name,
        Input(token_ids=(1, 2)),
        expected_position=len(PROMPT),
        expected_head_hash=first.outcome.head_hash,
        request=key("a"),
    )
    done = await node.node.append(expecting)
    assert (await node.node.append(expecting)).outcome.head == done.outcome.head
    with pytest.raises(PositionConflictError):
        await node.node.append(AppendCall(name, Input(token_ids=(1,)), expected_position=3))
    with pytest.raises(LogTailMissingError):
        await node.node.append(AppendCall(name, Input(token_ids=(1,)), expected_position=99))
    with pytest.raises(LogTailMissingError):
        await node.generate(GenerateCall(name, key("g"), expected_position=99))
    assert len(await node.log(name)) == len(PROMPT) + 2


async def test_a_durability_beyond_the_store_is_refused(node: Running) -> None:
    name = await node.session("s")
    with pytest.raises(DurabilityNotReachedError):
        await node.node.append(AppendCall(name, Input(token_ids=(1,)), durability=Durability.REPLICATED))
    await node.node.append(AppendCall(name, Input(token_ids=(1,)), durability=Durability.MEMORY))


async def test_a_caller_that_goes_away_leaves_its_append_running(node: Running) -> None:
    name = await node.session("s")
    task = asyncio.get_running_loop().create_task(node.append(name, PROMPT, request="a"))  # owner: this test
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = await node.append(name, PROMPT, request="a")
    assert again.outcome.head == len(PROMPT)
    assert await node.log(name) == PROMPT


async def test_append_prefills_in_the_background(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT * 5)
    await until(lambda: node.engine.sequences != {})
    await node.idle(name)
    assert node.node.counters.replayed_tokens == 0
    assert node.engine.steps and all(work.sample is None for step in node.engine.steps for work in step)


async def test_interleaved_appends_and_generations_equal_one_sequence(node: Running) -> None:
    name = await node.session("s")
    log: list[int] = []
    for turn in range(12):
        prompt = [turn + 1] * (turn % 5 + 1)
        await node.append(name, prompt)
        log += prompt
        count = turn * 7 % 23 + 1
        read = await node.generate(GenerateCall(name, key(f"g{turn}"), max_tokens=count))
        assert read.tokens == continuation(log, count, GREEDY)[0]
        log += read.tokens
    assert await node.log(name) == log
    view = await node.node.get_session(name)
    prompts = sum(turn % 5 + 1 for turn in range(12))
    assert (view.usage.prompt_tokens, view.usage.generated_tokens) == (prompts, len(log) - prompts)


async def test_long_text_is_encoded_beside_the_event_loop(node: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer takes a third of a second for a megabyte; the loop has steps and streams to serve meanwhile."""
    name, here = await node.session("s"), threading.get_ident()
    seen: list[tuple[int, bool]] = []

    def encode_text(codec: ByteCodec, text: bytes) -> list[int]:
        seen.append((len(text), threading.get_ident() == here))
        return list(text)

    monkeypatch.setattr(ByteCodec, "encode_text", encode_text)
    for size in (10, ENCODE_HERE_BYTES // 16, ENCODE_HERE_BYTES, ENCODE_HERE_BYTES + 1):
        with contextlib.suppress(ContextFullError):
            await node.node.append(AppendCall(name, Input(text=b"x" * size)))
    assert seen == [(10, True), (1024, True), (ENCODE_HERE_BYTES, True), (ENCODE_HERE_BYTES + 1, False)]


@pytest.mark.parametrize("is_found", [True, False])
async def test_a_repeated_append_of_a_logs_first_messages_has_the_ids_that_were_stored(
    node: Running, monkeypatch: pytest.MonkeyPatch, is_found: bool
) -> None:
    """Also when the store alone knows that it is one, since another node executed it meanwhile."""
    monkeypatch.setattr(ByteCodec, "render_chat", lambda codec, chat: PromptIds((1, 2), opening=(9,)))
    name, given = await node.session("s"), Input(chat=Chat((ChatTurn("user", b"x"),)))
    first = await node.node.append(AppendCall(name, given, request=key("a")))
    assert (await node.node.append(AppendCall(name, given, request=key("b")))).token_ids == (1, 2)

    @contextlib.asynccontextmanager
    async def unknown(claims: Claims, request: object) -> AsyncIterator[bool]:
        yield False

    if not is_found:
        monkeypatch.setattr(Claims, "request", unknown)
    again = await node.node.append(AppendCall(name, given, request=key("a")))
    assert (again.outcome.replayed, again.outcome.start) == (True, 0)
    assert again.token_ids == first.token_ids == (9, 1, 2)
