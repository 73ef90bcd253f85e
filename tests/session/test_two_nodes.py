"""Two nodes on one store, clients that go to either, and deaths: one log, one truth."""

import asyncio
import random

from forkpoint.errors import ForkpointError
from forkpoint.ids import SessionName
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import GenerateCall
from tests.support.hash_engine import HashEngine, continuation
from tests.support.session_site import Running, Site, key

GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)


class Fleet:
    """The nodes that live now."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.nodes: list[Running] = []

    async def add(self) -> None:
        node = await self.site.node(HashEngine(slots=3))
        node.engine.step_pause = 0.002
        self.nodes.append(node)


async def talk(fleet: Fleet, name: SessionName, turns: int, rng: random.Random) -> list[int]:
    """Append and generate, each call sent again, to any node, until it is answered; streams go on by position."""
    log: list[int] = []
    for turn in range(turns):
        tokens = [rng.randrange(256) for _ in range(rng.randrange(1, 20))]
        done = None
        while done is None:
            try:
                done = await rng.choice(fleet.nodes).append(name, tokens, request=f"{name.session}-a{turn}")
            except (ForkpointError, IndexError):
                await asyncio.sleep(0.005)
        assert done.outcome.start == len(log), "nobody else wrote"
        log += tokens
        count = rng.randrange(1, 40)
        seen: list[int] = []
        finished = False
        while not finished:
            call = GenerateCall(
                name, key(f"{name.session}-g{turn}"), max_tokens=count, resume_position=len(log) + len(seen)
            )
            read, task = rng.choice(fleet.nodes).reading(call)
            try:
                await task
                finished = True
            except ForkpointError:
                await asyncio.sleep(0.005)
            seen += read.tokens
        assert seen == continuation(log, count, GREEDY)[0]
        log += seen
    return log


async def test_clients_of_two_nodes_that_die_see_one_log(site: Site, rng: random.Random) -> None:
    fleet = Fleet(site)
    await fleet.add()
    await fleet.nodes[0].workflow()
    names = [await fleet.nodes[0].session(f"s{number}") for number in range(4)]
    await fleet.add()
    talks = asyncio.gather(*(talk(fleet, name, 6, random.Random(rng.random())) for name in names))
    for _ in range(6):
        await asyncio.sleep(rng.uniform(0.05, 0.15))
        if talks.done():
            break
        await fleet.add()
        victim = fleet.nodes.pop(rng.randrange(2))
        await (victim.crash() if rng.random() < 0.6 else victim.stop())
    async with asyncio.timeout(30):
        logs = await talks
    for name, log in zip(names, logs, strict=True):
        assert await fleet.nodes[0].log(name) == log
