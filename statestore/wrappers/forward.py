"""ForwardingBlobs: passes every call on. What the wrappers build on."""

from collections.abc import AsyncIterator, Sequence

from forkpoint.statestore.blobs import BlobStore, Buffer
from forkpoint.statestore.records import Durability


class ForwardingBlobs:
    """The store `inner`, call by call. See forkpoint.statestore.blobs.BlobStore."""

    def __init__(self, inner: BlobStore) -> None:
        self.inner = inner

    @property
    def broken(self) -> str | None:
        return self.inner.broken

    @property
    def durability(self) -> Durability:
        return self.inner.durability

    @property
    def survives_node(self) -> bool:
        return self.inner.survives_node

    @property
    def tier(self) -> str:
        return self.inner.tier

    async def open(self) -> None:
        await self.inner.open()

    async def put(self, digest: str, *pieces: Buffer) -> bool:
        return await self.inner.put(digest, *pieces)

    async def get(self, digest: str) -> bytes:
        return await self.inner.get(digest)

    async def has(self, digest: str) -> bool:
        return await self.inner.has(digest)

    async def replace(self, digest: str, *pieces: Buffer) -> None:
        await self.inner.replace(digest, *pieces)

    async def delete(self, digests: Sequence[str], term: int = 0) -> None:
        await self.inner.delete(digests, term)

    async def fence(self, term: int) -> None:
        await self.inner.fence(term)

    async def sizes(self, digests: Sequence[str]) -> list[int | None]:
        return await self.inner.sizes(digests)

    async def digests(self) -> AsyncIterator[str]:
        async for digest in self.inner.digests():
            yield digest

    async def close(self) -> None:
        await self.inner.close()


def innermost(blobs: BlobStore) -> BlobStore:
    """The store below all wrappers."""
    while isinstance(blobs, ForwardingBlobs):
        blobs = blobs.inner
    return blobs
