"""A state as large as a model's, and a store that stops in the middle of it: memory stays bounded, nothing is lost."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkpoint.parts import PartSpec
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.calls import AppendTokens
from forkpoint.statestore.chain import grid_hashes, root_hash
from forkpoint.statestore.checkpoint import CheckpointStore, SavedCheckpoint
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.open import open_blobs
from forkpoint.statestore.partsaver import SAVE_BYTES_MAX
from tests.support.redis_servers import RedisServerProcess, redis_server
from tests.support.store import MARKER, name, owned

PART_BYTES = 8 << 20
PARTS = 24
SPECS = [PartSpec(f"part.{number:03d}", "uint8", (PART_BYTES,)) for number in range(PARTS)]
STATM = Path("/proc/self/statm")


@pytest.fixture
def redis() -> Iterator[RedisServerProcess]:
    with redis_server("valkey") as server:
        yield server


def resident_bytes() -> int:
    """Memory of this process that is no file's."""
    _, resident, shared, *_ = STATM.read_text(encoding="ascii").split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def state() -> list[tuple[PartSpec, bytes]]:
    """Parts that no codec makes smaller, each another one."""
    noise = os.urandom(PART_BYTES)
    return [(spec, bytes([index]) * 64 + noise[64:]) for index, spec in enumerate(SPECS)]


async def save(catalog: Catalog, store: CheckpointStore, parts: list[tuple[PartSpec, bytes]]) -> SavedCheckpoint:
    tokens = tuple(range(16))
    await owned(catalog, "s")
    await catalog.append(AppendTokens(name("s"), 1, tokens))
    ((position, chain_hash),) = grid_hashes(root_hash(MARKER), tokens)[1:]
    return await store.save(
        session=name("s"),
        epoch=1,
        checkpoint="c",
        position=position,
        grid_position=position,
        chain_hash=chain_hash,
        numerics_ids=["n"],
        model_digest=MARKER.model_digest,
        tokenizer_digest=MARKER.tokenizer_digest,
        layout="layout",
        parts=parts,
    )


@pytest.mark.skipif(not STATM.exists(), reason="needs Linux's /proc")
async def test_a_state_on_its_way_to_a_redis_that_stops_takes_no_more_memory_than_the_gate_allows(
    redis: RedisServerProcess,
) -> None:
    catalog, blobs = MemoryCatalog(), open_blobs(redis.url("timeout=60"))
    await catalog.open(MARKER)
    await blobs.open()
    store, parts = CheckpointStore(catalog, blobs), state()
    before, most = resident_bytes(), 0
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        saving = group.create_task(save(catalog, store, parts))
        while not redis.command("DBSIZE"):
            await asyncio.sleep(0.005)
        redis.pause()
        for _ in range(40):
            await asyncio.sleep(0.05)
            most = max(most, resident_bytes())
        assert not saving.done(), "the server stopped in the middle"
        redis.resume()
    taken = most - before
    assert taken < 2 * SAVE_BYTES_MAX < PARTS * PART_BYTES, f"{taken >> 20} MiB beside a state of 192 MiB"
    seen = 0
    async for spec, data in store.load(saving.result().manifest, SPECS):
        assert bytes(data) == dict(parts)[spec]
        seen += 1
    assert seen == PARTS
    await blobs.close()


async def test_no_value_in_redis_is_larger_than_a_chunk(redis: RedisServerProcess) -> None:
    catalog, blobs = MemoryCatalog(), open_blobs(redis.url())
    await catalog.open(MARKER)
    await blobs.open()
    await save(catalog, CheckpointStore(catalog, blobs), state()[:2])
    keys = redis.command("KEYS", "*")
    assert isinstance(keys, list)
    lengths = [redis.command("STRLEN", key) for key in keys if redis.command("TYPE", key) == b"string"]
    assert len(lengths) >= 2 * PART_BYTES >> 20
    assert max(length for length in lengths if isinstance(length, int)) <= 1 << 20
    await blobs.close()
