"""A node that is drained: what it has goes to others or is parked, it takes nothing new, and nothing is lost."""

import asyncio
import itertools
import random
from contextlib import aclosing
from dataclasses import replace

import pytest

from forkpoint.errors import ForkpointError, NodeDrainingError, StoreUnavailableError, UnavailableError
from forkpoint.ids import SessionName
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import DrainReport, GenerateCall
from tests.support.hash_engine import HashEngine, continuation
from tests.support.session_site import FAST, Running, Site, background, key, until

GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)
PROMPT = list(b"what a drained node had")


async def drained(node: Running) -> list[DrainReport]:
    """Drain to the end."""
    async with asyncio.timeout(10):
        return [report async for report in node.node.drain()]


async def slow(site: Site) -> Running:
    """A node that takes its time, and keeps what nobody uses."""
    node = await site.node(HashEngine(slots=3), options=replace(FAST, sweep_seconds=60.0))
    node.engine.step_pause = 0.002
    return node


async def insist(node: Running, name: SessionName, tokens: list[int], request: str) -> None:
    """Append to a session that moves: by the same request until somebody answers."""
    while True:
        try:
            await node.append(name, tokens, request)
        except ForkpointError:
            await asyncio.sleep(0.005)
        else:
            return


async def test_what_a_drained_node_ran_goes_on_elsewhere_where_it_was(site: Site) -> None:
    """Five generations on three slots: some move with their state; the others, which wait for a slot or lose theirs on
    the way to one that has to give way, are taken where they are released."""
    node = await slow(site)
    await node.workflow()
    names = [await node.session(f"s{number}") for number in range(5)]
    for name in names:
        await node.append(name, PROMPT)
    other = await slow(site)
    node.engine.step_pause, other.engine.step_pause = 0.05, 0.0
    reads = [node.reading(GenerateCall(name, key(str(name)), max_tokens=90)) for name in names]
    await until(lambda: sum(len(read.tokens) > 2 for read, _ in reads) == 3)
    reports = await drained(node)
    assert (reports[0].left, reports[-1].left) == (5, 0)
    assert reports[-1].moved >= 1 and reports[-1].moved + reports[-1].parked == 5
    for name, (read, task) in zip(names, reads, strict=True):
        with pytest.raises(ForkpointError):
            await task
        call = GenerateCall(name, key(str(name)), max_tokens=90, resume_position=len(PROMPT) + len(read.tokens))
        rest = await other.generate(call)
        assert read.tokens + rest.tokens == continuation(PROMPT, 90, GREEDY)[0]
        row = await other.catalog.get_session(name)
        assert row.owner == other.node.incarnation and row.takeovers == 0
    assert node.engine.sequences == {}, "a drained node's engine is empty"


async def test_a_node_that_is_drained_takes_nothing_until_it_is_undrained(site: Site) -> None:
    node = await site.node()
    await node.workflow()
    name, fresh = await node.session("s"), await node.session("fresh")
    await node.append(name, PROMPT)
    read, task = node.reading(GenerateCall(name, key("g"), max_tokens=200_000))
    await until(lambda: len(read.tokens) > 4)
    await drained(node)
    with pytest.raises(UnavailableError):
        await task
    for taken in (name, fresh):
        with pytest.raises(NodeDrainingError):
            await node.append(taken, PROMPT)
    assert (await node.node.get_session(name)).row.owner == ""
    assert len(await node.log(name)) >= len(PROMPT) + len(read.tokens), "it goes on answering"
    await node.node.undrain()
    await node.append(fresh, PROMPT)
    await until(lambda: name in node.node._core.lives)
    await node.node.cancel_generation(name)
    log = await node.log(name)
    assert log == PROMPT + continuation(PROMPT, len(log) - len(PROMPT), GREEDY)[0]


async def test_a_drain_that_is_broken_off_leaves_the_rest_where_it_is(site: Site) -> None:
    node = await slow(site)
    await node.workflow()
    names = [await node.session(f"s{number}") for number in range(12)]
    for name in names:
        await node.append(name, PROMPT)
    releases, go_on = itertools.count(), asyncio.Event()

    async def keep(call: str, after: bool) -> None:
        """All releases but the first wait."""
        if call == "release" and not after and next(releases):
            await go_on.wait()

    node.faults.watch = keep
    async with asyncio.timeout(10), aclosing(node.node.drain()) as reports:  # type: ignore[type-var]
        async for report in reports:
            if report.parked:
                break
    go_on.set()
    left = set(node.node._core.lives)
    assert left and not any(live.held for live in node.node._core.lives.values())
    gone = next(name for name in names if name not in left)
    with pytest.raises(NodeDrainingError):
        await node.append(gone, PROMPT)
    for name in left:
        await node.append(name, PROMPT)
    assert (await drained(node))[-1].left == 0


async def test_callers_who_write_during_a_drain_lose_and_repeat_nothing(site: Site, rng: random.Random) -> None:
    node, other = await slow(site), await slow(site)
    await node.workflow()
    names = [await node.session(f"s{number}") for number in range(4)]
    for name in names:
        await node.append(name, PROMPT)
    logs = {name: [*PROMPT] for name in names}

    async def write(name: SessionName) -> None:
        for number in range(12):
            tokens = [rng.randrange(256) for _ in range(rng.randrange(1, 30))]
            for at in (node, other):
                try:
                    await at.append(name, tokens, f"{name}-{number}")
                    break
                except ForkpointError:
                    continue
            else:
                await insist(other, name, tokens, f"{name}-{number}")
            logs[name] += tokens
            await asyncio.sleep(0)

    writers = background(asyncio.wait_for(asyncio.gather(*(write(name) for name in names)), 20))
    reports = await drained(node)
    await writers
    assert reports[-1].left == 0
    for name, log in logs.items():
        assert await other.log(name) == log


async def test_a_drain_and_a_pause_of_the_same_session_both_end(site: Site) -> None:
    node = await slow(site)
    await node.workflow()
    names = [await node.session(f"s{number}") for number in range(3)]
    for name in names:
        await node.append(name, PROMPT)
    reads = [node.reading(GenerateCall(name, key(str(name)), max_tokens=200_000)) for name in names]
    await until(lambda: all(len(read.tokens) > 2 for read, _ in reads))
    pauses = [background(node.node.pause(name, None)) for name in names]
    await asyncio.sleep(0)
    assert (await drained(node))[-1].left == 0
    async with asyncio.timeout(10):
        await asyncio.gather(*pauses, *(task for _, task in reads), return_exceptions=True)
    for name in names:
        assert (await node.catalog.get_session(name)).owner == ""


async def test_a_session_that_the_store_does_not_release_stays_and_is_drained_later(site: Site) -> None:
    node = await site.node()
    await node.workflow()
    name = await node.session("s")
    await node.append(name, PROMPT)
    await node.idle(name)
    node.faults.before["release"] = StoreUnavailableError("catalog", "gone")
    assert (await drained(node))[-1].parked == 0
    node.faults.heal()
    await node.append(name, PROMPT)
    assert (await drained(node))[-1].parked == 1
    assert (await node.catalog.get_session(name)).owner == ""
