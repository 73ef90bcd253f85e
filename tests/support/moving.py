"""Sessions on the move, for tests: a client that goes after its stream, and what must be so in the end."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from forkpoint.errors import ForkpointError
from forkpoint.ids import SessionName
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import GenerateCall, MoveReport
from forkpoint.server.session.live import LiveSession
from tests.sim.oracle import Oracle
from tests.support.hash_engine import HashEngine, continuation
from tests.support.session_site import FAST, PATIENCE_SECONDS, Read, Running, Site, background, key, until

PROMPT = list(b"all that is known of me are my tokens, and they are known elsewhere too")
GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)
STEP_SECONDS = 0.001
"""A step of these tests' engines takes that, so that something can happen while a generation runs."""


async def nodes(site: Site, count: int = 2, slots: int = 4, pages: int = 1024) -> list[Running]:
    """Nodes that know each other; the first one made the workflow."""
    found = []
    for _ in range(count):
        # A slow machine is no dead node: what dies here lets its lock go.
        options = replace(
            FAST, lease_ttl_seconds=1.0, sweep_seconds=30.0, retry_first_seconds=0.002, retry_most_seconds=0.01
        )
        node = await site.node(HashEngine(slots=slots, pages=pages), options=options)
        node.engine.step_pause = STEP_SECONDS
        found.append(node)
    await found[0].workflow()
    await until(lambda: all(len(node.node.others) == count - 1 for node in found))
    return found


async def speaks(node: Running, prompt: Sequence[int] = PROMPT, name: str = "s") -> SessionName:
    """A session with a prompt in its log."""
    session = await node.session(name)
    if prompt:
        await node.append(session, prompt)
    return session


async def move(source: Running, name: SessionName, target: Running | None = None) -> list[MoveReport]:
    """Move it, and what was told of that."""
    node = "" if target is None else target.options.node
    async with asyncio.timeout(PATIENCE_SECONDS):
        return [report async for report in source.node.migrate(name, node)]


class Hold:
    """A call waits here until the test lets it go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.reached.set()
        await self.go_on.wait()


class Listener:
    """Reads one generation to its end, wherever it runs: as a client behind forwarding nodes does."""

    def __init__(self, site: Site, call: GenerateCall) -> None:
        self.read = Read()
        self.errors: list[ForkpointError] = []
        self._site = site
        self._call = call
        self.task = background(self._run())

    @property
    def tokens(self) -> list[int]:
        return self.read.tokens

    async def done(self) -> Read:
        """What was read, all of it."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.task
        return self.read

    async def _run(self) -> None:
        turn = 0
        while self.read.finished is None:
            turn += 1
            places = list(self._site.nodes)
            node = places[turn % len(places)] if places else None
            try:
                if node is not None:
                    await self._listen(node)
            except ForkpointError as error:
                self.errors.append(error)
            await asyncio.sleep(0.001)

    async def _listen(self, node: Running) -> None:
        call, known = self._call, self.read
        again = known.started is not None
        if again:
            call = replace(call, resume_position=known.position)
        async for event in node.node.generate(call):
            if not (again and hasattr(event, "row")):
                known.take(event)


def listen(site: Site, name: SessionName, count: int, request: str = "g", **fields: object) -> Listener:
    """Begin a generation of `count` tokens."""
    return Listener(site, GenerateCall(name, key(request), max_tokens=count, **fields))  # type: ignore[arg-type]


def owner_of(site: Site, name: SessionName) -> tuple[Running, LiveSession]:
    """The one node that has the session."""
    found = [(node, node.node._core.lives[name]) for node in site.nodes if name in node.node._core.lives]
    assert len(found) == 1, f"{len(found)} nodes have {name}"
    return found[0]


async def ends_well(site: Site, name: SessionName, tokens: Sequence[int], owner: Running | None = None) -> None:
    """One node has the session, by the store's word too; log and state are those of the tokens; nothing of the move is
    left anywhere."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            row = await site.nodes[0].catalog.get_session(name)
            owners = [node for node in site.nodes if name in node.node._core.lives]  # the old one hears of it later
            if not row.migration and len(owners) == 1 and not any(node.node._core.follows for node in site.nodes):
                break
            await asyncio.sleep(0.005)
    node, live = owner_of(site, name)
    await node.idle(name)
    row = await node.catalog.get_session(name)
    assert (row.owner, row.epoch, row.head) == (node.node.incarnation, live.epoch, len(tokens))
    assert await node.log(name) == list(tokens)
    assert owner is None or node is owner
    if live.sequence is not None:
        held, due = node.engine.sequences[live.sequence], Oracle().state(tokens[: live.consumed])
        assert (held.running, held.grid, held.latents) == (due.running, due.grid, due.latents)
    for other in site.nodes:
        await until(lambda other=other: set(other.engine.sequences) == _held(other))  # type: ignore[misc]
        assert not other.node._core.follows


def _held(node: Running) -> set[int | None]:
    """Sequences that the node's sessions have, and images of forks whose children run elsewhere: the engine must hold
    no other."""
    images = {image.sequence for image in node.node._lifecycle._images._images}
    return ({live.sequence for live in node.node._core.lives.values()} | images) - {None}


def expected(prompt: Sequence[int], count: int, sample: Sample = GREEDY) -> list[int]:
    """The log of an uninterrupted run."""
    return [*prompt, *continuation(prompt, count, sample)[0]]
