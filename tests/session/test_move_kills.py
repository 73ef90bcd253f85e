"""The source, the target or the store is lost at every step of a move, before it and after it: one owner is left, and
the session goes on.

The steps are not listed by hand: they are the calls that a move is seen to make, of either node to the store and to the
other. A call that no kill point is known for fails the test, so that nobody adds a step without one.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from forkpoint.errors import StoreUnavailableError
from forkpoint.ids import SessionName
from tests.support.hash_engine import continuation
from tests.support.moving import GREEDY, PROMPT, Listener, ends_well, expected, listen, nodes, speaks
from tests.support.session_site import Running, Site, background, until

SOURCE_STEPS: Final = frozenset({"begin_migration", "get_session", "read_log", "get_generation", "list_checkpoints"})
TARGET_STEPS: Final = frozenset(
    {
        *("get_session", "read_log", "find_manifests", "nearest_checkpoint", "pin", "unpin", "open_generation"),
        *("cut_over", "note_numerics"),
    }
)
PEER_STEPS: Final = frozenset({"follow", "cut_over"})
BACKGROUND: Final = frozenset(
    {
        *("list_nodes", "renew_lease", "remove_node", "register_node", "list_open_generations", "list_sessions"),
        *("commit_step", "put_checkpoint", "marker", "durability", "get_workflow", "get_generation"),
    }
)
"""Calls that nodes make all the time, or because a generation runs."""
COUNT: Final = 60


@dataclass(frozen=True)
class Step:
    """One call of a move: who makes it ("source", "target", or "peer": the source to the target), and which one."""

    place: str
    method: str


@dataclass
class Trip:
    """A session that is moved from the first node to the second while a client listens."""

    site: Site
    source: Running
    target: Running
    name: SessionName
    stream: Listener
    seen: set[Step] = field(default_factory=set)
    moving: bool = False

    @classmethod
    async def begin(cls, site: Site) -> "Trip":
        source, target = await nodes(site)
        name = await speaks(source)
        stream = listen(site, name, COUNT)
        await until(lambda: len(stream.tokens) >= 3)
        return cls(site, source, target, name, stream)

    def watch(self, act: Callable[[Step, bool], Awaitable[None]]) -> None:
        """Let `act` see every call from now on."""

        def seen_by(place: str) -> Callable[[str, bool], Awaitable[None]]:
            async def see(method: str, done: bool) -> None:
                if method not in BACKGROUND:
                    step = Step(place, method)
                    self.seen.add(step)
                    await act(step, done)

            return see

        self.source.faults.watch = seen_by("source")
        self.target.faults.watch = seen_by("target")
        self.site.street.watch = seen_by("peer")

    def unwatch(self) -> None:
        self.source.faults.watch = self.target.faults.watch = self.site.street.watch = None

    async def move(self) -> None:
        """To its end, whatever that is."""
        async for _ in self.source.node.migrate(self.name, self.target.options.node):
            pass

    async def arrives(self) -> None:
        """The client got everything, and what is left is in order."""
        assert (await self.stream.done()).tokens == continuation(PROMPT, COUNT, GREEDY)[0]
        await ends_well(self.site, self.name, expected(PROMPT, COUNT))


@contextmanager
def stops_at(trip: Trip, at: Step, done: bool) -> Iterator[asyncio.Event]:
    """The event is set at this moment of the first such call, which then waits for the block's end."""
    reached, over = asyncio.Event(), asyncio.Event()

    async def stop(step: Step, after: bool) -> None:
        if (step, after) == (at, done) and not reached.is_set():
            reached.set()
            await over.wait()

    trip.watch(stop)
    try:
        yield reached
    finally:
        trip.unwatch()
        over.set()


async def steps_of_a_move(folder: Path) -> set[Step]:
    """What an undisturbed move calls."""
    site = Site(folder, "memory")
    trip = await Trip.begin(site)

    async def nothing(step: Step, done: bool) -> None:
        return

    trip.watch(nothing)
    await trip.move()
    trip.unwatch()
    await trip.arrives()
    await site.close()
    return trip.seen


