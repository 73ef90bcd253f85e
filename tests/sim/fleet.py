"""The nodes: each seat holds one process after another, with an engine and a link to the store of its own."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from forkpoint.errors import ForkpointError
from forkpoint.server.session.lease import LeaseKeeper
from forkpoint.server.session.node import Node
from forkpoint.server.session.options import NodeOptions
from forkpoint.server.session.presence import Presence, Renewal
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.election import Election
from forkpoint.statestore.gc import Collector, CollectorOptions
from forkpoint.statestore.retention import RetentionPolicy
from tests.sim.link import Link, Weather
from tests.sim.peers import Roads, SimPeers
from tests.sim.process import Condition, Process
from tests.sim.store import START_US, SimStore
from tests.sim.trace import Trace
from tests.support.hash_engine import ByteCodec, HashEngine
from tests.support.session_site import MARKER

OPTIONS: Final = NodeOptions(
    node="n",
    checkpoint_every_tokens=32,
    prefill_chunk_tokens=40,
    slice_tokens=24,
    lease_renew_seconds=0.15,
    lease_ttl_seconds=0.5,
    lease_skew_seconds=0.05,
    watch_seconds=0.05,
    recovery_rank_seconds=0.1,
    recovery_look_seconds=1.0,
    recovery_poll_seconds=0.2,
    sweep_seconds=0.7,
    retry_first_seconds=0.02,
    retry_most_seconds=0.2,
    shutdown_seconds=2.0,
)
DRIFT: Final = 0.02
"""A node's monotonic clock runs this much faster or slower at most."""
HOUR_US: Final = 3_600_000_000


class HiccupError(RuntimeError):
    """An engine that fails one step; a client sees an internal error."""


class SkewedClock:
    """A machine's own clocks: wall time off by up to an hour, monotonic time with a drift."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rng: random.Random) -> None:
        self._loop = loop
        self._rate = 1 + rng.uniform(-DRIFT, DRIFT)
        self.wall_offset_us = rng.randint(-HOUR_US, HOUR_US)

    def monotonic(self) -> float:
        return self._loop.time() * self._rate

    def wall_us(self) -> int:
        return START_US + self.wall_offset_us + int(self._loop.time() * 1e6)


class TaskKeeper(LeaseKeeper):
    """Renews from a task: the simulation has no threads. Like the thread it stops with its process."""

    def __init__(self, presence: "SimPresence", renewal: Renewal, interval: float) -> None:
        super().__init__(lambda: None, interval)
        self._presence = presence
        self._renewal = renewal
        self._seconds = interval
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._renew_again_and_again())  # owner: join awaits it

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def join(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _renew_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            try:
                await self._renewal.renew(self._presence.catalog)
            except ForkpointError:
                continue  # the next one is tried


class SimPresence(Presence):
    """Keeps the lease without a thread."""

    @property
    def catalog(self) -> Catalog:
        """The node's own connection."""
        return self._core.catalog

    def make_keeper(self, renewal: Renewal) -> LeaseKeeper:
        return TaskKeeper(self, renewal, self._core.options.lease_renew_seconds)


