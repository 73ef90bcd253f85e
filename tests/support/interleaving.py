"""Every interleaving of a few actors over ports: one moves at a time, from one port call to the next.

An actor is a coroutine whose port calls go through `Gated`. `Explorer` replays a scene with one schedule after another,
depth first, until it has seen all those with at most so many preemptions (switches away from an actor that could go
on). No clock, no sleep: a schedule is a list of names, and a failure shows it.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore


class Stage:
    """Where the actors of one scene wait for their turns."""

    def __init__(self) -> None:
        self._parked: dict[str, asyncio.Future[None]] = {}
        self._resting: set[str] = set()
        self._changed = asyncio.Event()
        self.calls: list[str] = []
        """actor.method, in the order in which they went ahead."""

    async def turn(self, actor: str, call: str) -> None:
        """Wait for the actor's next turn."""
        assert actor not in self._parked, f"{actor} makes two calls at once"
        self._parked[actor] = asyncio.get_running_loop().create_future()
        self._changed.set()
        await self._parked[actor]
        self.calls.append(f"{actor}.{call}")

    async def rest(self, actor: str) -> None:
        """Wait until somebody else has moved, if anybody else can."""
        self._resting.add(actor)
        await self.turn(actor, "rest")

    async def play(
        self, actors: dict[str, Coroutine[Any, Any, object]], choose: Callable[[list[str]], str]
    ) -> dict[str, object]:
        """Let `choose` pick who moves whenever all wait. The actors' results, or what they raised."""
        results: dict[str, object] = {}

        async def act(name: str, work: Coroutine[Any, Any, object]) -> None:
            try:
                results[name] = await work
            except Exception as error:  # noqa: BLE001 - the scene decides what may be raised
                results[name] = error
            self._changed.set()

        async with asyncio.TaskGroup() as group:
            for name, work in actors.items():
                group.create_task(act(name, work))
            while len(results) < len(actors):
                if len(results) + len(self._parked) < len(actors):
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                awake = sorted(self._parked.keys() - self._resting) or sorted(self._parked)
                mover = choose(awake)
                self._resting.clear()
                self._parked.pop(mover).set_result(None)
        return results


class Gated:
    """A port whose calls wait for their actor's turn. `free`: methods that do not."""

    def __init__(self, inner: object, stage: Stage, actor: str, free: Sequence[str] = ()) -> None:
        self._inner = inner
        self._stage = stage
        self._actor = actor
        self._free = free

    def __getattr__(self, method: str) -> Any:
        attribute = getattr(self._inner, method)
        if method in self._free or not callable(attribute):
            return attribute
        act = cast(Callable[..., Any], attribute)
        if inspect.isasyncgenfunction(attribute):

            async def listing(*args: Any) -> AsyncIterator[Any]:
                await self._stage.turn(self._actor, method)
                async for item in act(*args):
                    yield item

            return listing

        async def call(*args: Any, **kwargs: Any) -> Any:
            await self._stage.turn(self._actor, method)
            return await act(*args, **kwargs)

        return call

    @classmethod
    def ports(
        cls, catalog: Catalog, blobs: BlobStore, stage: Stage, actor: str, free: Sequence[str] = ()
    ) -> tuple[Catalog, BlobStore]:
        """Both ports for one actor."""
        return cast(Catalog, cls(catalog, stage, actor, free)), cast(BlobStore, cls(blobs, stage, actor, free))


@dataclass
class Explorer:
    """Schedules, one after another."""

    preemptions: int
    prefix: list[str] = field(default_factory=list)
    trace: list[tuple[list[str], str, int]] = field(default_factory=list)
    """Of each decision: the choices in order, the one taken, and the preemptions up to then."""

    def choose(self, ready: list[str]) -> str:
        """The next actor of this schedule."""
        current = self.trace[-1][1] if self.trace else ""
        spent = self.trace[-1][2] if self.trace else 0
        order = sorted(ready, key=lambda name: (name != current, name))
        index = len(self.trace)
        chosen = self.prefix[index] if index < len(self.prefix) else order[0]
        self.trace.append((order, chosen, spent + (current in ready and chosen != current)))
        return chosen

    def advance(self) -> bool:
        """Go on to the next schedule; False when there is none."""
        trace, self.trace = self.trace, []
        while trace:
            order, chosen, _ = trace.pop()
            current = trace[-1][1] if trace else ""
            spent = trace[-1][2] if trace else 0
            later = order[order.index(chosen) + 1 :]
            allowed = [name for name in later if spent + (current in order and name != current) <= self.preemptions]
            if allowed:
                self.prefix = [taken for _, taken, _ in trace] + [allowed[0]]
                return True
        return False


async def explore(scene: Callable[[Explorer], Awaitable[None]], preemptions: int) -> int:
    """Play a scene by every schedule. Returns how many there were; a failure names its schedule."""
    explorer, count = Explorer(preemptions), 0
    while True:
        try:
            await scene(explorer)
        except BaseException as error:
            error.add_note(f"schedule {count}: {[taken for _, taken, _ in explorer.trace]}")
            raise
        count += 1
        if not explorer.advance():
            return count