def known_steps() -> set[Step]:
    """Every step that a kill point is known for."""
    places = (("source", SOURCE_STEPS), ("target", TARGET_STEPS), ("peer", PEER_STEPS))
    return {Step(place, method) for place, methods in places for method in methods}


async def in_turns(works: list[Callable[[], Awaitable[str | None]]], at_once: int = 6) -> list[str]:
    """Run these, some at a time; what they complain about."""
    gate = asyncio.Semaphore(at_once)

    async def one(work: Callable[[], Awaitable[str | None]]) -> str | None:
        async with gate:
            return await work()

    return [said for said in await asyncio.gather(*map(one, works)) if said]


async def test_a_move_makes_no_call_that_no_kill_point_is_known_for(tmp_path: Path) -> None:
    seen = await steps_of_a_move(tmp_path)
    assert seen <= known_steps(), f"new steps: {seen - known_steps()}"
    vital = {("source", "begin_migration"), ("peer", "follow"), ("peer", "cut_over"), ("target", "cut_over")}
    assert vital <= {(step.place, step.method) for step in seen}


@pytest.mark.parametrize("victim", ["source", "target"])
async def test_a_node_that_is_killed_at_any_step_leaves_one_owner(victim: str, tmp_path: Path) -> None:
    steps = sorted(await steps_of_a_move(tmp_path), key=lambda step: (step.place, step.method))

    def killing(number: int, step: Step, done: bool) -> Callable[[], Awaitable[str | None]]:
        async def run() -> str | None:
            site = Site(tmp_path / f"{victim}-{number}", "memory")
            try:
                trip = await Trip.begin(site)
                with stops_at(trip, step, done) as reached:
                    moving = background(trip.move())
                    await asyncio.wait((background(reached.wait()), moving), return_when=asyncio.FIRST_COMPLETED)
                    await (trip.source if victim == "source" else trip.target).crash()
                await asyncio.wait_for(asyncio.gather(moving, return_exceptions=True), 10)
                await trip.arrives()
                await site.close()
            except Exception as error:  # noqa: BLE001 - the test tells all of them at once
                return f"{victim} killed {'after' if done else 'before'} {step.place}.{step.method}: {error!r}"
            return None

        return run

    works = [killing(n, step, done) for n, (step, done) in enumerate(itertools.product(steps, (False, True)))]
    assert await in_turns(works) == []


@pytest.mark.parametrize("effect", ["none", "lost answer"])
async def test_a_store_that_fails_at_any_step_leaves_one_owner(effect: str, tmp_path: Path) -> None:
    """The call fails, and for a while so does every other one of that node."""
    steps = [step for step in await steps_of_a_move(tmp_path) if step.place != "peer"]
    steps.sort(key=lambda step: (step.place, step.method))

    def failing(number: int, at: Step) -> Callable[[], Awaitable[str | None]]:
        async def run() -> str | None:
            site = Site(tmp_path / f"store-{number}", "memory")
            try:
                trip = await Trip.begin(site)
                broken: set[str] = set()

                async def fail(step: Step, done: bool) -> None:
                    if step == at and done == (effect == "lost answer") and not broken:
                        broken.add(step.place)
                        asyncio.get_running_loop().call_later(0.05, broken.add, "healed")
                    if step.place in broken and "healed" not in broken:
                        raise StoreUnavailableError("catalog", "it is away")

                trip.watch(fail)
                await asyncio.wait_for(asyncio.gather(trip.move(), return_exceptions=True), 10)
                trip.unwatch()
                await trip.arrives()
                await site.close()
            except Exception as error:  # noqa: BLE001 - the test tells all of them at once
                return f"{effect} at {at.place}.{at.method}: {error!r}"
            return None

        return run

    assert await in_turns([failing(number, step) for number, step in enumerate(steps)]) == []
