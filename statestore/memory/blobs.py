"""Blobs in a dictionary."""

from collections.abc import AsyncIterator

from forkpoint.errors import BlobMissingError, StoreUnavailableError


class MemoryBlobs:
    """See forkpoint.statestore.base.BlobStore. Nothing outlives the process."""

    def __init__(self) -> None:
        self._frames: dict[str, bytes] = {}
        self._closed = False

    @property
    def broken(self) -> str | None:
        return None

    async def put(self, digest: str, frame: bytes) -> bool:
        frames = self._open()
        if digest in frames:
            return False
        frames[digest] = bytes(frame)
        return True

    async def get(self, digest: str) -> bytes:
        frame = self._open().get(digest)
        if frame is None:
            raise BlobMissingError(digest)
        return frame

    async def has(self, digest: str) -> bool:
        return digest in self._open()

    async def replace(self, digest: str, frame: bytes) -> None:
        self._open()[digest] = bytes(frame)

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
