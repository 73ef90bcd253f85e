"""The blob port: large, immutable bytes under the digest of their content.

As in the catalog's port (statestore/base.py): every method may raise StoreUnavailableError and, where it writes,
StoreFullError; retry, limits, metrics and fault injection wrap it.
"""

from collections.abc import AsyncIterator
from typing import Protocol


class BlobStore(Protocol):
    """Immutable bytes under the BLAKE3 digest of their *raw* content. Values here are frames (statestore/codec.py):
    a backend neither opens nor checks them. Digests are lower-case hex, 64 characters."""

    @property
    def broken(self) -> str | None:
        """As Catalog.broken."""
        ...

    async def put(self, digest: str, frame: bytes) -> bool:
        """Store and make durable; False when the digest was there already (the stored frame stays). Atomic: a reader
        sees the whole frame or nothing. Cancellation may leave the blob or not, never half of it."""
        ...

    async def get(self, digest: str) -> bytes:
        """The frame. Raises BlobMissingError."""
        ...

    async def has(self, digest: str) -> bool:
        """Whether a frame is there, and durably so: a manifest may name it. Says nothing about damage."""
        ...

    async def replace(self, digest: str, frame: bytes) -> None:
        """As put, over whatever is there: how a damaged blob is healed."""
        ...

    async def delete(self, digest: str) -> None:
        """Idempotent."""
        ...

    def digests(self) -> AsyncIterator[str]:
        """All digests, in no order; what is put or deleted meanwhile may or may not appear."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...
