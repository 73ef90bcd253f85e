"""A writer of blobs in Redis that dies at every command, before or after it: old or new, whole or not there."""

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence

import pytest

from forkpoint.errors import BlobDamagedError, BlobMissingError
from forkpoint.statestore.codec import digest_of
from forkpoint.statestore.redis.blobheader import CHUNK_BYTES_LEAST, BlobKeys
from forkpoint.statestore.redis.blobs import RedisBlobs
from forkpoint.statestore.redis.connection import Call, Confirmation
from forkpoint.statestore.redis.server import Reply
from forkpoint.statestore.redis.url import parse_redis_url
from tests.support.redis_servers import RedisServerProcess, redis_server

OLD, NEW = os.urandom(6 * CHUNK_BYTES_LEAST + 5), os.urandom(9 * CHUNK_BYTES_LEAST + 5)
DIGEST, BYSTANDER = digest_of(NEW), digest_of(b"bystander")
KEYS = BlobKeys("default")

Scene = tuple[Callable[[RedisBlobs], Awaitable[object]], Callable[[RedisBlobs], Awaitable[object]], list[bytes | None]]


async def nothing(blobs: RedisBlobs) -> None:
    """No blob is there before."""


async def lose_a_chunk(blobs: RedisBlobs) -> None:
    await blobs.put(DIGEST, OLD)
    value = await blobs._header(DIGEST)
    await blobs._connection.call(KEYS.header(DIGEST), "DEL", blobs._chunks_of(DIGEST, value or b"")[1])


SCENES: dict[str, Scene] = {
    "put": (nothing, lambda blobs: blobs.put(DIGEST, NEW), [None, NEW]),
    "put over a blob": (lambda blobs: blobs.put(DIGEST, OLD), lambda blobs: blobs.put(DIGEST, NEW), [OLD]),
    "put over one that lost a chunk": (lose_a_chunk, lambda blobs: blobs.put(DIGEST, NEW), [None, NEW]),
    "replace": (lambda blobs: blobs.put(DIGEST, OLD), lambda blobs: blobs.replace(DIGEST, NEW), [OLD, NEW]),
    "replace nothing": (nothing, lambda blobs: blobs.replace(DIGEST, NEW), [None, NEW]),
    "delete": (lambda blobs: blobs.put(DIGEST, OLD), lambda blobs: blobs.delete([DIGEST]), [OLD, None]),
}
"""What is there before, what is interrupted, and what may be there afterwards (None: nothing that counts as there)."""


class Death(BaseException):
    """The process ends here."""


class Mortal:
    """Counts the pipelines of a connection and dies at one of them, before it is sent or after it was answered."""

    def __init__(self, blobs: RedisBlobs, at: int, after: bool) -> None:
        self._send = blobs._connection.pipeline
        self._at, self._after = at, after
        self.sent = 0
        blobs._connection.pipeline = self.pipeline  # type: ignore[method-assign]

    async def pipeline(self, calls: Sequence[Call], confirm: Confirmation | None = None) -> list[Reply]:
        self.sent += 1
        if self.sent > self._at or (self.sent == self._at and not self._after):
            raise Death
        replies = await self._send(calls, confirm)
        if self.sent == self._at:
            raise Death
        return replies


@pytest.fixture(scope="module")
def running() -> Iterator[RedisServerProcess]:
    with redis_server("valkey") as server:
        yield server


async def opened(server: RedisServerProcess) -> RedisBlobs:
    blobs = RedisBlobs(parse_redis_url("blobs", server.url("connections=2")), chunk_bytes=CHUNK_BYTES_LEAST)
    await blobs.open()
    return blobs


async def what_is_there(blobs: RedisBlobs, was_damaged: bool) -> bytes | None:
    """The frame; has and get agree, and no blob is damaged that was not so before."""
    if await blobs.has(DIGEST):
        return await blobs.get(DIGEST)
    with pytest.raises((BlobMissingError, BlobDamagedError) if was_damaged else BlobMissingError):
        await blobs.get(DIGEST)
    return None


async def interrupted(server: RedisServerProcess, scene: Scene, at: int, after: bool) -> bool:
    """Play a scene, dying at a pipeline; False when it was over before."""
    before, act, allowed = scene
    server.command("FLUSHALL")
    victim, witness = await opened(server), await opened(server)
    try:
        await witness.put(BYSTANDER, OLD)
        await before(witness)
        mortal, died = Mortal(victim, at, after), False
        try:
            await act(victim)
        except (Death, BaseExceptionGroup):
            died = True
        was_damaged = before is lose_a_chunk
        assert await what_is_there(witness, was_damaged) in ([allowed[-1]] if not died else allowed)
        listed = {digest async for digest in witness.digests()}
        assert listed >= {BYSTANDER} and listed <= {BYSTANDER, DIGEST}
        swept = await witness.sweep()
        assert {finding.kind for finding in swept} <= {"ORPHAN_CHUNKS"}
        assert await witness.self_check() == []
        assert await what_is_there(witness, was_damaged) in allowed, "a sweep takes nothing that is needed"
        await witness.replace(DIGEST, NEW)
        assert await witness.get(DIGEST) == NEW
        assert await witness.get(BYSTANDER) == OLD
        await expiring(server)
        assert died == (mortal.sent >= at)
        return died
    finally:
        await victim.close()
        await witness.close()


async def expiring(server: RedisServerProcess) -> None:
    """Whatever is left beside the two blobs goes away by itself."""
    found = server.command("KEYS", "*:b:*")
    assert isinstance(found, list)
    stay = [key for key in found if server.command("TTL", key) == -1]
    assert len(stay) == 2 + 7 + 10


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("scene", SCENES)
async def test_whenever_the_writer_dies_the_blob_is_whole_or_not_there(
    running: RedisServerProcess, scene: str, after: bool
) -> None:
    at = 1
    while await interrupted(running, SCENES[scene], at, after):
        at += 1
        assert at < 50, "it never ended"
    assert at > 2, "several moments were tried"


async def test_a_blob_that_is_missing_stays_missing(running: RedisServerProcess) -> None:
    running.command("FLUSHALL")
    blobs = await opened(running)
    await lose_a_chunk(blobs)
    await blobs.delete([DIGEST])
    with pytest.raises(BlobMissingError):
        await blobs.get(DIGEST)
    assert await blobs.self_check() == []
    await blobs.close()
