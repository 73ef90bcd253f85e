"""What goes wrong, and when: drawn from the seed, until it is told to stop."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

from tests.sim.fleet import HOUR_US, HiccupError, Seat
from tests.sim.link import Weather
from tests.sim.peers import Roads
from tests.sim.store import SimStore
from tests.sim.trace import Trace

Evil = Callable[[], Awaitable[None]]


class Nemesis:
    """One evil after the other, some at the same time. `heal` puts everything right again."""

    def __init__(
        self,
        seats: Sequence[Seat],
        store: SimStore,
        weather: Weather,
        roads: Roads,
        rng: random.Random,
        trace: Trace,
    ) -> None:
        self._seats = seats
        self._store = store
        self._weather = weather
        self._roads = roads
        self._rng = rng
        self._trace = trace
        evils: list[Evil] = [self._kill, self._freeze, self._stop, self._partition, self._fail_over, self._outage]
        evils += [self._kill, self._storm, self._jump, self._hiccup, self._part]
        self._evils = rng.sample(evils, k=rng.randint(0, 6))
        self._pause = rng.uniform(0.1, 0.6)
        self._stopping = False
        self.counts: dict[str, int] = {}

    async def run(self) -> None:
        """Until `heal`."""
        async with asyncio.TaskGroup() as group:
            while self._evils and not self._stopping:
                await asyncio.sleep(self._rng.expovariate(1 / self._pause))
                if self._stopping:
                    break
                evil = self._rng.choice(self._evils)
                name = evil.__name__.strip("_")
                self.counts[name] = self.counts.get(name, 0) + 1
                group.create_task(self._do(evil, name))

    async def _do(self, evil: Evil, name: str) -> None:
        self._trace.note("nemesis", name)
        await evil()

    def heal(self) -> None:
        """No new evil; those of now end by themselves."""
        self._stopping = True

    def _seat(self) -> Seat | None:
        return self._rng.choice([seat for seat in self._seats if seat.alive] or [None])

    async def _kill(self) -> None:
        seat = self._seat()
        if seat is not None:
            seat.kill()
            await asyncio.sleep(self._rng.choice((0.01, 0.2, 1.0)))
            await seat.start()

    async def _freeze(self) -> None:
        """Also for longer than a lease lives."""
        seat = self._seat()
        if seat is not None:
            seat.freeze()
            await asyncio.sleep(self._rng.uniform(0.05, 1.2))
            seat.thaw()

    async def _stop(self) -> None:
        seat = self._seat()
        if seat is not None and not seat.leaving:
            await seat.stop()
            await asyncio.sleep(self._rng.uniform(0.0, 0.2))
            if not seat.alive:
                await seat.start()

    async def _partition(self) -> None:
        """A node that reaches its clients, and not the store."""
        seat = self._seat()
        if seat is not None and seat.link is not None:
            link, link.cut = seat.link, True
            await asyncio.sleep(self._rng.uniform(0.05, 1.0))
            link.cut = False

    async def _part(self) -> None:
        """Two nodes that reach all but each other."""
        pair = frozenset(seat.name for seat in self._rng.sample(list(self._seats), k=min(2, len(self._seats))))
        self._roads.cut.add(pair)
        await asyncio.sleep(self._rng.uniform(0.05, 1.0))
        self._roads.cut.discard(pair)

    async def _fail_over(self) -> None:
        """The replica stands still for a while, then it is the primary."""
        if not self._store.up:
            return
        self._store.stalled_until = max(
            self._store.stalled_until, asyncio.get_running_loop().time() + self._rng.choice((0.0, 0.05, 0.12))
        )
        await asyncio.sleep(self._rng.uniform(0.0, 0.12))
        if self._store.up:
            self._store.up = False
            self._store.fail_over()
            await asyncio.sleep(self._rng.uniform(0.01, 0.4))
            self._store.up = True

    async def _outage(self) -> None:
        """The store can't be reached, and loses nothing."""
        if self._store.up:
            self._store.up = False
            await asyncio.sleep(self._rng.uniform(0.02, 0.6))
            self._store.up = True

    async def _storm(self) -> None:
        self._weather.slow = self._rng.choice((0.0, 0.1, 0.4))
        self._weather.lost_request = self._rng.choice((0.0, 0.05, 0.2))
        self._weather.lost_answer = self._rng.choice((0.0, 0.05, 0.2))
        self._weather.late = self._rng.choice((0.0, 0.0, 0.05))
        await asyncio.sleep(self._rng.uniform(0.1, 1.0))
        self._weather.calm()

    async def _jump(self) -> None:
        """A wall clock is set."""
        seat = self._seat()
        if seat is not None and seat.clock is not None:
            seat.clock.wall_offset_us += self._rng.randint(-HOUR_US, HOUR_US)

    async def _hiccup(self) -> None:
        seat = self._seat()
        if seat is not None and seat.engine is not None:
            seat.engine.failures.append(HiccupError("a step fails on purpose"))
