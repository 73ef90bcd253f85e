"""Generations: durable rows beside the log."""

from dataclasses import replace

import pytest

from forkpoint.errors import AlreadyExistsError, EmptySessionError, NotFoundError, SessionBusyError
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, ForkSessions, PastGeneration, StepCommit
from forkpoint.statestore.records import FinishReason, GenerationParams, Kind, SamplingParams, SessionState
from tests.support.store import PARAMS, name, new, owned, request


async def test_a_generation_comes_back_to_the_bit(catalog: Catalog) -> None:
    await owned(catalog, "s")
    params = GenerationParams(SamplingParams(0.1 + 0.2, 7, 1 / 3, 5e-324, 2**63 - 1), 9, (b"", b"\x80\n"), (0,), False)
    key = request("r")
    outcome = await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", params, (1, 2), request=key))
    assert outcome.row.params == params
    assert (outcome.row.request_id, outcome.row.start, outcome.row.input_start) == ("r", 2, 0)
    assert (outcome.row.finish, outcome.row.end) == (None, None)
    assert outcome.row.branch == (await catalog.get_session(name("s"))).branch
    assert await catalog.open_generation(name("s")) == outcome.row == await catalog.get_generation(name("s"), "g")


async def test_a_generation_without_input_has_no_input_start(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await catalog.append(AppendTokens(name("s"), 1, (1,)))
    outcome = await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS))
    assert (outcome.row.start, outcome.row.input_start, outcome.head) == (1, None, 1)


async def test_an_empty_log_cannot_be_continued(catalog: Catalog) -> None:
    await owned(catalog, "s")
    with pytest.raises(EmptySessionError):
        await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS))
    assert await catalog.open_generation(name("s")) is None


async def test_a_past_generation_is_recorded_with_its_tokens_and_never_open(catalog: Catalog) -> None:
    await owned(catalog, "s")
    past = PastGeneration("g", PARAMS, FinishReason.STOP, "theirs", 1)
    call = AppendTokens(name("s"), 1, (3, 4), Kind.GENERATED, logprobs=(-0.5, None), past=past)
    with pytest.raises(EmptySessionError):
        await catalog.append(call)
    assert (await catalog.get_session(name("s"))).head == 0
    await catalog.append(AppendTokens(name("s"), 1, (1, 2)))
    keyed = replace(call, request=request("r"))
    for replayed in (False, True):
        outcome = await catalog.append(keyed)
        assert (outcome.start, outcome.head, outcome.replayed) == (2, 4, replayed)
    assert await catalog.open_generation(name("s")) is None
    (row,) = await catalog.list_generations(name("s"))
    assert (row.start, row.end, row.finish, row.params) == (2, 4, FinishReason.STOP, PARAMS)
    assert (row.request_id, row.input_start) == ("theirs", 1)
    assert row == await catalog.get_generation(name("s"), "g")
    assert (await catalog.read_log(name("s"), 2, 9)).logprobs == (-0.5, None)
    with pytest.raises(AlreadyExistsError):
        await catalog.append(call)
    assert (await catalog.get_session(name("s"))).head == 4


async def test_a_generation_id_is_taken_once_and_a_refused_begin_appends_nothing(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS, (1,)))
    await catalog.commit_step([StepCommit(name("s"), 1, 1, (2,), "g", finish=FinishReason.STOP)])
    with pytest.raises(AlreadyExistsError):
        await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS, (3,)))
    assert (await catalog.get_session(name("s"))).head == 2


async def test_generations_are_listed_by_start_on_their_own_branch(catalog: Catalog) -> None:
    await owned(catalog, "s")
    for turn, generation in enumerate(("z", "a", "m")):
        head = 2 * turn
        await catalog.begin_generation(BeginGeneration(name("s"), 1, generation, PARAMS, (1,)))
        step = StepCommit(name("s"), 1, head + 1, (2,), generation, finish=FinishReason.STOP)
        await catalog.commit_step([step])
    assert [row.generation for row in await catalog.list_generations(name("s"))] == ["z", "a", "m"]
    await catalog.fork(ForkSessions(name("s"), None, (new("c"),)))
    assert await catalog.list_generations(name("c")) == []
    with pytest.raises(NotFoundError):
        await catalog.get_generation(name("c"), "z")
    old = (await catalog.get_session(name("s"))).branch
    await catalog.rewind(name("s"), 1, 4)
    assert await catalog.list_generations(name("s")) == []
    assert (await catalog.get_generation(name("s"), "a")).branch == old


async def test_a_fork_does_not_inherit_the_open_generation(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS, (1,)))
    await catalog.fork(ForkSessions(name("s"), None, (new("c"),)))
    assert await catalog.open_generation(name("c")) is None
    with pytest.raises(NotFoundError):
        await catalog.get_generation(name("s"), "unknown")


async def test_a_session_is_not_paused_by_an_owner_that_does_not_know_of_its_open_generation(catalog: Catalog) -> None:
    """It would be open for ever. Given up in any other state, it goes on at whoever takes the session."""
    await owned(catalog, "s")
    begun = (await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS, (1, 2)))).row
    before = await catalog.get_session(name("s"))
    with pytest.raises(SessionBusyError):
        await catalog.release(name("s"), 1, SessionState.PAUSED, request=request("r"))
    assert await catalog.get_session(name("s")) == before
    await catalog.release(name("s"), 1, SessionState.ACTIVE)
    assert await catalog.open_generation(name("s")) == begun
    await catalog.acquire(name("s"), "node-b", 1)
    await catalog.commit_step([StepCommit(name("s"), 2, 2, (), "g", (), FinishReason.PAUSED)])
    row = await catalog.release(name("s"), 2, SessionState.PAUSED, request=request("r"))
    assert (row.owner, row.state) == ("", SessionState.PAUSED)
