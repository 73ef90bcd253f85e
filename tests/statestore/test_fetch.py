"""Fetching ahead: in order, bounded, never waiting for a whole batch, and nothing left running."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest

from forkpoint.errors import BlobMissingError, StoreUnavailableError
from forkpoint.parts import PartSpec
from forkpoint.statestore import fetch
from forkpoint.statestore.codec import digest_of, encode
from forkpoint.statestore.fetch import Fetched, fetch_ahead, fetch_groups
from forkpoint.statestore.manifest import ManifestPart
from forkpoint.statestore.memory.blobs import MemoryBlobs


class SlowBlobs(MemoryBlobs):
    """Blobs whose reads wait to be let go, one by one or all."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[str, asyncio.Event] = {}
        self.begun: list[str] = []
        self.running = 0

    async def get(self, digest: str) -> bytes:
        self.begun.append(digest)
        self.running += 1
        try:
            await self.gates[digest].wait()
            return await super().get(digest)
        finally:
            self.running -= 1


async def stored(count: int, nbytes: int = 8) -> tuple[SlowBlobs, list[ManifestPart]]:
    blobs, parts = SlowBlobs(), []
    for index in range(count):
        raw = index.to_bytes(nbytes, "big")
        digest = digest_of(raw)
        await blobs.put(digest, encode(raw))
        blobs.gates[digest] = asyncio.Event()
        parts.append(ManifestPart(PartSpec(f"part.{index}", "uint8", (nbytes,)), digest))
    return blobs, parts


async def begun(blobs: SlowBlobs, count: int) -> None:
    """Wait until so many reads have begun, then see that it stays at that."""
    async with asyncio.timeout(20):
        while len(blobs.begun) < count:
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(blobs.begun) == count


async def test_as_one_part_is_taken_another_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "AHEAD_PARTS_MAX", 4)
    blobs, parts = await stored(9)
    taken = []
    async with aclosing(fetch_ahead(blobs, parts)) as fetched:
        for index in range(9):
            blobs.gates[parts[index].digest].set()
            part, raw = await anext(fetched)
            await begun(blobs, min(9, index + 1 + 4))
            taken.append((part, int.from_bytes(raw if not isinstance(raw, Exception) else b"", "big")))
    assert taken == [(part, index) for index, part in enumerate(parts)]


async def test_parts_come_in_order_whichever_is_there_first() -> None:
    blobs, parts = await stored(9)
    async with aclosing(fetch_ahead(blobs, parts)) as fetched:
        for part in reversed(parts):
            blobs.gates[part.digest].set()
        assert [part.spec.name async for part, _ in fetched] == [f"part.{index}" for index in range(9)]


async def test_bytes_ahead_are_bounded_and_a_part_larger_than_the_bound_still_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetch, "AHEAD_BYTES_MAX", 20)
    blobs, parts = await stored(6)
    large = (7).to_bytes(50, "big")
    await blobs.put(digest_of(large), encode(large))
    blobs.gates[digest_of(large)] = asyncio.Event()
    parts.insert(3, ManifestPart(PartSpec("large", "uint8", (50,)), digest_of(large)))
    async with aclosing(fetch_ahead(blobs, parts)) as fetched, asyncio.TaskGroup() as group:
        group.create_task(begun(blobs, 2))
        first = group.create_task(anext(fetched))
        await begun(blobs, 2)
        first.cancel()
    async with aclosing(fetch_ahead(blobs, parts)) as fetched:
        for gate in blobs.gates.values():
            gate.set()
        most, names = 0, []
        async for part, _ in fetched:
            names.append(part.spec.name)
            most = max(most, blobs.running)
    assert names == ["part.0", "part.1", "part.2", "large", "part.3", "part.4", "part.5"]
    assert most <= 2


async def test_closing_early_leaves_no_read_behind() -> None:
    blobs, parts = await stored(9)
    blobs.gates[parts[0].digest].set()
    async with aclosing(fetch_ahead(blobs, parts)) as fetched:
        await anext(fetched)
        assert blobs.running > 0
    assert blobs.running == 0


async def test_a_cancelled_reader_leaves_no_read_behind() -> None:
    blobs, parts = await stored(9)

    async def read() -> None:
        async with aclosing(fetch_ahead(blobs, parts)) as fetched:
            await anext(fetched)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(read())
        await begun(blobs, 9)
        task.cancel()
    assert blobs.running == 0


async def test_a_missing_part_is_an_answer_and_a_store_out_of_reach_an_error() -> None:
    blobs, parts = await stored(3)
    for gate in blobs.gates.values():
        gate.set()
    blobs._frames.pop(parts[1].digest)
    found = [raw async for _, raw in fetch_ahead(blobs, parts)]
    assert isinstance(found[1], BlobMissingError)
    assert [isinstance(raw, Exception) for raw in found] == [False, True, False]
    await blobs.close()
    with pytest.raises(StoreUnavailableError):
        _ = [raw async for _, raw in fetch_ahead(blobs, parts)]


async def first_last(blobs: SlowBlobs, groups: AsyncGenerator[list[Fetched], None]) -> list[str]:
    """The first group's parts, when the first part is there only after all others that were begun and may be."""
    first = asyncio.get_running_loop().create_task(anext(groups))  # owner: this function
    async with asyncio.timeout(20):
        while not blobs.begun or blobs.running > sum(not gate.is_set() for gate in blobs.gates.values()):
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    blobs.gates[blobs.begun[0]].set()
    return [part.spec.name for part, _ in await first]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is decoded at once, not some time later in a thread."""

    async def run(_: object, work: Callable[[], object]) -> object:
        return work()

    monkeypatch.setattr(fetch, "run_in", run)


@pytest.mark.usefixtures("at_once")
async def test_parts_that_are_there_come_together_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "GROUP_BYTES_MAX", 24)
    blobs, parts = await stored(9)
    for part in (*parts[1:5], parts[6]):
        blobs.gates[part.digest].set()
    async with aclosing(fetch_groups(blobs, parts)) as groups:
        assert await first_last(blobs, groups) == ["part.0", "part.1", "part.2"], "three of eight bytes"
        assert len(await anext(groups)) == 2, "the next one is not there yet"
        blobs.gates[parts[5].digest].set()
        assert len(await anext(groups)) == 2
        for gate in blobs.gates.values():
            gate.set()
        assert sum([len(group) async for group in groups]) == 2


@pytest.mark.usefixtures("at_once")
async def test_what_the_caller_has_counts_as_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "AHEAD_BYTES_MAX", 32)
    blobs, parts = await stored(9)
    for part in parts[1:]:
        blobs.gates[part.digest].set()
    async with aclosing(fetch_groups(blobs, parts)) as groups:
        assert len(await first_last(blobs, groups)) == 4
        await begun(blobs, 4)
        await anext(groups)
        await begun(blobs, 8)
