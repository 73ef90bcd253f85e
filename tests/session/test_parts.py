"""The small parts by themselves: locks, leases, tails, tasks, seeds."""

import asyncio
import concurrent.futures
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from forkpoint.errors import NodeDrainingError, QueueFullError, SessionRelocatingError, StoreUnavailableError
from forkpoint.server.session import writers
from forkpoint.server.session.api import GenerateCall
from forkpoint.server.session.lease import DeathWatch, IncarnationLock, LeaseKeeper, lock_is_free
from forkpoint.server.session.live import TRIM_SLACK, LogTail
from forkpoint.server.session.owner import NameLocks
from forkpoint.server.session.presence import OwnCatalog, Renewal
from forkpoint.server.session.seeds import derive_seed, random_seed
from forkpoint.server.session.tasks import TaskOwner
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.records import Kind, LogSlice, NodeRow, NodeStatus, StoreMarker
from tests.support.hash_engine import HashEngine
from tests.support.session_site import MARKER, Running, Site, background, key, until


class HandClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall_us(self) -> int:
        return int(self.now * 1e6)


def row(counter: int, lock_path: str = "") -> NodeRow:
    return NodeRow("i-1", "n", "a", "x", counter, lock_path)


def test_a_lock_is_held_until_it_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "i.lock"
    lock = IncarnationLock.acquire(path)
    assert lock_is_free(path) is False
    with pytest.raises(BlockingIOError):
        IncarnationLock.acquire(path)
    lock.release(unlink=False)
    assert lock_is_free(path) is True
    again = IncarnationLock.acquire(path)
    again.release(unlink=True)
    again.release(unlink=True)
    assert lock_is_free(path) is None


