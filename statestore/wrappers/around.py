"""AroundBlobs: every call of a blob store through one function. For wrappers that treat all calls alike."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from forkpoint.statestore.blobs import Buffer, size_of
from forkpoint.statestore.wrappers.forward import ForwardingBlobs

T = TypeVar("T")


class AroundBlobs(ForwardingBlobs):
    """Calls `_around` with each call's name, the bytes it brings, and the call itself, to be made any number of times.
    Listing digests, which is many calls, passes by."""

    async def _around(self, method: str, nbytes: int, call: Callable[[], Awaitable[T]]) -> T:
        """What becomes of one call."""
        return await call()

    async def open(self) -> None:
        await self._around("open", 0, lambda: self.inner.open())

    async def put(self, digest: str, *pieces: Buffer) -> bool:
        return await self._around("put", size_of(pieces), lambda: self.inner.put(digest, *pieces))

    async def get(self, digest: str) -> bytes:
        return await self._around("get", 0, lambda: self.inner.get(digest))

    async def has(self, digest: str) -> bool:
        return await self._around("has", 0, lambda: self.inner.has(digest))

    async def replace(self, digest: str, *pieces: Buffer) -> None:
        await self._around("replace", size_of(pieces), lambda: self.inner.replace(digest, *pieces))

    async def delete(self, digests: Sequence[str], term: int = 0) -> None:
        await self._around("delete", 0, lambda: self.inner.delete(digests, term))

    async def fence(self, term: int) -> None:
        await self._around("fence", 0, lambda: self.inner.fence(term))

    async def sizes(self, digests: Sequence[str]) -> list[int | None]:
        return await self._around("sizes", 0, lambda: self.inner.sizes(digests))
