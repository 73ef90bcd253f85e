"""Blobs in Redis: whole or not there, whatever happens between two commands, and to the server."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from forkpoint.errors import (
    BlobDamagedError,
    BlobMissingError,
    ConfigError,
    DurabilityNotReachedError,
    StoreUnavailableError,
)
from forkpoint.statestore.codec import digest_of
from forkpoint.statestore.records import Durability
from forkpoint.statestore.redis.blobheader import CHUNK_BYTES_LEAST, BlobHeader, BlobKeys
from forkpoint.statestore.redis.blobs import RedisBlobs
from forkpoint.statestore.redis.chunks import UPLOAD_SECONDS, cut
from forkpoint.statestore.redis.url import parse_redis_url
from tests.support.redis_servers import RedisServerProcess, redis_server
from tests.support.redis_stores import products

CHUNK = CHUNK_BYTES_LEAST
FRAME = os.urandom(5 * CHUNK + 7)
DIGEST = digest_of(FRAME)
OTHER = digest_of(b"other")
KEYS = BlobKeys("default")


@pytest.fixture(scope="module")
def running() -> Iterator[RedisServerProcess]:
    with redis_server("valkey") as server:
        yield server


@pytest.fixture
def server(running: RedisServerProcess) -> RedisServerProcess:
    running.command("FLUSHALL")
    return running


@asynccontextmanager
async def opened(server: RedisServerProcess, query: str = "", cache: bool = False) -> AsyncIterator[RedisBlobs]:
    blobs = RedisBlobs(parse_redis_url("blobs", server.url(query)), cache, chunk_bytes=CHUNK)
    await blobs.open()
    try:
        yield blobs
    finally:
        await blobs.close()


@pytest.fixture
async def blobs(server: RedisServerProcess) -> AsyncIterator[RedisBlobs]:
    async with opened(server) as made:
        yield made


def keys_of(server: RedisServerProcess) -> list[str]:
    found = server.command("KEYS", "*:b:*")
    assert isinstance(found, list)
    return sorted(key.decode() for key in found)


def header_of(server: RedisServerProcess, digest: str = DIGEST) -> BlobHeader:
    value = server.command("GET", KEYS.header(digest))
    assert isinstance(value, bytes)
    header = BlobHeader.unpack(value)
    assert header is not None
    return header


# --- the format ------------------------------------------------------------------------------------------------
def test_a_header_is_32_bytes_and_comes_back() -> None:
    header = BlobHeader("0123456789abcdef", 3_000_000)
    packed = header.pack()
    assert packed[:12] == b"FPBR\x01\0\0\0\0\0\x10\0"
    assert (len(packed), BlobHeader.unpack(packed), header.chunks) == (32, header, 3)
    assert [BlobHeader("0" * 16, size).chunks for size in (0, 1, 1 << 20, (1 << 20) + 1)] == [0, 1, 1, 2]


def test_every_flipped_bit_and_every_cut_of_a_header_makes_it_none() -> None:
    packed = BlobHeader("0123456789abcdef", 3_000_000).pack()
    for bit in range(len(packed) * 8):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        assert BlobHeader.unpack(bytes(damaged)) is None
    for length in range(len(packed)):
        assert BlobHeader.unpack(packed[:length]) is None
    assert BlobHeader.unpack(packed + b"\0") is None


def test_a_header_that_claims_too_much_is_none() -> None:
    for frame_bytes, chunk_bytes in ((1 << 30, 1 << 20), (1000, 0), (1 << 20, 1), (1 << 20, 1 << 31)):
        assert BlobHeader.unpack(BlobHeader("0" * 16, frame_bytes, chunk_bytes).pack()) is None


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (10,), (11,), (3, 7), (3, 8, 0, 25), (40,), (1,) * 23])
def test_pieces_are_cut_into_chunks_wherever_they_meet(sizes: tuple[int, ...]) -> None:
    pieces = [os.urandom(size) for size in sizes]
    chunks = list(cut([memoryview(piece) for piece in pieces], 10))
    assert b"".join(chunks) == b"".join(pieces)
    assert all(len(chunk) == 10 for chunk in chunks[:-1])
    assert len(chunks) == -(-sum(sizes) // 10)


def test_a_blob_lies_in_one_slot_and_its_fence_beside_it() -> None:
    keys = {KEYS.header(DIGEST), KEYS.fence(DIGEST[:3]), *KEYS.chunks(DIGEST, BlobHeader("0" * 16, 1 << 22))}
    assert {key[key.index("{") : key.index("}")] for key in keys} == {f"{{default:b:{DIGEST[:3]}"}


# --- all or nothing --------------------------------------------------------------------------------------------
async def test_until_the_header_is_set_there_is_no_blob_and_its_chunks_expire(
    server: RedisServerProcess, blobs: RedisBlobs
) -> None:
    async def never(keys: list[str], pieces: object) -> None:
        await send(keys, pieces)  # type: ignore[arg-type]
        raise StoreUnavailableError("redis", "the writer died here")

    send, blobs._chunks.send = blobs._chunks.send, never  # type: ignore[assignment, method-assign]
    with pytest.raises(StoreUnavailableError):
        await blobs.put(DIGEST, FRAME)
    left = keys_of(server)
    assert len(left) == 6
    assert all(0 < int(str(server.command("TTL", key))) <= UPLOAD_SECONDS for key in left)
    assert not await blobs.has(DIGEST)
    assert [digest async for digest in blobs.digests()] == []
    with pytest.raises(BlobMissingError):
        await blobs.get(DIGEST)
    blobs._chunks.send = send  # type: ignore[method-assign]
    assert await blobs.put(DIGEST, FRAME)
    assert {server.command("TTL", key) for key in keys_of(server) if key not in left} == {-1}


async def test_chunks_that_vanished_before_the_header_make_no_blob(
    server: RedisServerProcess, blobs: RedisBlobs
) -> None:
    async def losing(keys: list[str], pieces: object) -> None:
        await send(keys, pieces)  # type: ignore[arg-type]
        server.command("DEL", keys[3])

    send, blobs._chunks.send = blobs._chunks.send, losing  # type: ignore[assignment, method-assign]
    with pytest.raises(StoreUnavailableError, match="lost chunks"):
        await blobs.put(DIGEST, FRAME)
    assert not await blobs.has(DIGEST)


@pytest.mark.parametrize("damage", ["delete", "cut", "header"])
async def test_a_blob_that_lost_a_chunk_is_damaged_not_had_and_healed_by_the_next_put(
    server: RedisServerProcess, blobs: RedisBlobs, damage: str
) -> None:
    await blobs.put(DIGEST, FRAME)
    key = KEYS.chunks(DIGEST, header_of(server))[2]
    if damage == "delete":
        server.command("DEL", key)
    elif damage == "cut":
        server.command("SET", key, b"short")
    else:
        server.command("SET", KEYS.header(DIGEST), b"nonsense")
    with pytest.raises(BlobDamagedError):
        await blobs.get(DIGEST)
    assert not await blobs.has(DIGEST)
    assert await blobs.put(DIGEST, FRAME)
    assert await blobs.has(DIGEST)
    assert await blobs.get(DIGEST) == FRAME


async def test_of_writers_at_once_one_wins_and_the_others_leave_nothing(server: RedisServerProcess) -> None:
    frames = [os.urandom(3 * CHUNK) for _ in range(6)]
    async with opened(server) as one, opened(server) as two:
        results = await asyncio.gather(*((one, two)[i % 2].put(DIGEST, frame) for i, frame in enumerate(frames)))
        assert await one.get(DIGEST) == await two.get(DIGEST) == frames[results.index(True)]
    assert results.count(True) == 1
    assert len(keys_of(server)) == 4


async def test_a_reader_of_a_blob_that_is_being_replaced_gets_one_whole_frame(server: RedisServerProcess) -> None:
    frames = [bytes([index]) * (4 * CHUNK) for index in range(10)]
    async with opened(server) as writer, opened(server) as reader:
        await writer.put(DIGEST, frames[0])

        async def write() -> None:
            for frame in frames:
                await writer.replace(DIGEST, frame)

        async with asyncio.TaskGroup() as group:
            task = group.create_task(write())
            reads = 0
            while not task.done():
                try:
                    assert await reader.get(DIGEST) in frames
                    reads += 1
                except StoreUnavailableError:
                    continue
        assert reads
        assert await reader.get(DIGEST) == frames[-1]
    assert len(keys_of(server)) == 5, "nothing of the replaced ones is left"


async def test_chunks_left_over_by_a_replacement_and_a_removal_are_found_and_swept(
    server: RedisServerProcess, blobs: RedisBlobs
) -> None:
    async def nothing(keys: object) -> None:
        pass

    unlink = blobs._chunks.unlink
    await blobs.put(OTHER, FRAME)
    await blobs.put(DIGEST, FRAME)
    assert await blobs.self_check() == []
    blobs._chunks.unlink = nothing  # type: ignore[method-assign]
    await blobs.replace(DIGEST, FRAME[: 2 * CHUNK])
    await blobs.delete([OTHER])
    blobs._chunks.unlink = unlink  # type: ignore[method-assign]
    found = await blobs.self_check()
    assert {(finding.kind, finding.where) for finding in found} == {
        ("ORPHAN_CHUNKS", f"blob {d}") for d in (DIGEST, OTHER)
    }
    assert len(keys_of(server)) == 3 + 12
    assert await blobs.sweep() == found
    assert await blobs.self_check() == []
    assert len(keys_of(server)) == 3
    assert await blobs.get(DIGEST) == FRAME[: 2 * CHUNK]


async def test_a_sweep_spares_uploads_that_are_under_way(server: RedisServerProcess, blobs: RedisBlobs) -> None:
    async def sweeping(keys: list[str], pieces: object) -> None:
        await send(keys, pieces)  # type: ignore[arg-type]
        assert await blobs.sweep() == []

    send, blobs._chunks.send = blobs._chunks.send, sweeping  # type: ignore[assignment, method-assign]
    assert await blobs.put(DIGEST, FRAME)
    assert await blobs.get(DIGEST) == FRAME


async def test_a_namespace_sees_its_own_blobs_only(server: RedisServerProcess) -> None:
    async with opened(server, "namespace=a*") as star, opened(server, "namespace=ab") as other:
        await star.put(DIGEST, FRAME)
        await other.put(OTHER, FRAME)
        assert [digest async for digest in star.digests()] == [DIGEST]
        assert not await other.has(DIGEST)
        assert star.tier != other.tier


# --- what it gives ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("product", products())
def test_the_class_is_the_one_that_the_server_is_set_to(product: str) -> None:
    async def reached(*options: str, query: str = "", cache: bool = False) -> Durability:
        with redis_server(product, *options) as server:
            async with opened(server, query, cache) as blobs:
                await blobs.put(DIGEST, FRAME)
                return blobs.durability

    aof = ("--appendonly", "yes", "--appendfsync")
    assert asyncio.run(reached()) is Durability.MEMORY
    assert asyncio.run(reached(*aof, "everysec")) is Durability.MEMORY
    assert asyncio.run(reached(*aof, "always")) is Durability.LOCAL_FSYNC
    assert asyncio.run(reached(*aof, "always", cache=True)) is Durability.MEMORY
    with pytest.raises(DurabilityNotReachedError):
        asyncio.run(reached(query="durability=local_fsync"))


async def test_an_evicting_server_can_be_a_cache_and_nothing_else() -> None:
    with redis_server("valkey", "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as server:
        with pytest.raises(ConfigError, match=r"'allkeys-lru'.*never a durable one"):
            async with opened(server):
                pass
        async with opened(server, cache=True) as blobs:
            await blobs.put(DIGEST, FRAME)
            assert await blobs.get(DIGEST) == FRAME
            assert blobs.durability is Durability.MEMORY


async def test_a_write_that_replicas_do_not_confirm_is_not_acknowledged(server: RedisServerProcess) -> None:
    async with opened(server) as blobs:
        await blobs.put(DIGEST, FRAME)
    url = parse_redis_url("blobs", server.url("wait=1&wait_ms=20"))
    unconfirmed = RedisBlobs(url, chunk_bytes=CHUNK)
    with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
        await unconfirmed.open()
    unconfirmed._tier = "known"
    for call in (unconfirmed.put(OTHER, FRAME), unconfirmed.has(DIGEST), unconfirmed.delete([DIGEST])):
        with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
            await call
    await unconfirmed.close()


async def test_what_is_no_digest_names_no_key(blobs: RedisBlobs) -> None:
    for digest in ("", "A" * 64, "a" * 63, "a" * 64 + "\n", "*" * 64):
        for call in (blobs.put(digest, b"x"), blobs.get(digest), blobs.replace(digest, b"x"), blobs.delete([digest])):
            with pytest.raises(ValueError, match="no BLAKE3 digest"):
                await call
