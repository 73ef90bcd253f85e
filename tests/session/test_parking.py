"""More sessions than slots, and too few pages."""

import asyncio
from dataclasses import replace

import pytest

from forkpoint.errors import NodeCapacityError, SessionPausedError
from forkpoint.server.engine.base import Capacity
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import GenerateCall
from forkpoint.server.session.live import Place
from forkpoint.statestore.records import CheckpointPolicy
from tests.support.hash_engine import HashEngine, continuation
from tests.support.session_site import FAST, Running, Site, key, until

PROMPT = list(b"there are more of us than there are chairs")
GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)


async def small(site: Site, slots: int, pages: int = 1024, sweep_seconds: float = FAST.sweep_seconds) -> Running:
    node = await site.node(HashEngine(slots=slots, pages=pages), options=replace(FAST, sweep_seconds=sweep_seconds))
    await node.workflow()
    return node


async def test_sessions_take_turns_on_two_slots(site: Site) -> None:
    node = await small(site, 2)
    names = [await node.session(f"s{number}") for number in range(6)]
    logs = {name: [*PROMPT, number] for number, name in enumerate(names)}
    for name in names:
        await node.append(name, logs[name])
    for turn in range(3):
        calls = [GenerateCall(name, key(f"g{turn}-{name.session}"), max_tokens=20) for name in names]
        reads = await asyncio.gather(*(node.generate(call) for call in calls))
        for name, read in zip(names, reads, strict=True):
            assert read.tokens == continuation(logs[name], 20, GREEDY)[0]
            logs[name] += read.tokens
    counters = node.node.counters
    assert counters.parked >= 12 and counters.restored_tokens > 0
    assert 0 < counters.replayed_tokens < 18 * 40, "what is parked is checkpointed first"


async def test_an_idle_session_makes_room_and_comes_back(site: Site) -> None:
    node = await small(site, 1)
    one, two = await node.session("one"), await node.session("two")
    await node.append(one, PROMPT)
    await node.idle(one)
    await node.append(two, PROMPT)
    read = await node.generate(GenerateCall(two, key("g"), max_tokens=5))
    assert read.tokens == continuation(PROMPT, 5, GREEDY)[0]
    assert (await node.node.get_session(one)).consumed == 0
    more = await node.generate(GenerateCall(one, key("h"), max_tokens=5))
    assert more.tokens == read.tokens
    assert node.node.counters.parked == 2


async def test_an_append_is_prefilled_though_idle_sessions_hold_all_slots(site: Site) -> None:
    node = await small(site, 2)
    names = [await node.session(f"s{number}") for number in range(5)]
    for name in names:
        await node.append(name, PROMPT)
        await node.idle(name)
    assert node.node.counters.parked == 3
    await node.append(names[0], PROMPT)
    await node.idle(names[0])
    assert node.node.counters.parked == 4 and node.node.counters.restored_tokens > 0


async def test_long_generations_take_turns_on_one_slot(site: Site) -> None:
    node = await site.node(HashEngine(slots=1), options=replace(FAST, slice_tokens=40))
    await node.workflow()
    names = [await node.session(f"s{number}") for number in range(3)]
    readers = []
    for number, name in enumerate(names):
        await node.append(name, [*PROMPT, number])
        readers.append(node.reading(GenerateCall(name, key(f"g{number}"), max_tokens=200)))
    await until(lambda: all(len(read.tokens) >= 40 for read, _ in readers))
    assert all(read.finished is None for read, _ in readers), "nobody had to wait for another's end"
    await asyncio.gather(*(task for _, task in readers))
    for number, (read, _) in enumerate(readers):
        assert read.tokens == continuation([*PROMPT, number], 200, GREEDY)[0]


async def test_short_pages_park_the_youngest_and_all_get_done(site: Site) -> None:
    node = await small(site, 4, pages=7)
    names = [await node.session(f"s{number}") for number in range(4)]
    for number, name in enumerate(names):
        await node.append(name, [*PROMPT, number])
    calls = [GenerateCall(name, key(f"g-{name.session}"), max_tokens=150) for name in names]
    reads = await asyncio.gather(*(node.generate(call) for call in calls))
    for number, read in enumerate(reads):
        assert read.tokens == continuation([*PROMPT, number], 150, GREEDY)[0]
    assert node.node.counters.parked > 0


async def test_a_session_larger_than_the_node_is_told_so_and_others_go_on(site: Site) -> None:
    node = await small(site, 4, pages=3)
    large, other = await node.session("large"), await node.session("other")
    await node.append(large, PROMPT * 6)
    with pytest.raises(NodeCapacityError):
        await node.generate(GenerateCall(large, key("g"), max_tokens=5))
    await node.append(other, PROMPT)
    read = await node.generate(GenerateCall(other, key("h"), max_tokens=20))
    assert read.tokens == continuation(PROMPT, 20, GREEDY)[0]


