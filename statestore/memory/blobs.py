"""Blobs in a dictionary."""

from collections.abc import AsyncIterator

from forkpoint.errors import BlobMissingError, StoreUnavailableError
from forkpoint.statestore.blobs import Buffer, joined
from forkpoint.statestore.records import Durability


class MemoryBlobs:
    """See forkpoint.statestore.blobs.BlobStore. Nothing outlives the process."""

    def __init__(self) -> None:
        self._frames: dict[str, bytes] = {}
        self._closed = False

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

    async def delete(self, digest: str) -> None:
        self._open().pop(digest, None)

    async def digests(self) -> AsyncIterator[str]:
        for digest in list(self._open()):
            yield digest

    async def close(self) -> None:
        self._closed = True

    def _open(self) -> dict[str, bytes]:
        if self._closed:
            raise StoreUnavailableError("memory", "it is closed")
        return self._frames
