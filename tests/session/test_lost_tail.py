"""A store that lost the end of a log (a failover below REPLICATED), and answers that another node's execution left."""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from forkpoint.clock import SystemClock
from forkpoint.errors import (
    LogTailMissingError,
    SessionBusyError,
    SessionRelocatingError,
    StoreUnavailableError,
    UnavailableError,
)
from forkpoint.ids import SessionName
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import AppendCall, GenerateCall, Input
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.memory.store import MemoryTables
from forkpoint.statestore.records import SessionState
from tests.support.hash_engine import continuation
from tests.support.session_site import FAST, Running, Site, background, key, until

T = TypeVar("T")

KEPT = list(b"what the replica had")
LOST = list(b" and what it had not, which the node knows all the same")
LATER = list(b" goes on")
GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)


def replica(node: Running) -> MemoryTables:
    """What a replica has now."""
    assert isinstance(node.catalog, MemoryCatalog)
    return copy.deepcopy(node.catalog._tables)


def fail_over(node: Running, tables: MemoryTables) -> None:
    """The replica takes over."""
    assert isinstance(node.catalog, MemoryCatalog)
    nodes = node.catalog._tables.nodes
    node.catalog._tables = tables
    tables.nodes = nodes


async def answered(call: Callable[[], Awaitable[T]]) -> T:
    """What a call comes to that is made again while the node finds out what the store holds."""
    async with asyncio.timeout(10):
        while True:
            try:
                return await call()
            except (SessionBusyError, UnavailableError):
                await asyncio.sleep(0.01)


async def appended(node: Running, name: SessionName, tokens: Sequence[int]) -> int:
    """Where an append lands."""
    return (await answered(lambda: node.append(name, tokens))).outcome.start


@pytest.mark.parametrize("count", [16, 100])
async def test_a_node_that_knows_more_than_the_store_goes_on_from_what_is_left(memory: Running, count: int) -> None:
    name = await memory.session("s")
    await memory.append(name, KEPT)
    await memory.idle(name)
    tables = replica(memory)
    await memory.append(name, (LOST * 2)[:count])
    await memory.idle(name)
    fail_over(memory, tables)
    assert await appended(memory, name, LATER) == len(KEPT)
    read = await memory.generate(GenerateCall(name, key("g"), max_tokens=20))
    assert read.tokens == continuation(KEPT + LATER, 20, GREEDY)[0]
    assert await memory.log(name) == KEPT + LATER + read.tokens


async def test_a_client_that_knows_what_was_lost_is_told_so(memory: Running) -> None:
    name = await memory.session("s")
    await memory.append(name, KEPT)
    tables = replica(memory)
    await memory.append(name, LOST)
    fail_over(memory, tables)
    call = AppendCall(name, Input(token_ids=tuple(LATER)), expected_position=len(KEPT + LOST))
    with pytest.raises(LogTailMissingError) as told:
        await memory.node.append(call)
    assert (told.value.client_position, told.value.head) == (len(KEPT + LOST), len(KEPT))


async def test_a_reader_is_shown_nothing_that_the_store_has_lost(memory: Running) -> None:
    name = await memory.session("s")
    await memory.append(name, KEPT)
    await memory.idle(name)
    tables = replica(memory)
    await memory.append(name, LOST)
    await memory.idle(name)
    fail_over(memory, tables)
    with pytest.raises(UnavailableError, match="lost the end"):
        await anext(memory.node.read_tokens(name, 0, None, follow=True))
    await until(lambda: name not in memory.node._core.lives)
    chunk = await anext(memory.node.read_tokens(name, 0, None, follow=True))
    assert list(chunk.token_ids) == KEPT


async def test_a_checkpoint_of_what_was_lost_is_taken_of_what_is_left(memory: Running) -> None:
    name = await memory.session("s")
    await memory.append(name, KEPT)
    tables = replica(memory)
    await memory.append(name, LOST)
    await memory.idle(name)
    fail_over(memory, tables)
    with pytest.raises(UnavailableError, match="lost the end"):
        await memory.node.create_checkpoint(name, "c", key("c"))
    assert (await memory.node.create_checkpoint(name, "c", key("c"))).row.position == len(KEPT)


async def test_an_owner_that_hears_of_a_loss_from_its_caller_looks_for_itself(memory: Running) -> None:
    name = await memory.session("s")
    await memory.append(name, KEPT)
    tables = replica(memory)
    await memory.append(name, LOST)
    fail_over(memory, tables)
    call = AppendCall(name, Input(token_ids=tuple(LATER)), expected_position=len(KEPT + LOST))
    with pytest.raises(LogTailMissingError):
        await memory.node.append(call)
    await until(lambda: name not in memory.node._core.lives)


async def test_a_restore_that_finds_less_than_the_node_knew_quarantines_nothing(memory: Running) -> None:
    name = await memory.session("s")
    await memory.append(name, KEPT)
    await memory.idle(name)
    tables = replica(memory)
    await memory.append(name, LOST)
    await memory.node._core.discard(memory.node._core.lives[name])
    fail_over(memory, tables)
    with pytest.raises(UnavailableError, match="lost the end"):
        await memory.generate(GenerateCall(name, key("g"), max_tokens=9))
    read = await memory.generate(GenerateCall(name, key("g"), max_tokens=9))
    assert read.tokens == continuation(KEPT, 9, GREEDY)[0]


