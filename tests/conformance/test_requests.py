"""Request ids: the same id gives the same answer, once and for 24 hours."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from forkpoint.errors import PositionConflictError, RequestIdReusedError
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, ForkSessions, StepCommit
from forkpoint.statestore.records import CheckpointRow, FinishReason, RequestKey, SessionState, WorkflowRow
from tests.support.store import DAY_US, PARAMS, ManualClock, name, new, owned, request


async def test_a_repeated_append_gives_the_stored_answer_and_adds_nothing(catalog: Catalog) -> None:
    await owned(catalog, "s")
    call = AppendTokens(name("s"), 1, (1, 2), expected_position=0, request=request("r"))
    first = await catalog.append(call)
    await catalog.append(AppendTokens(name("s"), 1, (3,)))
    again = await catalog.append(call)
    assert (again.start, again.head, again.head_hash, again.epoch) == (0, 2, first.head_hash, 1)
    assert (first.replayed, again.replayed) == (False, True)
    assert (await catalog.get_session(name("s"))).head == 3


async def test_a_repeat_is_answered_across_owners_and_rewinds(catalog: Catalog) -> None:
    await owned(catalog, "s")
    call = AppendTokens(name("s"), 1, (1, 2), expected_position=0, request=request("r"))
    await catalog.append(call)
    await catalog.acquire(name("s"), "node-b", 1)
    await catalog.rewind(name("s"), 2, 0)
    assert (await catalog.append(call)).replayed
    assert (await catalog.get_session(name("s"))).head == 0


async def test_an_answer_of_one_call_is_never_given_to_another(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await catalog.append(AppendTokens(name("s"), 1, (1,), request=request("r")))
    for mutation in set(MUTATIONS) - {"append", "put_checkpoint"}:
        with pytest.raises(RequestIdReusedError):
            await MUTATIONS[mutation](catalog, request("r"))


async def test_a_failed_call_stores_no_answer(catalog: Catalog) -> None:
    await owned(catalog, "s")
    wrong = AppendTokens(name("s"), 1, (1,), expected_position=0, expected_head_hash=bytes(32), request=request("r"))
    with pytest.raises(PositionConflictError):
        await catalog.append(wrong)
    assert await catalog.find_request(request("r")) is None
    assert not (await catalog.append(AppendTokens(name("s"), 1, (1,), request=request("r")))).replayed


MUTATIONS: dict[str, Callable[[Catalog, RequestKey], Awaitable[object]]] = {
    "create_workflow": lambda c, r: c.create_workflow(WorkflowRow(r.workflow), r),
    "create_session": lambda c, r: c.create_session(new("fresh"), r),
    "delete_session": lambda c, r: c.delete_session(name("victim"), 5, r),
    "acquire": lambda c, r: c.acquire(name("s"), "node-b", 1, r),
    "release": lambda c, r: c.release(name("s"), 1, SessionState.PAUSED, "why", r),
    "release_quarantine": lambda c, r: c.release_quarantine(name("isolated"), r),
    "append": lambda c, r: c.append(AppendTokens(name("s"), 1, (1,), request=r)),
    "begin_generation": lambda c, r: c.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS, (1,), request=r)),
    "fork": lambda c, r: c.fork(ForkSessions(name("s"), 1, (new("x"), new("y")), r)),
    "rewind": lambda c, r: c.rewind(name("s"), 1, 1, r),
    "put_checkpoint": lambda c, r: put(c, r),
    "delete_checkpoint": lambda c, r: c.delete_checkpoint(name("s"), "gone", r),
}


async def put(catalog: Catalog, key: RequestKey | None, checkpoint: str = "c1") -> CheckpointRow:
    root = (await catalog.get_session(name("empty"))).head_hash
    row = CheckpointRow(name("s"), checkpoint, 1, 0, root, "n", False, 0)
    return await catalog.put_checkpoint(row, b"manifest", 1, key)


@pytest.mark.parametrize("mutation", MUTATIONS)
async def test_every_mutation_replays_its_answer_and_refuses_other_content(catalog: Catalog, mutation: str) -> None:
    for session in ("s", "victim", "empty", "isolated"):
        await owned(catalog, session)
    await catalog.release(name("isolated"), 1, SessionState.QUARANTINED, "why")
    await catalog.append(AppendTokens(name("s"), 1, (9, 9)))
    await put(catalog, None, "gone")
    workflow = "fresh" if mutation == "create_workflow" else "w"
    key, other = request("r", workflow=workflow), request("r", b"other", workflow=workflow)
    first = await MUTATIONS[mutation](catalog, key)
    state = await catalog.list_sessions(None, None, 100, show_deleted=True)
    again = await MUTATIONS[mutation](catalog, key)
    assert await catalog.list_sessions(None, None, 100, show_deleted=True) == state
    assert _without_replayed(again) == _without_replayed(first)
    assert json.loads(await catalog.find_request(key) or "null") is not None
    with pytest.raises(RequestIdReusedError):
        await MUTATIONS[mutation](catalog, other)
    with pytest.raises(RequestIdReusedError):
        await catalog.find_request(other)


def _without_replayed(result: object) -> object:
    if isinstance(result, tuple):
        return result[0]
    return str(result).replace("replayed=True", "replayed=False")


async def test_request_ids_of_callers_and_workflows_do_not_meet(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await owned(catalog, "s", "v")
    for key in (request("r"), request("r", caller="you"), request("r", workflow="v"), request("R")):
        call = AppendTokens(name("s", key.workflow), 1, (1,), request=key)
        assert not (await catalog.append(call)).replayed
    assert (await catalog.get_session(name("s"))).head == 3
    assert (await catalog.get_session(name("s", "v"))).head == 1


async def test_an_answer_is_kept_for_a_day_and_then_forgotten(catalog: Catalog, clock: ManualClock) -> None:
    await owned(catalog, "s")
    call = AppendTokens(name("s"), 1, (1,), request=request("r"))
    await catalog.append(call)
    clock.now_us += DAY_US - 1000
    assert (await catalog.append(call)).replayed
    clock.now_us += 2000
    assert await catalog.find_request(request("r")) is None
    assert not (await catalog.append(call)).replayed
    assert (await catalog.append(call)).replayed
    assert (await catalog.get_session(name("s"))).head == 2


async def test_a_repeated_begin_finds_the_generation_as_it_is_now(catalog: Catalog) -> None:
    await owned(catalog, "s")
    call = BeginGeneration(name("s"), 1, "g", PARAMS, (1, 2), expected_position=0, request=request("r"))
    first = await catalog.begin_generation(call)
    assert (first.head, first.row.start, first.row.input_start, first.replayed) == (2, 2, 0, False)
    running = await catalog.begin_generation(call)
    assert running.replayed
    assert running.row.finish is None
    await catalog.commit_step([StepCommit(name("s"), 1, 2, (3,), "g", finish=FinishReason.LENGTH)])
    finished = await catalog.begin_generation(call)
    assert finished.replayed
    assert (finished.row.finish, finished.row.end, finished.head) == (FinishReason.LENGTH, 3, 2)
    assert finished.head_hash == first.head_hash


async def test_retries_at_the_same_time_have_one_effect(catalog: Catalog) -> None:
    await owned(catalog, "s")
    call = AppendTokens(name("s"), 1, (1, 2, 3), request=request("r"))
    outcomes = await asyncio.gather(*(catalog.append(call) for _ in range(10)))
    assert sorted(outcome.replayed for outcome in outcomes) == [False] + [True] * 9
    assert {outcome.head for outcome in outcomes} == {3}


async def test_an_answer_outlives_the_deletion_of_its_session(catalog: Catalog) -> None:
    await owned(catalog, "s")
    call = AppendTokens(name("s"), 1, (1,), request=request("r"))
    await catalog.append(call)
    first = await catalog.delete_session(name("s"), 7, request("d"))
    assert (await catalog.append(call)).replayed
    assert await catalog.delete_session(name("s"), 7, request("d")) == first
    assert first.state is SessionState.DELETED
