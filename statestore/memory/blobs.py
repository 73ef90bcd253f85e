"""Blobs in a dictionary."""

import secrets
from collections.abc import AsyncIterator, Sequence

from forkpoint.errors import BlobMissingError, StoreUnavailableError
from forkpoint.statestore.blobs import Buffer, joined
from forkpoint.statestore.errors import StaleCollectorError
from forkpoint.statestore.records import Durability


class MemoryBlobs:
    """See forkpoint.statestore.blobs.BlobStore. Nothing outlives the process."""

    def __init__(self) -> None:
        self._frames: dict[str, bytes] = {}
        self._closed = False
        self._tier = secrets.token_hex(16)
        self._term = 0

    @property
    def broken(self) -> str | None:
        return None

    @property
    def durability(self) -> Durability:
        return Durability.MEMORY

    @property
    def survives_node(self) -> bool:
        return False

    async def open(self) -> None:
        self._open()

    async def put(self, digest: str, *pieces: Buffer) -> bool:
        frames = self._open()
        if digest in frames:
            return False
        frames[digest] = joined(pieces)
        return True

    async def get(self, digest: str) -> bytes:
        frame = self._open().get(digest)
        if frame is None:
            raise BlobMissingError(digest)
        return frame

    async def has(self, digest: str) -> bool:
        return digest in self._open()

    async def replace(self, digest: str, *pieces: Buffer) -> None:
        self._open()[digest] = joined(pieces)

    @property
    def tier(self) -> str:
        return self._tier

    async def fence(self, term: int) -> None:
        self._check(term)
        self._term = term

    async def delete(self, digests: Sequence[str], term: int = 0) -> None:
        frames = self._open()
        self._check(term)
        for digest in digests:
            frames.pop(digest, None)

    async def sizes(self, digests: Sequence[str]) -> list[int | None]:
        frames = self._open()
        return [len(frames[digest]) if digest in frames else None for digest in digests]

    def _check(self, term: int) -> None:
        if term < self._term:
            raise StaleCollectorError(self._tier, term, self._term)

    async def digests(self) -> AsyncIterator[str]:
        for digest in list(self._open()):
            yield digest

    async def close(self) -> None:
        self._closed = True

    def _open(self) -> dict[str, bytes]:
        if self._closed:
            raise StoreUnavailableError("memory", "it is closed")
        return self._frames
