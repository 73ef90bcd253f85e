"""A collector that dies at any of its calls, before or after its effect: the next one finishes, and nothing is lost."""

import inspect
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.gc import Collector, CollectorOptions
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from tests.support.collecting import EAGER, POLICY, Yard, finish
from tests.support.store import MARKER, ManualClock, name


class Died(Exception):
    """The process is gone."""


class Mortal:
    """A port whose calls count down to the end of the process; `late`: it comes after the effect."""

    def __init__(self, inner: object, life: "Life") -> None:
        self._inner = inner
        self._life = life

    def __getattr__(self, method: str) -> Any:
        attribute = getattr(self._inner, method)
        if not callable(attribute):
            return attribute
        act = cast(Callable[..., Any], attribute)
        if inspect.isasyncgenfunction(attribute):

            async def listing(*args: Any) -> AsyncIterator[Any]:
                self._life.step(method)
                async for item in act(*args):
                    yield item

            return listing

        async def call(*args: Any, **kwargs: Any) -> Any:
            if not self._life.late:
                self._life.step(method)
                return await act(*args, **kwargs)
            result = await act(*args, **kwargs)
            self._life.step(method)
            return result

        return call


class Life:
    """So many calls, then Died."""

    def __init__(self, calls: int, late: bool) -> None:
        self.left = calls
        self.late = late
        self.methods: list[str] = []

    def step(self, method: str) -> None:
        self.methods.append(method)
        if self.left == 0:
            raise Died(method)
        self.left -= 1


async def filled(catalog: Catalog, blobs: BlobStore, clock: ManualClock) -> Yard:
    """Something of everything that a collection takes and leaves."""
    yard = Yard(catalog, blobs, clock)
    await catalog.open(MARKER)
    await blobs.open()
    await yard.register("node")
    await yard.session()
    for grid in (16, 64, 80, 96, 128):
        await yard.save("s", grid)
    await yard.fork("s", "child", 70)
    await yard.session("gone", tokens=64)
    await yard.save("gone", 48)
    await catalog.delete_session(name("gone"), purge_us=0)
    await blobs.put("ab" * 32, b"left over")
    return yard


def mortal(yard: Yard, life: Life, options: CollectorOptions = EAGER) -> Collector:
    catalog, blobs = cast(Catalog, Mortal(yard.catalog, life)), cast(BlobStore, Mortal(yard.blobs, life))
    return Collector(catalog, blobs, options, yard.clock, "mortal")


async def survives(yard: Yard, late: bool, calls: int) -> bool:
    """Let a collector die after so many calls, check what it left, and let another one finish. Whether it died."""
    life = Life(calls, late)
    try:
        await finish(mortal(yard, life))
    except Died:
        died = True
    else:
        died = False
    assert await yard.missing() == []
    yard.clock.now_us += 60_000_000
    condemned = await yard.catalog.list_condemned(yard.blobs.tier, "", 99)
    assert len(condemned) <= 4
    await yard.collect(yard.collector(holder="heir"))
    assert await yard.missing() == []
    assert await yard.garbage() == set()
    assert await yard.catalog.list_condemned(yard.blobs.tier, "", 9) == []
    assert await yard.rows() == {"s/c64", "s/c96", "s/c128"}
    await yard.save("s", 80, "again")
    await yard.save("s", 16, "too")
    assert await yard.missing() == []
    return died


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
async def test_a_collector_may_die_at_every_call(late: bool) -> None:
    calls = 0
    while True:
        clock = ManualClock()
        yard = await filled(MemoryCatalog(clock), MemoryBlobs(), clock)
        if not await survives(yard, late, calls):
            break
        calls += 1
    assert calls > 30


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("last", ["fence", "condemn", "delete", "absolve", "remove_manifest", "drop_checkpoints"])
async def test_a_collector_of_files_may_die_at_every_write(tmp_path: Path, late: bool, last: str) -> None:
    clock = ManualClock()
    catalog = SqliteCatalog(tmp_path / "catalog.sqlite", clock, synchronous="OFF")
    blobs = FileBlobs(tmp_path / "blobs")
    yard = await filled(catalog, blobs, clock)
    trial = Life(1 << 30, late)
    dry = Yard(MemoryCatalog(clock), MemoryBlobs(), clock)
    await finish(mortal(await filled(dry.catalog, dry.blobs, clock), trial))
    assert await survives(yard, late, trial.methods.index(last))
    await catalog.close()
    await blobs.close()


async def test_a_collection_that_its_caller_gives_up_is_finished_later() -> None:
    clock = ManualClock()
    yard = await filled(MemoryCatalog(clock), MemoryBlobs(), clock)
    steps = len([report async for report in yard.collector(holder="whole").collect()])
    for upto in range(1, steps):
        yard = await filled(MemoryCatalog(clock), MemoryBlobs(), clock)
        collector = yard.collector(CollectorOptions(POLICY, grace_seconds=0))
        run = collector.collect()
        for _ in range(upto):
            await anext(run)
        await run.aclose()
        assert await yard.missing() == []
        await finish(collector)
        assert await yard.garbage() == set()
        assert await yard.rows() == {"s/c64", "s/c96", "s/c128"}
