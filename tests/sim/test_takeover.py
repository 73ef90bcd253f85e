"""Nodes that die, in virtual time: how soon others have what they ran, and what becomes of a session that kills."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final
from unittest import mock

import pytest

from forkpoint.ids import SessionName
from forkpoint.limits import LEASE_TTL_SECONDS, TAKEOVERS_ALONE_MAX
from forkpoint.server.engine.batch import Sample, Sampled, Work
from forkpoint.server.session.api import AppendCall, CreateSession, GenerateCall, Input
from forkpoint.server.session.node import Node
from forkpoint.server.session.options import NodeOptions
from forkpoint.statestore.records import Durability, RequestKey, SessionRow, SessionState, WorkflowRow
from tests.sim import fleet
from tests.sim.fleet import Seat
from tests.sim.link import Weather
from tests.sim.loop import SimLoop
from tests.sim.process import PROCESS, Condition
from tests.sim.store import SimStore
from tests.sim.trace import Trace
from tests.sim.watch import Call
from tests.sim.world import Complaints, _alone
from tests.support.hash_engine import HashEngine, continuation

WORKFLOW: Final = "w"
PROMPT: Final = tuple(b"what a dead node ran")
POISON: Final = 255
GREEDY: Final = Sample(0.0, 0, 1.0, 0.0, 7)
PATIENCE_SECONDS: Final = 60.0


class MortalEngine(HashEngine):
    """Consuming POISON ends the process that does it."""

    def step(self, works: Sequence[Work]) -> list[Sampled | None]:
        if any(POISON in work.token_ids for work in works):
            process = PROCESS.get()
            assert process is not None
            process.kill()
        return super().step(works)


class Cluster:
    """Three nodes on a store where nothing goes wrong by itself."""

    def __init__(self, loop: SimLoop, seed: int) -> None:
        self.rng = random.Random(f"takeover {seed}")
        trace = Trace(loop.time)
        self.now = loop.time
        self.store = SimStore(loop, self.rng, Durability.REPLICATED, trace)
        weather = Weather()
        self.seats = [Seat(f"n{number}", self.store, weather, self.rng, trace) for number in range(1, 4)]
        for seat in self.seats:
            seat.collects = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """All nodes serve inside the block."""
        await asyncio.gather(*(seat.start() for seat in self.seats))
        self.store.execute(Call("catalog", "create_workflow", (WorkflowRow(WORKFLOW),)))
        await asyncio.sleep(self.rng.uniform(1, 3))
        yield
        for seat in self.seats:
            seat.kill()
            await seat.bury()

    async def begin(self, seat: Seat, name: SessionName, prompt: Sequence[int], tokens: int) -> None:
        """Let a node run a generation."""
        assert seat.process is not None and seat.node is not None
        task = seat.process.spawn(begin(seat.node, name, tuple(prompt), tokens))
        if await seat.process.ends(task):
            task.result()

    async def rows(self) -> list[SessionRow]:
        """Sessions whose generation has not ended."""
        return await self.store.catalog.list_open_generations()

    def living(self) -> set[str]:
        """Incarnations of the nodes that run."""
        return {seat.node.incarnation for seat in self.seats if seat.alive and seat.node is not None}

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        """Look every few milliseconds until it holds."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await holds():
                await asyncio.sleep(0.01)


async def begin(node: Node, name: SessionName, prompt: tuple[int, ...], tokens: int) -> None:
    """A session with a prompt and a running generation that nobody reads."""
    await node.create_session(CreateSession(name, 7))
    await node.append(AppendCall(name, Input(token_ids=prompt)))
    request = RequestKey("tester", WORKFLOW, f"g-{name.session}", name.session.encode())
    async for _ in node.generate(GenerateCall(name, request, max_tokens=tokens)):
        break


