"""Chunks in Redis that no header names, found and removed."""

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from forkpoint.statestore.redis.blobheader import BlobHeader, BlobKeys, digest_of_key, upload_of_key
from forkpoint.statestore.redis.chunks import Chunks
from forkpoint.statestore.redis.connection import Call, RedisConnection


@dataclass(frozen=True, slots=True)
class OrphanChunks:
    """Some chunks of one upload whose header is another one's or gone."""

    digest: str
    upload: str
    keys: tuple[str, ...]


async def orphan_chunks(connection: RedisConnection, chunks: Chunks, keys: BlobKeys) -> AsyncIterator[OrphanChunks]:
    """Every chunk that stays for good and belongs to no blob, perhaps an upload's in several parts. Chunks that expire
    are left out: they are being uploaded, or vanish by themselves. A chunk that was found so remains so: it stopped
    expiring when a header named it, and no header names an upload twice. So it may be removed at any time."""
    async for page in connection.scan(keys.chunks_pattern):
        uploads: dict[tuple[str, str], list[str]] = defaultdict(list)
        for key in page:
            uploads[digest_of_key(key), upload_of_key(key)].append(key)
        for (digest, upload), found in uploads.items():
            stay = await _that_stay(connection, chunks, found)
            if stay and await _named_upload(connection, chunks, keys.header(digest)) != upload:
                yield OrphanChunks(digest, upload, tuple(stay))


async def _that_stay(connection: RedisConnection, chunks: Chunks, found: Sequence[str]) -> list[str]:
    times = chunks.values(await connection.pipeline([Call(key, ("PTTL", key)) for key in found]))
    return [key for key, time in zip(found, times, strict=True) if time == -1]


async def _named_upload(connection: RedisConnection, chunks: Chunks, key: str) -> str | None:
    (value,) = chunks.values(await connection.pipeline([Call(key, ("GET", key))]))
    header = None if value is None else BlobHeader.unpack(bytes(value))
    return None if header is None else header.upload