async def test_a_generation_that_outgrows_the_node_is_told_so(site: Site) -> None:
    node = await small(site, 2, pages=2)
    name = await node.session("s")
    await node.append(name, PROMPT)
    with pytest.raises(NodeCapacityError):
        await node.generate(GenerateCall(name, key("g"), max_tokens=200))
    assert len(await node.log(name)) == 129, "what fitted is in the log"
    bigger = await small_next(site, node)
    rest = await bigger.generate(GenerateCall(name, key("g"), max_tokens=200))
    assert rest.tokens == continuation(PROMPT, 200, GREEDY)[0]


async def small_next(site: Site, node: Running) -> Running:
    await node.stop()
    return await site.node()


async def test_parking_without_cadence_still_checkpoints(site: Site) -> None:
    node = await small(site, 1)
    one, two = [await node.session(name, policy=CheckpointPolicy(0)) for name in ("one", "two")]
    await node.append(one, PROMPT)
    await node.idle(one)
    await node.append(two, PROMPT[::-1])
    await node.generate(GenerateCall(two, key("g"), max_tokens=2))
    await until(lambda: node.node.counters.checkpoints_written == 1)
    await node.generate(GenerateCall(one, key("h"), max_tokens=2))
    assert node.node.counters.restored_tokens == 32


async def test_a_poison_session_fails_alone(site: Site) -> None:
    node = await small(site, 4)
    step = node.engine.step
    bad, good = await node.session("bad"), await node.session("good")
    await node.append(bad, [255, *PROMPT])
    await node.append(good, PROMPT)
    await node.idle(bad)

    def poisoned(works):  # type: ignore[no-untyped-def]
        if any(254 in work.token_ids for work in works):
            raise RuntimeError("poison")
        return step(works)

    node.engine.step = poisoned  # type: ignore[method-assign]
    await node.append(bad, [254])
    reader, task = node.reading(GenerateCall(good, key("g"), max_tokens=60))
    with pytest.raises(RuntimeError, match="poison"):
        await node.generate(GenerateCall(bad, key("h"), max_tokens=5))
    await task
    assert reader.tokens == continuation(PROMPT, 60, GREEDY)[0], "its stream did not even break"
    node.engine.step = step  # type: ignore[method-assign]
    healed = await node.generate(GenerateCall(bad, key("h"), max_tokens=5))
    assert healed.tokens == continuation([255, *PROMPT, 254], 5, GREEDY)[0]


async def test_a_session_that_lost_its_slot_and_is_not_used_is_let_go(site: Site) -> None:
    """What a node keeps of sessions must not grow with all that it ever served."""
    node = await small(site, 2)
    names = [await node.session(f"s{number}") for number in range(6)]
    for name in names:
        await node.append(name, PROMPT)
        await node.idle(name)
    lives = node.node._core.lives
    async with asyncio.timeout(10):
        while [(await node.catalog.get_session(name)).owner == "" for name in names] != [True] * 4 + [False] * 2:
            await asyncio.sleep(0.01)
    assert set(lives) == set(names[-2:])
    read = await node.generate(GenerateCall(names[0], key("g"), max_tokens=9))
    assert read.tokens == continuation(PROMPT, 9, GREEDY)[0]
    assert node.node.counters.session_failures == 0


async def test_a_parked_session_keeps_no_tokens_in_memory(site: Site) -> None:
    node = await small(site, 1, sweep_seconds=60.0)
    names = [await node.session(f"s{number}") for number in range(2)]
    for name in names:
        await node.append(name, PROMPT)
        await node.idle(name)
    parked, resident = (node.node._core.lives[name] for name in names)
    assert (parked.tail.token_ids, parked.tail.end) == ([], len(PROMPT))
    assert resident.tail.token_ids == PROMPT


async def test_a_session_that_leaves_while_room_is_looked_for_stops_nobody(
    memory: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stays, leaves = await memory.session("stays"), await memory.session("leaves")
    core = memory.node._core
    real, left = core.engine.capacity, asyncio.Event()

    async def capacity() -> Capacity:
        found = await real()
        live = core.lives.get(leaves)
        if live is not None and live.place is Place.PARKED:
            await core.drop(live, SessionPausedError(str(leaves)))
            left.set()
        return found

    await memory.append(stays, PROMPT)
    await memory.idle(stays)
    monkeypatch.setattr(core.engine, "capacity", capacity)
    await memory.append(leaves, PROMPT)
    await left.wait()
    read = await memory.generate(GenerateCall(stays, key("g"), max_tokens=5))
    assert read.tokens == continuation(PROMPT, 5, GREEDY)[0]
    assert "a step failed" not in caplog.text