def test_the_death_of_a_process_frees_its_lock_at_once(tmp_path: Path) -> None:
    path = tmp_path / "i.lock"
    program = (
        "import sys; from pathlib import Path\n"
        "from forkpoint.server.session.lease import IncarnationLock\n"
        "lock = IncarnationLock.acquire(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "held\n"
    watch = DeathWatch(HandClock(), 3.5)
    assert watch.is_dead(row(1, str(path))) is False
    process.kill()
    process.wait()
    assert watch.is_dead(row(1, str(path))) is True
    process.stdin.close()
    process.stdout.close()


class Looks:
    """A watch of patience 3.5 s that looks every quarter of a second, and what it looks at."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.watch = DeathWatch(self.clock, 3.5)
        self.own, self.renews, self.other = 1.0, True, row(5)
        self.other_renews = False

    def on(self, seconds: float) -> bool:
        """Go on for so long; whether the other is dead then."""
        for _ in range(round(seconds * 4)):
            self.clock.now += 0.25
            before, self.own = int(self.own), self.own + (0.25 if self.renews else 0)
            if self.other_renews and self.renews:
                self.other = replace(self.other, counter=self.other.counter + int(self.own) - before)
            self.look()
        return self.watch.is_dead(self.other)

    def look(self) -> None:
        mine = NodeRow("own", "o", "a", "x", int(self.own))
        self.watch.observe([mine, self.other], "own", self.clock.now)


def test_a_counter_that_stands_still_long_enough_is_death() -> None:
    looks = Looks()
    looks.look()
    assert looks.watch.is_dead(looks.other) is False, "seen for the first time"
    assert looks.on(3.25) is False
    assert looks.on(0.25) is True
    looks.other = row(6)
    assert looks.on(0.25) is False, "it moves again"
    assert looks.on(3.25) is False


def test_nobody_is_dead_while_the_store_takes_no_renewals_and_all_get_their_time_afterwards() -> None:
    looks = Looks()
    looks.other_renews = True
    looks.on(2)
    looks.renews = False
    assert looks.on(60) is False, "the own lease does not move either"
    looks.renews, looks.other_renews = True, False
    assert looks.on(3.25) is False, "the store is well again, and the other one may be about to renew"
    assert looks.on(1.5) is True


def test_a_store_that_takes_renewals_slowly_hides_no_death() -> None:
    looks = Looks()
    looks.renews = False
    seconds = 0.0
    while not looks.watch.is_dead(looks.other):
        looks.on(2.5)
        looks.own += 1
        seconds += 2.5
        assert seconds < 8


def test_who_was_stopped_judges_nobody_by_what_it_did_not_see() -> None:
    looks = Looks()
    looks.other_renews = True
    looks.on(2)
    looks.other_renews = False
    looks.clock.now += 3600
    looks.own += 1
    looks.look()
    assert looks.watch.is_dead(looks.other) is False
    assert looks.on(3.25) is False
    assert looks.on(0.25) is True


def test_who_is_not_registered_judges_nobody() -> None:
    looks = Looks()
    for _ in range(100):
        looks.clock.now += 0.25
        looks.watch.observe([looks.other], "own", looks.clock.now)
    assert looks.watch.is_dead(looks.other) is False


def test_a_held_lock_is_no_proof_of_life(tmp_path: Path) -> None:
    looks, path = Looks(), tmp_path / "i.lock"
    lock = IncarnationLock.acquire(path)
    looks.other = row(5, str(path))
    assert looks.on(3.5) is False
    looks.other = row(6, str(path))
    assert looks.on(0.25) is False, "its counter moved"
    assert looks.on(3.5) is True, "stopped: it holds its lock and renews nothing"
    lock.release(unlink=True)


def test_the_keeper_renews_in_its_own_thread_through_failures() -> None:
    threads: list[str] = []
    enough = threading.Event()

    def renew() -> None:
        threads.append(threading.current_thread().name)
        if len(threads) == 2:
            raise TimeoutError("slow store")
        if len(threads) == 3:
            raise OSError(24, "Too many open files")
        if len(threads) == 4:
            raise concurrent.futures.CancelledError
        if len(threads) == 5:
            enough.set()

    keeper = LeaseKeeper(renew, 0.01)
    keeper.start()
    assert enough.wait(10)
    keeper.stop()
    assert set(threads) == {"lease"}


def test_a_lease_catalog_that_does_not_open_is_closed_and_made_anew() -> None:
    made: list[MemoryCatalog] = []

    class Unopened(MemoryCatalog):
        async def open(self, marker: StoreMarker) -> None:
            if len(made) < 3:
                raise StoreUnavailableError("catalog", "locked")
            await super().open(marker)
            await self.register_node(node)

        async def renew_lease(self, incarnation: str, status: NodeStatus | None = None) -> int:
            if self in broken:
                raise StoreUnavailableError("catalog", "disk I/O error")
            return await super().renew_lease(incarnation, status)

        async def close(self) -> None:
            closed.append(self)

    def make() -> Catalog:
        made.append(Unopened())
        return made[-1]

    closed: list[MemoryCatalog] = []
    broken: list[MemoryCatalog] = []
    node = NodeRow("i", "n", "", "x")
    own = OwnCatalog(make, MARKER, Renewal(node, NodeStatus, lambda: None).renew)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            own.renew()
    own.renew()
    own.renew()
    assert (len(made), closed) == (3, made[:2])
    broken.append(made[-1])
    with pytest.raises(StoreUnavailableError):
        own.renew()
    own.renew()
    assert (len(made), closed) == (4, made[:3]), "one that broke later as well"
    own.close()
    assert closed == made


async def test_a_node_whose_own_connection_broke_gives_its_sessions_to_others(disk: Site) -> None:
    first = await disk.node(own_lease=True)
    await first.workflow()
    name = await first.session("s")
    await first.append(name, b"hello")
    second = await disk.node(own_lease=True)
    await asyncio.sleep(0.5)
    with pytest.raises(SessionRelocatingError):
        await second.append(name, b"!")
    for method in ("list_nodes", "commit_step", "append", "get_session"):
        first.faults.before[method] = StoreUnavailableError("catalog", "disk I/O error; open it again")
    async with asyncio.timeout(10):
        while True:
            try:
                await second.append(name, b"!")
                break
            except SessionRelocatingError:
                await asyncio.sleep(0.02)
    assert await second.log(name) == list(b"hello!")


async def test_a_node_taken_for_dead_registers_again(site: Site) -> None:
    node = await site.node()
    await node.catalog.remove_node(node.node.incarnation)
    async with asyncio.timeout(5):
        while not await node.node.list_nodes():
            await asyncio.sleep(0.01)


def test_a_tail_keeps_what_is_needed() -> None:
    tail = LogTail(10)
    tail.extend(tuple(range(5)), Kind.PROMPT)
    tail.extend((7,), Kind.GENERATED, (-0.5,))
    assert (tail.start, tail.end, tail.tokens(12, 15)) == (10, 16, (2, 3, 4))
    assert tail.slice(14, 16) == LogSlice(14, (4, 7), (Kind.PROMPT, Kind.GENERATED), (None, -0.5))
    tail.prepend(LogSlice(8, (8, 9, 0, 1), (Kind.PROMPT,) * 4, (None,) * 4))
    assert (tail.start, tail.tokens(8, 11)) == (8, (8, 9, 0))
    tail.prepend(LogSlice(9, (1,), (Kind.PROMPT,), (None,)))
    assert tail.start == 8
    with pytest.raises(IndexError):
        tail.prepend(LogSlice(1, (1,), (Kind.PROMPT,), (None,)))
    with pytest.raises(IndexError):
        tail.tokens(7, 9)
    tail.cut(12)
    assert (tail.start, tail.end) == (8, 12)
    tail.cut(3)
    assert (tail.start, tail.end) == (3, 3)


def test_a_tail_is_trimmed_when_it_is_worth_it() -> None:
    tail = LogTail(0)
    tail.extend(tuple(range(TRIM_SLACK + 100)), Kind.PROMPT)
    tail.trim(TRIM_SLACK)
    assert tail.start == 0
    tail.trim(TRIM_SLACK + 50)
    assert (tail.start, tail.token_ids[0]) == (TRIM_SLACK + 50, TRIM_SLACK + 50)


async def test_owned_tasks_outlive_their_callers_and_end_with_their_owner() -> None:
    owner = TaskOwner("n")
    await owner.start()
    done: list[str] = []

    async def work() -> str:
        await asyncio.sleep(0.02)
        done.append("work")
        return "result"

    caller = asyncio.get_running_loop().create_task(owner.run(work(), "work"))  # owner: this test
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await until(lambda: done == ["work"])

    async def fail() -> None:
        raise ValueError("as given")

    with pytest.raises(ValueError, match="as given"):
        await owner.run(fail(), "fail")
    waiting = asyncio.get_running_loop().create_task(owner.run(asyncio.sleep(60), "long"))  # owner: this test
    await asyncio.sleep(0)
    await owner.close()
    with pytest.raises(NodeDrainingError):
        await waiting
    with pytest.raises(NodeDrainingError):
        await owner.run(work(), "late")


async def test_locks_by_name_are_kept_only_while_used() -> None:
    locks = NameLocks()
    order: list[str] = []

    async def hold(name: str) -> None:
        async with locks.hold("key"):
            order.append(name)
            await asyncio.sleep(0)
            order.append(name)

    await asyncio.gather(hold("a"), hold("b"), hold("c"))
    assert order == ["a", "a", "b", "b", "c", "c"]
    assert locks._locks == {}


def test_seeds_are_signed_64_bit_and_derived_ones_are_fixed() -> None:
    assert all(-(2**63) <= random_seed() < 2**63 for _ in range(100))
    assert derive_seed(7, "child") == derive_seed(7, "child") != derive_seed(8, "child")
    assert len({derive_seed(-(2**63), str(n)) for n in range(1000)}) == 1000


async def test_a_queue_has_an_end(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "SESSION_QUEUE_MAX", 2)
    node: Running = await site.node(HashEngine(slots=1))
    await node.workflow()
    node.engine.step_pause = 0.005
    readers = []
    for number in range(3):
        name = await node.session(f"s{number}")
        await node.append(name, b"x")
        readers.append(node.reading(GenerateCall(name, key(f"g{number}"), max_tokens=20)))
        await until(lambda: readers[0][0].tokens != [])
    await until(lambda: all(read.started is not None for read, _ in readers))
    name = await node.session("late")
    await node.append(name, b"x")
    with pytest.raises(QueueFullError):
        await node.generate(GenerateCall(name, key("late"), max_tokens=3))
    await asyncio.gather(*(task for _, task in readers))
    assert (await node.generate(GenerateCall(name, key("late"), max_tokens=3))).tokens


async def test_a_caller_whose_work_is_cut_off_before_it_began_is_answered() -> None:
    tasks, began = TaskOwner("n"), asyncio.Event()
    await tasks.start()

    async def work() -> None:
        began.set()

    caller = background(tasks.run(work(), "work"))
    await asyncio.sleep(0)
    for task in tasks._tasks:
        task.cancel()  # as `close` does
    async with asyncio.timeout(5):
        with pytest.raises(NodeDrainingError):
            await caller
    assert not began.is_set()
    await tasks.close()
