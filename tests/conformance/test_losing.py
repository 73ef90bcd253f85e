"""That the faults around a catalog are there, and that whoever gets over them would notice a broken contract."""

from typing import Any, Final, cast

import pytest

from forkpoint.statestore.base import Catalog
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, ForkSessions, StepCommit
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.records import FinishReason, RequestKey
from tests.conformance.losing import LosingCatalog, RepeatingCatalog
from tests.conformance.test_requests import put
from tests.support.store import MARKER, PARAMS, name, new, owned

METHODS: Final = (
    *("create_workflow", "create_session", "append", "begin_generation", "commit_step", "fork", "rewind"),
    "put_checkpoint",
)


class Forgetful(MemoryCatalog):
    """A catalog that keeps no answers of one method."""

    def __init__(self, forgets: str) -> None:
        super().__init__()
        self._forgets = forgets

    def _answer(self, request: RequestKey | None, call: str) -> Any:
        return None if call == self._forgets else super()._answer(request, call)


async def opened(inner: MemoryCatalog) -> tuple[LosingCatalog, Catalog]:
    """A catalog that loses every other answer, and the caller that copes."""
    losing = LosingCatalog(inner, before=0.2, after=0.5, seed=3)
    catalog = cast(Catalog, RepeatingCatalog(losing))
    await catalog.open(MARKER)
    return losing, catalog


async def work(catalog: Catalog) -> None:
    """Twenty turns of a session, with a fork, a checkpoint and a rewind in each."""
    await owned(catalog, "empty")
    await owned(catalog, "s")
    for turn in range(20):
        start = 3 * turn + 2
        await catalog.append(AppendTokens(name("s"), 1, (turn,)))
        await catalog.begin_generation(BeginGeneration(name("s"), 1, f"g{turn}", PARAMS, (turn,)))
        await catalog.commit_step([StepCommit(name("s"), 1, start, (9, 9), f"g{turn}", finish=FinishReason.LENGTH)])
        await catalog.fork(ForkSessions(name("s"), turn, (new(f"child{turn}"),)))
        await put(catalog, None, f"c{turn}")
        await catalog.rewind(name("s"), 1, start + 1)


async def test_answers_of_all_these_calls_are_lost_and_none_of_their_effects_is_doubled() -> None:
    losing, catalog = await opened(MemoryCatalog())
    await work(catalog)
    row = await catalog.get_session(name("s"))
    assert (row.head, row.epoch) == (60, 1)
    assert len(await catalog.list_sessions("w", None, 100)) == 22
    assert len(await catalog.list_checkpoints(name("s"))) == 20
    assert sorted(set(METHODS) - losing.losses.keys()) == []


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"commit_step", "create_workflow"}))
async def test_a_catalog_that_forgets_its_answers_is_found_out(method: str) -> None:
    _, catalog = await opened(Forgetful(method))
    with pytest.raises(AssertionError, match=f"{method}: .* the next"):
        await work(catalog)
