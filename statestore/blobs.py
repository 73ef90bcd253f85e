"""The blob port: large, immutable bytes under the digest of their content.

As in the catalog's port (statestore/base.py): every method may raise StoreUnavailableError and, where it writes,
StoreFullError; then nothing of the call took effect, or all of it did. Every call may be made again. Retry, limits,
metrics, fault injection (statestore/wrappers) and tiers (statestore/tiers) wrap this port.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, TypeAlias

from forkpoint.statestore.records import Durability

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes in memory; a memoryview is contiguous and of format "B"."""


class BlobStore(Protocol):
    """Immutable bytes under the BLAKE3 digest of their *raw* content. Values here are frames (statestore/codec.py):
    a backend neither opens nor checks them. Digests are lower-case hex, 64 characters.

    A frame that is written comes in `pieces`, which lie one after the other in it, so that a large part need not be
    copied behind its header. They are read until the call has ended, however it ends: a cancelled call waits for
    whatever still reads them.
    """

    @property
    def broken(self) -> str | None:
        """As Catalog.broken."""
        ...

    @property
    def durability(self) -> Durability:
        """The class that every acknowledgement of put and replace, and every true has, reaches. Known after open."""
        ...

    @property
    def survives_node(self) -> bool:
        """Whether another machine can read the blobs once this one is gone."""
        ...

    async def open(self) -> None:
        """Reach the store and learn what it gives; comes before any other call. Idempotent. Raises ConfigError for a
        store that is set up so that it can't keep its word."""
        ...

    async def put(self, digest: str, *pieces: Buffer) -> bool:
        """Store and make durable; False when the digest was there already (the stored frame stays). Atomic: a reader
        sees the whole frame or nothing. Cancellation may leave the blob or not, never half of it."""
        ...

    async def get(self, digest: str) -> bytes:
        """The frame. Raises BlobMissingError."""
        ...

    async def has(self, digest: str) -> bool:
        """Whether a frame is there, and durably so: a manifest may name it. Says nothing about damage."""
        ...

    async def replace(self, digest: str, *pieces: Buffer) -> None:
        """As put, over whatever is there: how a damaged blob is healed."""
        ...

    @property
    def tier(self) -> str:
        """Identity of the place, known after open: the same for every object over it, another for any other place."""
        ...

    async def fence(self, term: int) -> None:
        """From now on delete refuses smaller terms, whoever calls it and however long that process was stopped. None of
        them deletes anything after this returns. Idempotent. Raises StaleCollectorError when the term itself is smaller
        than one that was claimed."""
        ...

    async def delete(self, digests: Sequence[str], term: int = 0) -> None:
        """Remove; those that are not there are none. Durable when it returns. Raises StaleCollectorError when a higher
        term was claimed; then some of them may be gone."""
        ...

    async def sizes(self, digests: Sequence[str]) -> list[int | None]:
        """Stored bytes of each, None where it is not there."""
        ...

    def digests(self) -> AsyncIterator[str]:
        """All digests, in no order, a few perhaps twice; what is put or deleted meanwhile may or may not appear."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...


def joined(pieces: tuple[Buffer, ...]) -> bytes:
    """The frame in one piece; the very object when it is one already."""
    return pieces[0] if len(pieces) == 1 and isinstance(pieces[0], bytes) else b"".join(pieces)


def size_of(pieces: tuple[Buffer, ...]) -> int:
    """Bytes of a frame."""
    return sum(map(len, pieces))
