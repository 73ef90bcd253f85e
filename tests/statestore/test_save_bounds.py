"""Saving takes bounded memory beside the states themselves, and a small state waits for no large one."""

import asyncio
import os

import pytest

from forkpoint.parts import PartSpec
from forkpoint.statestore import partsaver
from forkpoint.statestore.blobs import Buffer, size_of
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.memory.blobs import MemoryBlobs
from tests.statestore.test_checkpoint_store import Store

PART_BYTES = 10_000


class Slow(MemoryBlobs):
    """Notes how many bytes are being put at once, and by which part; each put takes a few turns of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = self.most = 0
        self.pieces: list[tuple[Buffer, ...]] = []

    async def put(self, digest: str, *pieces: Buffer) -> bool:
        self.inside += size_of(pieces)
        self.most = max(self.most, self.inside)
        self.pieces.append(pieces)
        await asyncio.sleep(0.001)
        self.inside -= size_of(pieces)
        return await super().put(digest, *pieces)


def state(count: int, nbytes: int = PART_BYTES) -> list[tuple[PartSpec, Buffer]]:
    return [(PartSpec(f"part.{index}", "uint8", (nbytes,)), os.urandom(nbytes)) for index in range(count)]


async def store_over(blobs: MemoryBlobs) -> Store:
    store = await Store().fill()
    store.checkpoints = CheckpointStore(store.catalog, blobs)
    return store


async def test_no_more_bytes_are_in_flight_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partsaver, "SAVE_BYTES_MAX", 5 * PART_BYTES)
    blobs = Slow()
    store = await store_over(blobs)
    async with asyncio.TaskGroup() as group:
        for index in range(3):
            group.create_task(store.save(f"c{index}", 50 - 16 * index, parts=state(30)))
    assert 3 * PART_BYTES < blobs.most <= 5 * (PART_BYTES + 100)
    assert len([digest async for digest in blobs.digests()]) == 90


async def test_a_small_state_is_saved_while_a_large_one_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partsaver, "SAVE_BATCHES_MAX", 4)
    blobs = Slow()
    store = await store_over(blobs)
    async with asyncio.TaskGroup() as group:
        large = group.create_task(store.save("large", 50, parts=state(200)))
        while not blobs.pieces:
            await asyncio.sleep(0)
        await store.save("small", 20, parts=state(3))
        assert not large.done()
        assert len(blobs.pieces) < 100


async def test_what_does_not_compress_goes_to_the_backend_from_the_callers_memory() -> None:
    blobs = Slow()
    store = await store_over(blobs)
    (spec, noise), *_ = state(1, 1 << 20)
    await store.save(parts=[(spec, noise)])
    ((header, body),) = blobs.pieces
    assert isinstance(body, memoryview) and body.obj is noise
    assert len(header) == 32
