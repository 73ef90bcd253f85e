"""Sessions whose checkpoints lie in several tiers, or on a Redis that stalls, loses a chunk or dies."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from forkpoint.ids import SessionName
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import GenerateCall
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.lru import HostMemoryBlobs
from forkpoint.statestore.records import CheckpointPolicy
from forkpoint.statestore.redis.blobheader import BlobHeader, BlobKeys
from forkpoint.statestore.redis.blobs import RedisBlobs
from forkpoint.statestore.redis.url import parse_redis_url
from forkpoint.statestore.tiers import Role, Tier, TieredBlobs
from tests.support.hash_engine import continuation
from tests.support.redis_servers import RedisServerProcess, redis_server
from tests.support.session_site import Running, Site, key, until

GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)
PROMPT = [*list(bytes(range(97, 117))) * 12, 97, 98, 99]
"""243 tokens: at 240 four pages, the last one partial."""


@pytest.fixture
def server() -> Iterator[RedisServerProcess]:
    with redis_server("valkey", "--appendonly", "yes", "--appendfsync", "always") as running:
        yield running


@pytest.fixture
async def redis_site(server: RedisServerProcess, tmp_path: Path) -> AsyncIterator[Site]:
    """A site whose blobs are on a Redis that is given up after a quarter of a second."""
    site = Site(tmp_path, "memory")
    site.blobs = RedisBlobs(parse_redis_url("blobs", server.url("timeout=0.25&connect_timeout=0.25&connections=2")))
    await site.blobs.open()
    yield site
    await site.close()
    await site.blobs.close()


async def begin(site: Site, every: int) -> tuple[Running, SessionName]:
    node = await site.node()
    await node.workflow()
    return node, await node.session("s", policy=CheckpointPolicy(every))


async def test_parts_from_several_tiers_make_one_state(tmp_path: Path) -> None:
    site = Site(tmp_path, "memory")
    tiers: list[BlobStore] = [HostMemoryBlobs(1 << 20), FileBlobs(tmp_path / "local"), MemoryBlobs()]
    stack = TieredBlobs([Tier("host", tiers[0], Role.CACHE), Tier("local", tiers[1]), Tier("shared", tiers[2])])
    site.blobs = stack
    node, name = await begin(site, 0)
    await node.append(name, PROMPT)
    view = await node.node.create_checkpoint(name, "c", None)
    await node.node.pause(name, None)
    await stack.settle()
    assert len(view.parts) == 5
    for number, part in enumerate(view.parts):
        for index, tier in enumerate(tiers):
            if index != number % 3:
                await tier.delete([part.blake3])
    result = await node.node.resume(name, None)
    assert (result.restored_tokens, result.replayed_tokens) == (240, 3)
    read = await node.generate(GenerateCall(name, key("g"), max_tokens=30))
    assert read.tokens == continuation(PROMPT, 30, GREEDY)[0]
    await stack.settle()
    for part in view.parts:
        assert "local" in await stack.where(part.blake3) or await tiers[0].has(part.blake3)
    await site.close()
    await stack.close()


async def test_decoding_goes_on_while_redis_is_stalled_or_dead_and_checkpoints_come_back_with_it(
    redis_site: Site, server: RedisServerProcess
) -> None:
    node, name = await begin(redis_site, 16)
    counters = node.node.counters
    await node.append(name, PROMPT)
    await until(lambda: counters.checkpoints_written > 0)
    for turn, stop in enumerate((server.pause, server.kill)):
        failed, written = counters.checkpoints_failed, counters.checkpoints_written
        log = await node.log(name)
        await asyncio.to_thread(stop)
        read = await node.generate(GenerateCall(name, key(f"g{turn}"), max_tokens=120))
        assert read.tokens == continuation(log, 120, GREEDY)[0]
        await until(lambda failed=failed: counters.checkpoints_failed > failed)  # type: ignore[misc]
        await asyncio.to_thread(server.resume if stop == server.pause else server.start)
        await node.append(name, [98] * 40)
        await until(lambda written=written: counters.checkpoints_written > written)  # type: ignore[misc]
    log = await node.log(name)
    await node.node.pause(name, None)
    other = await redis_site.node()
    result = await other.node.resume(name, None)
    assert result.restored_tokens > len(log) - 64
    read = await other.generate(GenerateCall(name, key("end"), max_tokens=10))
    assert read.tokens == continuation(log, 10, GREEDY)[0]


async def test_a_checkpoint_that_lost_a_chunk_is_passed_over_for_an_older_one(
    redis_site: Site, server: RedisServerProcess
) -> None:
    node, name = await begin(redis_site, 0)
    await node.append(name, PROMPT[:100])
    await node.node.create_checkpoint(name, "old", None)
    await node.append(name, PROMPT[100:])
    view = await node.node.create_checkpoint(name, "new", None)
    await node.node.pause(name, None)
    keys, digest = BlobKeys("default"), view.parts[-1].blake3
    value = server.command("GET", keys.header(digest))
    header = BlobHeader.unpack(value if isinstance(value, bytes) else b"")
    assert header is not None
    server.command("DEL", keys.chunks(digest, header)[0])
    other = await redis_site.node()
    result = await other.node.resume(name, None)
    assert (result.restored_tokens, other.node.counters.fallback_restores) == (96, 1)
    read = await other.generate(GenerateCall(name, key("g"), max_tokens=10))
    assert read.tokens == continuation(PROMPT, 10, GREEDY)[0]
