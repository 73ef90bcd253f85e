"""The token log: positions, hashes, expectations."""

import asyncio
import math

import pytest

from forkpoint.errors import (
    LogTailMissingError,
    PositionBeyondHeadError,
    PositionConflictError,
    SessionBusyError,
    StaleEpochError,
)
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, StepCommit, StepStatus
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.records import FinishReason, Kind
from tests.support.store import MARKER, PARAMS, name, owned


def head_hash(tokens: list[int]) -> bytes:
    chain = HashChain.root(MARKER)
    chain.extend(tokens)
    return chain.head_hash()


async def test_an_append_says_where_its_tokens_lie_and_what_the_head_hash_is(catalog: Catalog) -> None:
    await owned(catalog, "s")
    first = await catalog.append(AppendTokens(name("s"), 1, (0, 2**32 - 1, 5)))
    assert (first.start, first.head, first.epoch, first.replayed) == (0, 3, 1, False)
    assert first.head_hash == head_hash([0, 2**32 - 1, 5])
    second = await catalog.append(AppendTokens(name("s"), 1, tuple(range(20)), Kind.GENERATED))
    assert (second.start, second.head) == (3, 23)
    part = await catalog.read_log(name("s"), 0, 1000)
    assert part.token_ids == (0, 2**32 - 1, 5, *range(20))
    assert part.kinds == (Kind.PROMPT,) * 3 + (Kind.GENERATED,) * 20
    assert part.logprobs == (None,) * 23
    row = await catalog.get_session(name("s"))
    assert (row.head, row.head_hash) == (23, head_hash([0, 2**32 - 1, 5, *range(20)]))


async def test_an_append_of_nothing_changes_nothing(catalog: Catalog) -> None:
    await owned(catalog, "s")
    outcome = await catalog.append(AppendTokens(name("s"), 1, ()))
    assert (outcome.start, outcome.head, outcome.head_hash) == (0, 0, head_hash([]))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 31, 32, 33, 4095, 4096, 4097, 9000])
