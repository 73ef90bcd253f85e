"""Frames in chunks: sent and fetched over several connections at once, within a memory bound."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Final

from forkpoint.statestore.blobs import Buffer, size_of
from forkpoint.statestore.gate import Gate
from forkpoint.statestore.redis.connection import Call, RedisConnection
from forkpoint.statestore.redis.failures import failure
from forkpoint.statestore.redis.server import Reply

BATCH_CHUNKS: Final = 4
"""Chunks sent or asked for at once over one connection: enough to hide the time that an answer is under way."""
UPLOAD_SECONDS: Final = 3600
"""Chunks that no header names vanish after this: what a writer that died had sent. An upload must be done by then."""


def cut(pieces: Sequence[Buffer], chunk_bytes: int) -> Iterator[bytes]:
    """The frame that `pieces` make up, in chunks; each is copied when it is asked for."""
    rest, have = list[memoryview](), 0
    for piece in pieces:
        view = memoryview(piece)
        while have + len(view) >= chunk_bytes:
            yield b"".join((*rest, view[: chunk_bytes - have]))
            view = view[chunk_bytes - have :]
            rest, have = [], 0
        if len(view):
            rest.append(view)
            have += len(view)
    if have:
        yield b"".join(rest)


class Chunks:
    """Sends and fetches chunks; all calls together hold at most a few a connection."""

    def __init__(self, connection: RedisConnection, connections: int, chunk_bytes: int) -> None:
        self._connection = connection
        self._chunk_bytes = chunk_bytes
        self._workers = connections
        self._gate = Gate(connections, connections * BATCH_CHUNKS * chunk_bytes)

    async def send(self, keys: Sequence[str], pieces: Sequence[Buffer]) -> None:
        """Store a frame under the keys of its chunks, to expire. Raises StoreUnavailableError, StoreFullError; then
        some of them may be there."""
        left = iter(zip(keys, cut(pieces, self._chunk_bytes), strict=True))

        async def work() -> None:
            more = True
            while more:
                async with self._gate.hold(BATCH_CHUNKS * self._chunk_bytes):
                    batch = [pair for _, pair in zip(range(BATCH_CHUNKS), left, strict=False)]
                    more = len(batch) == BATCH_CHUNKS
                    calls = [Call(key, ("SET", key, chunk, "EX", UPLOAD_SECONDS)) for key, chunk in batch]
                    del batch
                    self.values(await self._connection.pipeline(calls))

        batches = -(-size_of(tuple(pieces)) // (BATCH_CHUNKS * self._chunk_bytes))
        await _together(work, min(self._workers, batches))

    async def fetch(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values of chunks, None for those that aren't there."""
        found = list[bytes | None]([None] * len(keys))
        left = iter(range(0, len(keys), BATCH_CHUNKS))

        async def work() -> None:
            for start in left:
                part = keys[start : start + BATCH_CHUNKS]
                async with self._gate.hold(BATCH_CHUNKS * self._chunk_bytes):
                    replies = await self._connection.pipeline([Call(key, ("GET", key)) for key in part])
                    found[start : start + len(part)] = self.values(replies)

        await _together(work, min(self._workers, -(-len(keys) // BATCH_CHUNKS)))
        return found

    async def unlink(self, keys: Sequence[str]) -> None:
        """Remove chunks; the server frees their memory behind the call."""
        for start in range(0, len(keys), 1000):
            self.values(
                await self._connection.pipeline([Call(key, ("UNLINK", key)) for key in keys[start : start + 1000]])
            )

    def values(self, replies: Sequence[Reply]) -> list[Reply]:
        """Replies none of which may be an error. Raises StoreUnavailableError, StoreFullError."""
        for reply in replies:
            if isinstance(reply, BaseException):
                raise failure(self._connection.shown, reply) from reply
        return list(replies)


async def _together(work: Callable[[], Coroutine[None, None, None]], count: int) -> None:
    """Run `count` of one kind at once; raises the first error."""
    if count == 1:
        await work()
        return
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except BaseExceptionGroup as failures:
        error: BaseException = failures
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from failures
