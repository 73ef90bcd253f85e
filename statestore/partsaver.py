"""The parts of a state, stored as blobs: those that are there already are shared, the others encoded and put.

Small parts go together: what a thread is asked to do at once is a batch of them, since asking costs about as much as
hashing a quarter of a megabyte.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from forkpoint.errors import BlobMissingError
from forkpoint.parts import PartSpec
from forkpoint.statestore.blobs import BlobStore, Buffer, size_of
from forkpoint.statestore.codec import digest_of, encode_pieces
from forkpoint.statestore.gate import Gate
from forkpoint.statestore.planes import PLANE_ITEMS
from forkpoint.statestore.threads import CODEC_THREADS, run_in

SAVE_BATCHES_MAX: Final = 16
"""Batches being encoded and written at once, by all saves: enough for disks and networks to work on many together."""
SAVE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Their raw bytes: what encoding adds to the memory of the states themselves is at most this."""
BATCH_PARTS_MAX: Final = 8
BATCH_BYTES_MAX: Final = 1024 * 1024
"""Of one batch; a part that is larger goes alone."""


KNOWN_AT_ONCE: Final = 64
"""Parts that are looked for at a time."""


@dataclass(frozen=True, slots=True)
class InStore:
    """Stands for the bytes of a part that was stored before: it is looked for, not written."""

    digest: str


@dataclass(frozen=True, slots=True)
class SavedPart:
    """One part of a saved checkpoint."""

    spec: PartSpec
    digest: str
    shared: bool
    """The blob was there already."""
    frame_bytes: int
    """Bytes written for it; 0 when shared."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Where it stands among the parts, and its bytes."""

    index: int
    spec: PartSpec
    data: memoryview


class PartSaver:
    """Stores parts for all checkpoints of one store. Safe for concurrent calls."""

    def __init__(self, blobs: BlobStore, compress: bool) -> None:
        self._blobs = blobs
        self._compress = compress
        self._bytes_max = max(1, min(BATCH_BYTES_MAX, SAVE_BYTES_MAX // SAVE_BATCHES_MAX))
        self._gate = Gate(SAVE_BATCHES_MAX, SAVE_BYTES_MAX)
        self._damaged: set[str] = set()

    def note_damaged(self, digest: str) -> None:
        """The stored blob was found damaged: the next save of the same bytes heals it instead of sharing it."""
        self._damaged.add(digest)

    async def save(self, parts: Sequence[tuple[PartSpec, Buffer | InStore]]) -> tuple[SavedPart, ...]:
        """All parts stored, in their order. Saves that run at once take turns by the batch, so that a small state waits
        for no large one. Raises BlobMissingError for an `InStore` whose blob is gone or known to be damaged, ValueError
        for bytes that are not as many as the spec says, and what BlobStore.put raises."""
        known = {index: (spec, data) for index, (spec, data) in enumerate(parts) if isinstance(data, InStore)}
        saved = {index: SavedPart(spec, there.digest, True, 0) for index, (spec, there) in known.items()}
        given = [(index, spec, data) for index, (spec, data) in enumerate(parts) if not isinstance(data, InStore)]
        batches = _batches(given, self._bytes_max)

        async def work() -> None:
            for batch in batches:
                async with self._gate.hold(sum(part.data.nbytes for part in batch)):
                    saved.update(await self._save(batch))

        try:
            await self._require([there.digest for _, there in known.values()])
            async with asyncio.TaskGroup() as group:
                for _ in range(min(SAVE_BATCHES_MAX, len(given))):
                    group.create_task(work())
        except BaseExceptionGroup as failures:
            raise _first(failures) from failures
        return tuple(saved[index] for index in range(len(parts)))

    async def _require(self, digests: Sequence[str]) -> None:
        for first in range(0, len(digests), KNOWN_AT_ONCE):
            asked = digests[first : first + KNOWN_AT_ONCE]
            for digest, there in zip(asked, await self._have(asked), strict=True):
                if not there:
                    raise BlobMissingError(digest)

    async def _have(self, digests: Sequence[str]) -> list[bool]:
        """Which blobs are there, and not known to be damaged."""
        async with asyncio.TaskGroup() as group:
            asked = [
                None if digest in self._damaged else group.create_task(self._blobs.has(digest)) for digest in digests
            ]
        return [task is not None and task.result() for task in asked]

    async def _save(self, batch: Sequence[_Part]) -> dict[int, SavedPart]:
        digests = await run_in(CODEC_THREADS, lambda: [digest_of(part.data) for part in batch])
        there = await self._there(digests)
        missing = [(part, digest) for part, digest, shared in zip(batch, digests, there, strict=True) if not shared]
        frames = await run_in(CODEC_THREADS, lambda: [self._encode(part) for part, _ in missing]) if missing else []
        async with asyncio.TaskGroup() as group:
            puts = [
                group.create_task(self._put(part, digest, frame))
                for (part, digest), frame in zip(missing, frames, strict=True)
            ]
        saved = {
            part.index: SavedPart(part.spec, digest, True, 0)
            for part, digest, shared in zip(batch, digests, there, strict=True)
            if shared
        }
        for (part, _), put in zip(missing, puts, strict=True):
            saved[part.index] = put.result()
        return saved

    async def _there(self, digests: Sequence[str]) -> list[bool]:
        """Which blobs are to be shared. What is stored as it is is not asked for: the put finds out."""
        return await self._have(digests) if self._compress else [False] * len(digests)

    def _encode(self, part: _Part) -> tuple[Buffer, ...]:
        return encode_pieces(part.data, PLANE_ITEMS.get(part.spec.dtype, 1), self._compress)

    async def _put(self, part: _Part, digest: str, frame: tuple[Buffer, ...]) -> SavedPart:
        if digest in self._damaged:
            await self._blobs.replace(digest, *frame)
            self._damaged.discard(digest)
            return SavedPart(part.spec, digest, False, size_of(frame))
        new = await self._blobs.put(digest, *frame)
        return SavedPart(part.spec, digest, not new, size_of(frame) if new else 0)


def _batches(parts: Sequence[tuple[int, PartSpec, Buffer]], bytes_max: int) -> Iterator[list[_Part]]:
    """Consecutive parts, as many as go together. Raises ValueError for a part of another size than its spec's."""
    batch: list[_Part] = []
    size = 0
    for index, spec, data in parts:
        view = memoryview(data).cast("B")
        if view.nbytes != spec.nbytes:
            raise ValueError(f"part {spec.name} has {view.nbytes} bytes, its spec needs {spec.nbytes}")
        if batch and (len(batch) == BATCH_PARTS_MAX or size + view.nbytes > bytes_max):
            yield batch
            batch, size = [], 0
        batch.append(_Part(index, spec, view))
        size += view.nbytes
    if batch:
        yield batch


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first real failure of a group: callers handle one error, not a tree."""
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