class Seat:
    """A place for a node: its name stays, processes come and go."""

    def __init__(self, name: str, store: SimStore, weather: Weather, rng: random.Random, trace: Trace) -> None:
        self.name = name
        self._store = store
        self._weather = weather
        self._rng = rng
        self._trace = trace
        self.process: Process | None = None
        self.node: Node | None = None
        self.engine: HashEngine | None = None
        self.link: Link | None = None
        self.clock: SkewedClock | None = None
        self.serves = False
        self.leaving = False
        self._starting = False
        self.neighbours: Sequence[Seat] = ()
        """All seats of the world."""
        self.roads = Roads()
        self.collects = True
        self.collections = 0
        self._collecting: asyncio.Task[None] | None = None
        self.graveyard: list[tuple[Process, Node]] = []

    @property
    def alive(self) -> bool:
        """Whether a process is there that serves, or will when it is let go on."""
        return self.serves and self.process is not None and self.process.condition is not Condition.DEAD

    async def start(self) -> None:
        """A new incarnation, where there is none; tries again until the store takes it."""
        if self._starting or self.alive:
            return
        self._starting = True
        try:
            await self._start()
        finally:
            self._starting = False

    async def _start(self) -> None:
        while True:
            process = self.process = Process(self.name)
            boot = process.spawn(self._boot(process))
            if not await process.ends(boot):
                continue  # killed while it started
            if boot.exception() is None:
                self.serves = True
                self._trace.note("started", self.name)
                return
            if not isinstance(boot.exception(), ForkpointError):
                boot.result()
            self.kill()
            await asyncio.sleep(self._rng.uniform(0.01, 0.1))

    async def _boot(self, process: Process) -> None:
        rng = self._rng
        self.link = Link(self._store, process, self._weather, rng)
        self.engine = HashEngine(slots=rng.randint(2, 5), pages=rng.randint(16, 40))
        self.clock = SkewedClock(asyncio.get_running_loop(), rng)
        options = replace(
            OPTIONS,
            node=self.name,
            address=f"{self.name}:1",
            checkpoint_every_tokens=rng.choice((16, 32, 64)),
            checkpoint_on_turn_end=rng.random() < 0.3,
            prefill_chunk_tokens=rng.choice((16, 40)),
        )
        store = CheckpointStore(self.link.catalog, self.link.blobs)
        self.node = Node(
            self.link.catalog,
            store,
            self.engine,
            ByteCodec(),
            options,
            MARKER,
            self.clock,
            presence=SimPresence,
            peers=SimPeers(self.name, process, self.neighbours, self.roads, self._weather, rng),
        )
        self.link.caller = self.node.incarnation
        await self.node.start()
        if self.collects:
            self._collecting = process.spawn(self._collect(self.node, self.link, self.clock))

    async def _collect(self, node: Node, link: Link, clock: SkewedClock) -> None:
        """Collect garbage, much more eagerly than a server would."""
        rng = self._rng
        options = CollectorOptions(RetentionPolicy(2, 0), grace_seconds=rng.choice((0.0, 0.2)))
        collector = Collector(link.catalog, link.blobs, options, clock, node.incarnation)
        collector.election = Election(link.catalog, link.blobs.tier, node.incarnation, clock, ttl_seconds=0.6)
        while True:
            await asyncio.sleep(rng.uniform(0.05, 0.4))
            try:
                async with aclosing(collector.collect()) as reports:
                    async for report in reports:
                        if report.stopped:
                            raise AssertionError(f"{self.name} can't collect: {report.stopped}")
                self.collections += 1
            except ForkpointError as error:
                self._trace.note(self.name, "collects", error)

    def kill(self) -> None:
        """As SIGKILL."""
        if self.process is not None and self.process.condition is not Condition.DEAD:
            self._trace.note("killed", self.name)
            self.process.kill()
            if self.node is not None:
                self.graveyard.append((self.process, self.node))
        self.serves = False
        self.node = None

    async def stop(self) -> None:
        """As SIGTERM; the engine must have everything back."""
        node, process, engine = self.node, self.process, self.engine
        assert node is not None and process is not None and engine is not None
        self._trace.note("stopping", self.name)
        self.leaving = True
        if self._collecting is not None:
            self._collecting.cancel()
        leaving = process.spawn(node.stop())
        ended = await process.ends(leaving)
        self.leaving = False
        if not ended:
            return
        leaving.result()
        self.serves = False
        assert engine.sequences == {}, f"{self.name}: the engine holds sequences that nobody has"
        self._trace.note("stopped", self.name)
        process.severed = True

    def freeze(self) -> None:
        """As SIGSTOP."""
        if self.process is not None and self.process.condition is Condition.RUNNING:
            self._trace.note("frozen", self.name)
            self.process.condition = Condition.STOPPED

    def thaw(self) -> None:
        """As SIGCONT."""
        if self.process is not None and self.process.condition is Condition.STOPPED:
            self._trace.note("thawed", self.name)
            self.process.condition = Condition.RUNNING
            loop = asyncio.get_running_loop()
            loop.release(self.process)  # type: ignore[attr-defined]

    async def bury(self) -> None:
        """After the run: end what killed processes left in this one. Their links lead nowhere."""
        loop = asyncio.get_running_loop()
        for process, node in self.graveyard:
            process.condition = Condition.RUNNING
            loop.release(process)  # type: ignore[attr-defined]
            for task in list(process.tasks):
                task.cancel()
            await process.ends(process.spawn(node.abandon()))
