"""Somebody who moves sessions from node to node all the time, and changes their mind now and then."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from forkpoint.errors import ForkpointError
from forkpoint.ids import SessionName
from forkpoint.server.session.node import Node
from tests.sim.fleet import HiccupError, Seat
from tests.sim.trace import Trace


class Mover:
    """Asks nodes to move their sessions, as an operator does: whatever becomes of a move, the session must be well."""

    def __init__(self, seats: Sequence[Seat], rng: random.Random, trace: Trace) -> None:
        self._seats = seats
        self._rng = rng
        self._trace = trace
        self._pause = rng.choice((0.05, 0.2, 1.0))
        self.stopping = len(seats) < 2
        self.counts = {"moves": 0, "moved": 0, "unmoved": 0, "minds changed": 0}

    async def run(self) -> None:
        """Until it is told to stop."""
        async with asyncio.TaskGroup() as group:
            while not self.stopping:
                await asyncio.sleep(self._rng.expovariate(1 / self._pause))
                seat = self._rng.choice(list(self._seats))
                if seat.node is None or seat.process is None or not seat.alive or self.stopping:
                    continue
                names = sorted(seat.node._core.lives, key=str)
                if names:
                    target = self._rng.choice([other.name for other in self._seats if other is not seat] + [""])
                    group.create_task(self._move(seat, self._rng.choice(names), target))

    async def _move(self, seat: Seat, name: SessionName, target: str) -> None:
        process, node = seat.process, seat.node
        assert process is not None and node is not None
        self.counts["moves"] += 1
        patience = self._rng.choice((0.02, 0.1, 5.0, 5.0, 5.0))
        task = process.spawn(self._ask(node, name, target))
        asyncio.get_running_loop().call_later(patience, self._give_up, task)
        if await process.ends(task) and not task.cancelled():
            self.counts["moved" if task.result() else "unmoved"] += 1

    def _give_up(self, task: "asyncio.Task[bool]") -> None:
        if not task.done():
            self.counts["minds changed"] += 1
            task.cancel()

    async def _ask(self, node: Node, name: SessionName, target: str) -> bool:
        """Whether it moved."""
        try:
            async with aclosing(node.migrate(name, target)) as reports:
                return await _last_is_moved(reports)
        except (ForkpointError, HiccupError) as error:
            self._trace.note("mover", name, target, error)
            return False


async def _last_is_moved(reports: AsyncIterator[object]) -> bool:
    last = None
    async for report in reports:
        last = report
    return last is not None