async def test_any_stretch_of_a_log_reads_back_however_it_was_cut(catalog: Catalog, count: int) -> None:
    await owned(catalog, "s")
    tokens = [(7 * index) % 65_521 for index in range(count)]
    sizes, position = (1, 3, 16, 5, 4096, 2, 17), 0
    for turn in range(count):
        if position >= count:
            break
        piece = tokens[position : position + sizes[turn % len(sizes)]]
        await catalog.append(AppendTokens(name("s"), 1, tuple(piece)))
        position += len(piece)
    assert (await catalog.get_session(name("s"))).head_hash == head_hash(tokens)
    for start in {0, 1, 15, 16, 17, count // 2, count - 1, count} & set(range(count + 1)):
        for limit in (0, 1, 16, 5000, 10_000):
            part = await catalog.read_log(name("s"), start, limit)
            assert (part.start, list(part.token_ids)) == (start, tokens[start : start + limit])


async def test_reading_at_the_head_is_empty_and_beyond_it_an_error(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await catalog.append(AppendTokens(name("s"), 1, (1, 2)))
    assert (await catalog.read_log(name("s"), 2, 10)).token_ids == ()
    with pytest.raises(PositionBeyondHeadError) as raised:
        await catalog.read_log(name("s"), 3, 10)
    assert (raised.value.position, raised.value.head) == (3, 2)


async def test_an_append_at_another_position_than_expected_is_a_conflict(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await catalog.append(AppendTokens(name("s"), 1, (1, 2)))
    with pytest.raises(PositionConflictError) as raised:
        await catalog.append(AppendTokens(name("s"), 1, (3,), expected_position=1))
    assert (raised.value.head, raised.value.head_hash) == (2, head_hash([1, 2]).hex())
    with pytest.raises(PositionConflictError):
        await catalog.append(AppendTokens(name("s"), 1, (3,), expected_position=2, expected_head_hash=bytes(32)))
    with pytest.raises(PositionConflictError):
        await catalog.append(AppendTokens(name("s"), 1, (3,), expected_head_hash=head_hash([9])))
    good = AppendTokens(name("s"), 1, (3,), expected_position=2, expected_head_hash=head_hash([1, 2]))
    assert (await catalog.append(good)).head == 3


async def test_a_store_that_knows_less_than_its_client_reports_data_loss(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await catalog.append(AppendTokens(name("s"), 1, (1, 2)))
    with pytest.raises(LogTailMissingError) as raised:
        await catalog.append(AppendTokens(name("s"), 1, (3,), expected_position=5))
    assert (raised.value.client_position, raised.value.head) == (5, 2)
    with pytest.raises(LogTailMissingError):
        await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS, expected_position=3))
    assert (await catalog.get_session(name("s"))).head == 2


async def test_a_client_from_before_a_rewind_has_a_conflict_not_a_loss(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await catalog.append(AppendTokens(name("s"), 1, tuple(range(10))))
    await catalog.rewind(name("s"), 1, 4)
    with pytest.raises(PositionConflictError):
        await catalog.append(AppendTokens(name("s"), 1, (3,), expected_position=10))
    with pytest.raises(LogTailMissingError):
        await catalog.append(AppendTokens(name("s"), 1, (3,), expected_position=11))


async def test_an_open_generation_keeps_other_writers_out(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS, (1,)))
    for call in (
        lambda: catalog.append(AppendTokens(name("s"), 1, (2,))),
        lambda: catalog.begin_generation(BeginGeneration(name("s"), 1, "h", PARAMS)),
        lambda: catalog.rewind(name("s"), 1, 0),
    ):
        with pytest.raises(SessionBusyError) as raised:
            await call()
        assert raised.value.head == 1


async def test_a_step_commits_many_sessions_and_answers_each(catalog: Catalog) -> None:
    for session in ("a", "b", "c", "d"):
        await owned(catalog, session)
        await catalog.begin_generation(BeginGeneration(name(session), 1, "g", PARAMS, (1, 2)))
    await catalog.acquire(name("b"), "node-b", 1)
    outcomes = await catalog.commit_step(
        [
            StepCommit(name("a"), 1, 2, (7, 8), "g", (-0.5, None)),
            StepCommit(name("b"), 1, 2, (7,), "g"),
            StepCommit(name("c"), 1, 1, (7,), "g"),
            StepCommit(name("d"), 1, 2, (7,), "other"),
            StepCommit(name("nobody"), 1, 2, (7,), "g"),
            StepCommit(name("d"), 1, 2, (9,), "g", (-1.25,), FinishReason.STOP),
        ]
    )
    assert [outcome.status.value for outcome in outcomes] == [
        "COMMITTED",
        "STALE_EPOCH",
        "CONFLICT",
        "CONFLICT",
        "CONFLICT",
        "COMMITTED",
    ]
    assert [outcome.head for outcome in outcomes] == [4, 2, 2, 2, 0, 3]
    assert outcomes[0].head_hash == head_hash([1, 2, 7, 8])
    assert (outcomes[1].epoch, outcomes[1].head_hash) == (2, head_hash([1, 2]))
    assert (await catalog.read_log(name("a"), 2, 9)).logprobs == (-0.5, None)
    assert (await catalog.read_log(name("a"), 1, 2)).kinds == (Kind.PROMPT, Kind.GENERATED)
    assert (await catalog.read_log(name("b"), 0, 9)).token_ids == (1, 2)
    finished = await catalog.get_generation(name("d"), "g")
    assert (finished.finish, finished.end) == (FinishReason.STOP, 3)
    assert await catalog.open_generation(name("d")) is None


async def test_logprobs_survive_to_the_bit(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS, (1,)))
    values = (-1 / 3, -0.0, -5e-324, -math.pi * 1e300, None)
    await catalog.commit_step([StepCommit(name("s"), 1, 1, (1, 2, 3, 4, 5), "g", values)])
    back = (await catalog.read_log(name("s"), 1, 5)).logprobs
    assert back == values
    assert [repr(value) for value in back] == [repr(value) for value in values]


async def test_a_step_after_the_finish_is_a_conflict(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS, (1,)))
    await catalog.commit_step([StepCommit(name("s"), 1, 1, (), "g", finish=FinishReason.CANCELLED)])
    (outcome,) = await catalog.commit_step([StepCommit(name("s"), 1, 1, (2,), "g")])
    assert outcome.status is StepStatus.CONFLICT
    assert (await catalog.append(AppendTokens(name("s"), 1, (2,)))).head == 2


async def test_of_two_writers_at_one_position_one_wins(catalog: Catalog) -> None:
    await owned(catalog, "s")
    calls = [catalog.append(AppendTokens(name("s"), 1, (index,), expected_position=0)) for index in range(8)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(result, PositionConflictError) for result in results) == 7
    assert (await catalog.get_session(name("s"))).head == 1


async def test_of_two_nodes_that_take_a_session_one_wins(catalog: Catalog) -> None:
    await owned(catalog, "s")
    results = await asyncio.gather(
        *(catalog.acquire(name("s"), f"node-{index}", 1) for index in range(8)), return_exceptions=True
    )
    assert sum(isinstance(result, StaleEpochError) for result in results) == 7
    assert (await catalog.get_session(name("s"))).epoch == 2


async def test_a_cancelled_call_happened_wholly_or_not_at_all(catalog: Catalog) -> None:
    await owned(catalog, "s")
    expected = 0
    for turn in range(20):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(catalog.append(AppendTokens(name("s"), 1, (turn, turn, turn))))
            for _ in range(turn % 3):
                await asyncio.sleep(0)
            task.cancel()
        row = await catalog.get_session(name("s"))
        assert row.head in (expected, expected + 3)
        expected = row.head
    part = await catalog.read_log(name("s"), 0, 100)
    assert head_hash(list(part.token_ids)) == (await catalog.get_session(name("s"))).head_hash