@pytest.mark.parametrize("resident", [True, False])
async def test_a_session_whose_taking_was_lost_belongs_to_who_took_it_then(memory: Running, resident: bool) -> None:
    """Under the same epoch: the store had lost the first node's when the second one took it."""
    name = await memory.session("s")
    tables = replica(memory)
    await memory.append(name, KEPT + LOST)
    await memory.idle(name)
    if not resident:
        await memory.node._core.discard(memory.node._core.lives[name])
    fail_over(memory, tables)
    other = await memory.site.node()
    await other.append(name, LATER)
    row = await memory.catalog.get_session(name)
    assert (row.owner, row.epoch) == (other.node.incarnation, memory.node._core.lives[name].epoch)
    with pytest.raises((SessionRelocatingError, UnavailableError)):
        await memory.node.create_checkpoint(name, "c", key("c"))
    await until(lambda: name not in memory.node._core.lives)
    assert memory.node.counters.sessions_quarantined == 0
    assert (await memory.catalog.get_session(name)).state is SessionState.ACTIVE
    assert await other.log(name) == LATER
    read = await other.generate(GenerateCall(name, key("g"), max_tokens=20))
    assert read.tokens == continuation(LATER, 20, GREEDY)[0]


async def test_a_resume_does_not_answer_for_who_took_the_session_under_the_same_epoch(memory: Running) -> None:
    name = await memory.session("s")
    tables = replica(memory)
    await memory.append(name, KEPT)
    await memory.idle(name)
    fail_over(memory, tables)
    other = await memory.site.node()
    await other.append(name, LATER)
    with pytest.raises(SessionRelocatingError):
        await memory.node.resume(name, None)
    assert name not in memory.node._core.lives
    assert await other.log(name) == LATER


async def test_a_generation_whose_end_was_lost_comes_to_it_again(memory: Running) -> None:
    name = await memory.session("s")
    await memory.append(name, KEPT)
    memory.engine.step_pause = 0.002
    read, task = memory.reading(GenerateCall(name, key("g"), max_tokens=40))
    await until(lambda: len(read.tokens) > 5)
    tables = replica(memory)
    await task
    fail_over(memory, tables)
    assert await appended(memory, name, LATER) == len(KEPT) + 40
    assert await memory.log(name) == KEPT + continuation(KEPT, 40, GREEDY)[0] + LATER


async def test_a_generation_that_was_lost_whole_is_begun_anew(memory: Running) -> None:
    name = await memory.session("s")
    await memory.append(name, KEPT)
    await memory.idle(name)
    tables = replica(memory)
    memory.faults.before["commit_step"] = StoreUnavailableError("catalog", "it fails over")
    with pytest.raises(UnavailableError):
        await memory.generate(GenerateCall(name, key("g"), max_tokens=9))
    fail_over(memory, tables)
    memory.faults.heal()
    read = await answered(lambda: memory.generate(GenerateCall(name, key("g"), max_tokens=9)))
    assert read.tokens == continuation(KEPT, 9, GREEDY)[0]


async def test_a_rewind_ends_a_generation_whose_end_was_lost(memory: Running) -> None:
    name = await memory.session("s")
    await memory.append(name, KEPT)
    memory.engine.step_pause = 0.002
    read, task = memory.reading(GenerateCall(name, key("g"), max_tokens=40))
    await until(lambda: len(read.tokens) > 5)
    tables = replica(memory)
    await task
    fail_over(memory, tables)
    view = await answered(lambda: memory.node.rewind(name, 3, key("r")))
    assert view.row.head == 3 and await memory.log(name) == KEPT[:3]


async def test_an_append_that_another_node_executed_first_counts_once(site: Site) -> None:
    first = await site.node()
    await first.workflow()
    name = await first.session("s")
    await first.append(name, KEPT)
    second = await site.node()
    gate = second.faults.gates.setdefault("get_session", asyncio.Event())
    repeated = background(second.append(name, LATER, request="once"))
    await until(lambda: "get_session" in second.faults.waiting)
    original = await first.append(name, LATER, request="once")
    await first.crash()
    gate.set()
    assert (await repeated).outcome.head == original.outcome.head
    read = await second.generate(GenerateCall(name, key("g"), max_tokens=20))
    assert read.tokens == continuation(KEPT + LATER, 20, GREEDY)[0]
    assert await second.log(name) == KEPT + LATER + read.tokens


async def test_a_generation_that_another_node_began_first_is_run_once(site: Site) -> None:
    first = await site.node()
    await first.workflow()
    name = await first.session("s")
    await first.append(name, KEPT)
    second = await site.node()
    gate = second.faults.gates.setdefault("get_session", asyncio.Event())
    call = GenerateCall(name, key("g"), Input(token_ids=tuple(LATER)), max_tokens=12)
    repeated = background(second.generate(call))
    await until(lambda: "get_session" in second.faults.waiting)
    original = await first.generate(call)
    await first.crash()
    gate.set()
    assert (await repeated).tokens == original.tokens == continuation(KEPT + LATER, 12, GREEDY)[0]
    assert await second.log(name) == KEPT + LATER + original.tokens


class SlowClock(SystemClock):
    """Runs at half the speed of the event loop's."""

    def monotonic(self) -> float:
        return super().monotonic() / 2


async def test_a_session_that_rests_goes_on_whatever_clock_the_node_has(tmp_path: Path) -> None:
    site = Site(tmp_path, "memory")
    node = await site.node(clock=SlowClock(), options=FAST)
    await node.workflow()
    name = await node.session("s")
    await node.append(name, KEPT)
    await node.idle(name)
    node.engine.failures = [RuntimeError("a step fails")]
    with pytest.raises(RuntimeError):
        await node.generate(GenerateCall(name, key("g"), max_tokens=9))
    read = await node.generate(GenerateCall(name, key("g"), max_tokens=9))
    assert read.tokens == continuation(KEPT, 9, GREEDY)[0]
    await site.close()
