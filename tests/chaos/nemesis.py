"""What goes wrong, on whom and for how long: a sequence that the seed alone decides, whatever comes of it."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from forkpoint.client.client import Client
from forkpoint.client.errors import RemoteError
from forkpoint.client.session import Session
from tests.chaos.fleet import Seat
from tests.chaos.network import CLIENTS, STORE, Network
from tests.chaos.redis_pair import RedisPair
from tests.support.talkers import insist

HOUR_US: Final = 3_600_000_000
CALM_SECONDS: Final = 20.0
LIFE_SECONDS: Final = 0.05
BEYOND_LEASE_SECONDS: Final = 5.5
"""A node that stands still for so long is taken for dead: lease, skew, and a look of the others."""


@dataclass(frozen=True, slots=True)
class Evil:
    """One deed. `seconds`: how long it lasts; `rest`: how long the lane waits afterwards; `dice` in [0, 1)."""

    kind: str
    node: int
    other: int
    seconds: float
    rest: float
    dice: float


@dataclass(frozen=True, slots=True)
class Lane:
    """A sequence of deeds, one after the other; several lanes run beside each other."""

    name: str
    kinds: tuple[str, ...]
    rest_seconds: float
    """On average."""


SUDDEN: Final = Lane("nodes", ("kill", "kill", "kill", "kill", "freeze", "terminate"), 1.5)
SLOW: Final = Lane("world", ("cut_store", "cut_answers", "cut_nodes", "cut_clients", "jump", "slow_disk"), 2.0)
STORE_LANE: Final = Lane("store", ("stall", "restart", "fail_over"), 5.0)
MOVES: Final = Lane("moves", ("migrate", "migrate", "migrate", "migrate", "drain", "rebalance"), 0.5)
MOVE_SECONDS: Final = 20.0
"""A move or a drain that takes longer is cancelled, which is one more thing that may happen to it."""


def killers(count: int) -> tuple[Lane, ...]:
    """Lanes that do nothing but kill."""
    return tuple(Lane(f"killer {number}", ("kill",), 0.3) for number in range(count))


def deeds(seed: int, lane: Lane, nodes: int) -> "DeedSource":
    """The lane's sequence for this seed."""
    return DeedSource(random.Random(f"nemesis {seed} {lane.name}"), lane, nodes)


class DeedSource:
    """Endless; the same numbers are drawn for every deed, whatever its kind needs."""

    def __init__(self, rng: random.Random, lane: Lane, nodes: int) -> None:
        self._rng, self._lane, self._nodes = rng, lane, nodes

    def __iter__(self) -> "DeedSource":
        return self

    def __next__(self) -> Evil:
        rng = self._rng
        node = rng.randrange(self._nodes)
        return Evil(
            kind=rng.choice(self._lane.kinds),
            node=node,
            other=(node + rng.randrange(1, max(2, self._nodes))) % self._nodes,
            seconds=rng.choice((0.0, 0.1, 0.5, 1.5, BEYOND_LEASE_SECONDS)) * rng.uniform(0.8, 1.2),
            rest=rng.expovariate(1 / self._lane.rest_seconds),
            dice=rng.random(),
        )


