"""Servers that blobs lie on: killed, restarted, full, stalled, silent, or replaced by their replica."""

import asyncio
import os

import pytest

from forkpoint.errors import BlobMissingError, StoreFullError, StoreUnavailableError
from forkpoint.statestore.codec import digest_of
from forkpoint.statestore.records import Durability
from forkpoint.statestore.redis.blobs import RedisBlobs
from forkpoint.statestore.redis.url import parse_redis_url
from tests.statestore.test_redis_blobs import CHUNK, DIGEST, FRAME, OTHER, opened
from tests.support.redis_servers import RedisServerProcess, redis_server
from tests.support.redis_stores import products


def replicas(server: RedisServerProcess) -> int:
    """Replicas that are in step."""
    info = server.command("INFO", "replication")
    assert isinstance(info, dict)
    online = [value for key, value in info.items() if str(key).startswith("slave") and isinstance(value, dict)]
    return sum(value.get("state") == "online" for value in online)


async def test_what_a_replica_confirmed_is_there_when_it_takes_over() -> None:
    with redis_server("valkey") as primary, redis_server("valkey") as replica:
        replica.command("REPLICAOF", "127.0.0.1", primary.port)
        async with asyncio.timeout(30):
            while replicas(primary) < 1:
                await asyncio.sleep(0.05)
        frames = {digest_of(bytes([index])): os.urandom(2 * CHUNK + index) for index in range(8)}
        query = "wait=1&wait_ms=5000&durability=replicated&timeout=20"
        async with opened(primary, query) as blobs:
            assert blobs.durability is Durability.REPLICATED
            await asyncio.gather(*(blobs.put(digest, frame) for digest, frame in frames.items()))
            async with opened(primary, query) as other:
                assert await other.has(next(iter(frames))), "confirmed again for whoever did not write it"
        primary.kill()
        replica.command("REPLICAOF", "NO", "ONE")
        async with opened(replica) as blobs:
            for digest, frame in frames.items():
                assert await blobs.get(digest) == frame


@pytest.mark.parametrize("product", products())
async def test_a_server_that_is_killed_and_started_again_has_every_blob_that_it_acknowledged(product: str) -> None:
    with redis_server(product, "--appendonly", "yes", "--appendfsync", "always") as server:
        async with opened(server, "timeout=2&connect_timeout=0.5") as blobs:
            acked, failed = dict[str, bytes](), 0
            for round_number in range(3):
                async with asyncio.TaskGroup() as group:
                    frames = [os.urandom(2 * CHUNK + index) for index in range(12)]
                    tasks = {digest_of(f): (f, group.create_task(outcome(blobs, digest_of(f), f))) for f in frames}
                    while sum(task.done() for _, task in tasks.values()) < 4:
                        await asyncio.sleep(0)
                    server.kill()
                for digest, (frame, task) in tasks.items():
                    if task.result() is None:
                        acked[digest] = frame
                    else:
                        failed += 1
                assert isinstance(await outcome(blobs, DIGEST, FRAME), StoreUnavailableError)
                await asyncio.to_thread(server.start)
                for digest, frame in acked.items():
                    assert await blobs.has(digest)
                    assert await blobs.get(digest) == frame
                assert await blobs.put(digest_of(bytes([round_number])), FRAME), "it works again by itself"
            assert len(acked) >= 12 and failed
            for digest in [digest async for digest in blobs.digests()]:
                await blobs.get(digest)
            assert await blobs.self_check() == []


async def outcome(blobs: RedisBlobs, digest: str, frame: bytes) -> StoreUnavailableError | None:
    try:
        await blobs.put(digest, frame)
    except StoreUnavailableError as error:
        return error
    return None


async def test_a_server_that_lost_all_it_had_says_so_and_takes_blobs_again() -> None:
    with redis_server("valkey") as server:
        async with opened(server) as blobs:
            await blobs.put(DIGEST, FRAME)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            assert not await blobs.has(DIGEST)
            with pytest.raises(BlobMissingError):
                await blobs.get(DIGEST)
            assert await blobs.put(DIGEST, FRAME)


async def test_a_full_server_says_so_and_takes_blobs_again_once_there_is_room() -> None:
    with redis_server("valkey", "--maxmemory", "6mb") as server:
        async with opened(server) as blobs:
            await blobs.put(OTHER, FRAME)
            large = os.urandom(8 << 20)
            with pytest.raises(StoreFullError, match="maxmemory"):
                await blobs.put(DIGEST, large)
            assert not await blobs.has(DIGEST)
            assert await blobs.get(OTHER) == FRAME
            server.command("CONFIG", "SET", "maxmemory", "64mb")
            assert await blobs.put(DIGEST, large)
            assert await blobs.get(DIGEST) == large


async def test_a_stalled_server_costs_its_callers_a_timeout_and_nobody_else_anything() -> None:
    with redis_server("valkey") as server:
        await stall(server)


async def stall(server: RedisServerProcess) -> None:
    async with opened(server, "timeout=0.5&connect_timeout=0.5&connections=2") as blobs:
        await blobs.put(OTHER, FRAME)
        server.pause()
        try:
            ticks = 0
            async with asyncio.TaskGroup() as group:
                frame = os.urandom(64 * CHUNK)
                tasks = [group.create_task(outcome(blobs, digest_of(bytes([i])), frame)) for i in range(4)]
                while not all(task.done() for task in tasks):
                    await asyncio.sleep(0.001)
                    ticks += 1
            assert all(isinstance(task.result(), StoreUnavailableError) for task in tasks)
            assert ticks > 50, "the loop went on"
        finally:
            server.resume()
        assert await blobs.put(DIGEST, FRAME)
        assert await blobs.get(OTHER) == FRAME


async def test_a_server_that_takes_connections_and_never_answers_is_told_in_time() -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            continue
        writer.close()

    listener = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    blobs = RedisBlobs(parse_redis_url("blobs", f"redis://127.0.0.1:{port}?timeout=0.3&connect_timeout=0.3"))
    async with asyncio.timeout(20):
        with pytest.raises(StoreUnavailableError):
            await blobs.open()
    await blobs.close()
    listener.close()
    await listener.wait_closed()
