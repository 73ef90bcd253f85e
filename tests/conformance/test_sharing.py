"""Two processes on one store: what one commits, the other sees; what both want, one gets."""

import asyncio
from pathlib import Path

import pytest

from forkpoint.errors import PositionConflictError, StaleEpochError
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, ForkSessions, StepCommit, StepStatus
from tests.conformance.backends import Backend
from tests.conformance.conftest import OpenCatalog
from tests.support.store import MARKER, PARAMS, ManualClock, name, new, owned, request


async def test_a_commit_is_seen_by_the_other_at_once(catalog: Catalog, another: OpenCatalog) -> None:
    other = await another()
    await owned(catalog, "s")
    for turn in range(5):
        writer, reader = (catalog, other) if turn % 2 else (other, catalog)
        outcome = await writer.append(AppendTokens(name("s"), 1, (turn,), expected_position=turn))
        row = await reader.get_session(name("s"))
        assert (row.head, row.head_hash) == (turn + 1, outcome.head_hash)
    assert (await other.read_log(name("s"), 0, 9)).token_ids == (0, 1, 2, 3, 4)


async def test_everything_survives_closing_and_opening(catalog: Catalog, another: OpenCatalog) -> None:
    await owned(catalog, "s")
    await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS, (1, 2), request=request("r")))
    await catalog.commit_step([StepCommit(name("s"), 1, 2, (3,), "g", (-0.5,))])
    await catalog.fork(ForkSessions(name("s"), None, (new("c"),)))
    before = await catalog.list_sessions(None, None, 9)
    await catalog.close()
    again = await another()
    assert await again.list_sessions(None, None, 9) == before
    assert (await again.read_log(name("c"), 0, 9)).logprobs == (None, None, -0.5)
    generation = await again.open_generation(name("s"))
    assert generation is not None
    assert generation.params == PARAMS
    assert (
        await again.begin_generation(BeginGeneration(name("s"), 1, "x", PARAMS, (1, 2), request=request("r")))
    ).replayed


async def test_of_two_processes_that_append_at_one_position_one_wins(catalog: Catalog, another: OpenCatalog) -> None:
    other = await another()
    await owned(catalog, "s")
    for turn in range(10):
        results = await asyncio.gather(
            catalog.append(AppendTokens(name("s"), 1, (turn,), expected_position=turn)),
            other.append(AppendTokens(name("s"), 1, (turn + 100,), expected_position=turn)),
            return_exceptions=True,
        )
        assert sum(isinstance(result, PositionConflictError) for result in results) == 1
    assert (await catalog.get_session(name("s"))).head == 10


async def test_a_session_taken_by_the_other_process_is_fenced(catalog: Catalog, another: OpenCatalog) -> None:
    other = await another()
    await owned(catalog, "s")
    await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS, (1,)))
    assert (await other.acquire(name("s"), "node-b", 1)).epoch == 2
    (late,) = await catalog.commit_step([StepCommit(name("s"), 1, 1, (2,), "g")])
    assert (late.status, late.epoch) == (StepStatus.STALE_EPOCH, 2)
    with pytest.raises(StaleEpochError):
        await catalog.append(AppendTokens(name("s"), 1, (2,)))
    (fresh,) = await other.commit_step([StepCommit(name("s"), 2, 1, (3,), "g")])
    assert fresh.status is StepStatus.COMMITTED
    assert (await catalog.read_log(name("s"), 0, 9)).token_ids == (1, 3)


async def test_a_request_id_is_known_to_both(catalog: Catalog, another: OpenCatalog) -> None:
    other = await another()
    await owned(catalog, "s")
    call = AppendTokens(name("s"), 1, (1,), request=request("r"))
    results = await asyncio.gather(catalog.append(call), other.append(call))
    assert sorted(result.replayed for result in results) == [False, True]


async def test_many_writers_in_two_processes_lose_nothing(catalog: Catalog, another: OpenCatalog) -> None:
    other = await another()
    for session in ("a", "b"):
        await owned(catalog, session)

    async def write(to: Catalog, session: str) -> None:
        for turn in range(40):
            await to.append(AppendTokens(name(session), 1, (turn, turn), expected_position=2 * turn))

    await asyncio.gather(write(catalog, "a"), write(other, "b"))
    for session in ("a", "b"):
        part = await other.read_log(name(session), 0, 1000)
        assert part.token_ids == tuple(turn for turn in range(40) for _ in range(2))


async def test_a_store_that_several_make_at_once_is_made_once(
    backend: Backend, another: OpenCatalog, folder: Path, clock: ManualClock
) -> None:
    assert backend.catalog is not None
    for turn in range(10):
        place = folder / str(turn)
        place.mkdir()
        together = [backend.catalog(place, clock) for _ in range(3)]
        await asyncio.gather(*(catalog.open(MARKER) for catalog in together))
        await owned(together[0], "s")
        for catalog in together:
            assert (await catalog.get_session(name("s"))).epoch == 1
            await catalog.close()