@dataclass
class Nemesis:
    """Does the deeds, until it is told to stop; then all is put right again."""

    seats: Sequence[Seat]
    network: Network
    redis: RedisPair | None
    tell: Callable[[str], None]
    operator: Client
    """Who asks for moves."""
    sessions: Callable[[], Sequence[Session]]
    """Those that live now."""
    shown: Callable[[], int] = lambda: 0
    """Tokens that clients got so far."""
    between: int = 0
    """So many of them come between two kills, if they come within CALM_SECONDS: a cluster that is killed faster than it
    can take over does nothing else, and what it does is what is looked at."""
    counts: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    """What moves and drains came to."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Kinds that can't be done here, and why."""
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _next_kill: int = 0

    def __post_init__(self) -> None:
        self._deeds: dict[str, Callable[[Evil], Awaitable[None]]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "terminate": self._terminate,
            "cut_store": self._cut_store,
            "cut_answers": self._cut_answers,
            "cut_nodes": self._cut_nodes,
            "cut_clients": self._cut_clients,
            "jump": self._jump,
            "slow_disk": self._slow_disk,
            "stall": self._stall,
            "restart": self._restart,
            "fail_over": self._fail_over,
            "migrate": self._migrate,
            "drain": self._drain,
            "rebalance": self._rebalance,
        }
        if not self.network.can_cut:
            for kind in ("cut_store", "cut_answers", "cut_nodes", "cut_clients", "fail_over"):
                self.skipped[kind] = "no network namespaces can be made here"
        if self.redis is None:
            for kind in ("cut_store", "cut_answers", "stall", "restart", "fail_over"):
                self.skipped[kind] = "the catalog is a file"

    def stop(self) -> None:
        """No new deed."""
        self._stop.set()

    async def run(self, source: DeedSource) -> None:
        """One lane."""
        for evil in source:
            if await self._stopped_within(evil.rest):
                return
            if evil.kind in self.skipped:
                continue
            where = self.seats[evil.node].name
            self.tell(f"{evil.kind} {where} {evil.seconds:.2f} s")
            self.counts[evil.kind] += 1
            await self._deeds[evil.kind](evil)

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _life(self) -> None:
        """Wait until the cluster has done something since the last kill."""
        deadline = time.monotonic() + CALM_SECONDS
        while self.shown() < self._next_kill and time.monotonic() < deadline and not self._stop.is_set():
            await asyncio.sleep(LIFE_SECONDS)
        self._next_kill = self.shown() + self.between

    async def _kill(self, evil: Evil) -> None:
        seat = self.seats[evil.node]
        await self._life()
        async with seat.busy:
            await seat.kill()
            await asyncio.sleep(evil.seconds if evil.dice < 0.3 else 0.0)
            await seat.start()

    async def _freeze(self, evil: Evil) -> None:
        seat = self.seats[evil.node]
        async with seat.busy:
            seat.freeze()
            try:
                await asyncio.sleep(evil.seconds)
            finally:
                seat.thaw()

    async def _terminate(self, evil: Evil) -> None:
        seat = self.seats[evil.node]
        async with seat.busy:
            await seat.terminate()
            await seat.start()

    async def _cut(self, machine: str, other: str, evil: Evil) -> None:
        self.network.cut(machine, other, both=evil.dice < 0.7)
        try:
            await asyncio.sleep(evil.seconds)
        finally:
            self.network.join(machine, other)

    async def _cut_store(self, evil: Evil) -> None:
        await self._cut(self.seats[evil.node].name, STORE, evil)

    async def _cut_answers(self, evil: Evil) -> None:
        """What the node asks is done; it does not hear of it until later."""
        assert self.redis is not None
        machine, node = self.redis.primary.name, self.seats[evil.node].name
        self.network.cut(machine, node, both=False)
        try:
            await asyncio.sleep(evil.seconds)
        finally:
            self.network.join(machine, node)

    async def _cut_nodes(self, evil: Evil) -> None:
        await self._cut(self.seats[evil.node].name, self.seats[evil.other].name, evil)

    async def _cut_clients(self, evil: Evil) -> None:
        await self._cut(self.seats[evil.node].name, CLIENTS, evil)

    async def _jump(self, evil: Evil) -> None:
        """A wall clock is set, by hours."""
        self.seats[evil.node].knobs.turn(wall_offset_us=int((evil.dice - 0.5) * 6 * HOUR_US))

    async def _slow_disk(self, evil: Evil) -> None:
        knobs = self.seats[evil.node].knobs
        knobs.turn(blob_pause_ms=int(400 * evil.dice))
        try:
            await asyncio.sleep(evil.seconds)
        finally:
            knobs.turn(blob_pause_ms=0)

    async def _stall(self, evil: Evil) -> None:
        assert self.redis is not None
        await self.redis.stall(min(evil.seconds, 3.0))

    async def _restart(self, evil: Evil) -> None:
        assert self.redis is not None
        await self.redis.restart(min(evil.seconds, 1.5))

    async def _fail_over(self, evil: Evil) -> None:
        assert self.redis is not None
        await self.redis.fail_over(min(evil.seconds, 1.5))

    async def _migrate(self, evil: Evil) -> None:
        """Some session, to some node or to the one that has the most room."""
        sessions = self.sessions()
        if sessions:
            session = sessions[int(evil.dice * len(sessions))]
            to = self.seats[evil.node].name if evil.seconds else ""
            await self._asked("migrate", session.migrate(to).result())

    async def _drain(self, evil: Evil) -> None:
        name = self.seats[evil.node].name
        await self._asked("drain", self.operator.nodes.drain(name).result())
        await asyncio.sleep(evil.seconds)
        await self._asked("undrain", insist(lambda: self.operator.nodes.undrain(name)))

    async def _rebalance(self, evil: Evil) -> None:
        await self._asked("rebalance", self.operator.nodes.rebalance().result())

    async def _asked(self, what: str, call: Awaitable[object]) -> None:
        """Do what an operator does, and note how it went: all may be refused or broken off while nodes die."""
        try:
            async with asyncio.timeout(MOVE_SECONDS):
                await call
        except RemoteError as error:
            self.outcomes[f"{what}: {error.reason or error.code}"] += 1
        except TimeoutError:
            self.outcomes[f"{what}: cancelled"] += 1
        else:
            self.outcomes[f"{what}: done"] += 1