def play(
    seed: int, story: Callable[[Cluster], Awaitable[None]], options: NodeOptions, engine: type[HashEngine]
) -> None:
    """Run a story in a world of its own."""
    loop = SimLoop(random.Random(f"loop {seed}"))  # type: ignore[abstract]
    complaints = Complaints()

    async def whole() -> None:
        cluster = Cluster(loop, seed)
        async with cluster.running():
            await story(cluster)

    with (
        _alone(seed, loop, complaints),
        mock.patch.object(fleet, "OPTIONS", options),
        mock.patch.object(fleet, "HashEngine", engine),
    ):
        loop.run(whole(), 10 * PATIENCE_SECONDS)
        loop.close()


def test_what_a_dead_node_ran_has_owners_within_the_lease_and_two_seconds() -> None:
    """With the times of a server as it is started, at any phase of renewals and looks, and without a lock file."""
    count = 60

    async def story(cluster: Cluster) -> None:
        first = cluster.seats[0]
        names = [SessionName(WORKFLOW, f"s{number}") for number in range(count)]
        await asyncio.gather(*(cluster.begin(first, name, PROMPT, 4000) for name in names))
        epochs = {row.name: row.epoch for row in await cluster.rows()}
        assert len(epochs) == count
        first.kill()
        died = cluster.now()

        async def all_owned() -> bool:
            return {row.owner for row in await cluster.rows()} <= cluster.living()

        await cluster.until(all_owned)
        assert cluster.now() - died <= LEASE_TTL_SECONDS + 2
        rows = await cluster.rows()
        owners = Counter(row.owner for row in rows)
        assert len(owners) == 2 and min(owners.values()) >= count / 10, "they are divided"
        assert all(row.epoch == epochs[row.name] + 1 for row in rows), "and none was taken twice"

    for seed in range(4):
        play(seed, story, NodeOptions("n"), HashEngine)


@pytest.mark.parametrize("restarts_within", [(6.0, 8.0), (0.0, 1.0)], ids=["taken elsewhere", "or by its next process"])
def test_a_session_that_ends_every_process_is_quarantined_and_no_other_is(restarts_within: tuple[float, float]) -> None:
    """After three processes, if always another node takes it. A node's next process may be quicker, and tries again."""
    neighbours, tokens = 8, 60
    elsewhere = restarts_within[0] > LEASE_TTL_SECONDS + 2
    bad = SessionName(WORKFLOW, "bad")

    async def story(cluster: Cluster) -> None:
        names = [SessionName(WORKFLOW, f"s{number}") for number in range(neighbours)]
        first, catalog = cluster.seats[0], cluster.store.catalog
        await asyncio.gather(*(cluster.begin(first, name, PROMPT, tokens) for name in names))
        deaths = 0

        async def bury_and_restart() -> None:
            nonlocal deaths
            for seat in cluster.seats:
                process = seat.process
                if seat.serves and process is not None and process.condition is Condition.DEAD:
                    assert seat.node is not None
                    deaths += 1
                    seat.graveyard.append((process, seat.node))
                    seat.kill()
                    await asyncio.sleep(cluster.rng.uniform(*restarts_within))
                    await seat.start()

        async def over() -> bool:
            await bury_and_restart()
            left = {row.name for row in await cluster.rows()} - {bad}
            return not left and (await catalog.get_session(bad)).state is SessionState.QUARANTINED

        await cluster.begin(first, bad, (*PROMPT, POISON), tokens)
        await cluster.until(over)
        row = await catalog.get_session(bad)
        assert deaths == 3 if elsewhere else 3 <= deaths < TAKEOVERS_ALONE_MAX
        assert row.state_reason.startswith(f"{deaths} owners in a row were lost"), "each counts once"
        assert (row.head, row.owner) == (len(PROMPT) + 1, "")
        expected = [*PROMPT, *continuation(PROMPT, tokens, GREEDY)[0]]
        for name in names:
            assert (await catalog.get_session(name)).state is SessionState.ACTIVE
            assert list((await catalog.read_log(name, 0, 1000)).token_ids) == expected

    for seed in range(3):
        play(seed, story, fleet.OPTIONS, MortalEngine)
