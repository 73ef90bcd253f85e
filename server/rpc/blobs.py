"""Blobs for other nodes: what the tiers hold that lie on this node alone."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final, Protocol

from forkpoint.errors import BlobMissingError, InvalidFieldError, NotFoundError, StoreUnavailableError
from forkpoint.limits import DIGEST_BYTES, PEER_ASK_DIGESTS_MAX, PEER_FRAME_BYTES_MAX
from forkpoint.proto.forkpoint.internal.v1 import peer_pb2 as pb

READS_MAX: Final = 8
"""Blobs that are held in memory for other nodes at once: what a slow peer takes slowly is one of them meanwhile."""


class NodeTier(Protocol):
    """A tier of blobs that no other node can reach, as far as others may use it. See statestore/blobs.py."""

    async def get(self, digest: str) -> bytes: ...
    async def has(self, digest: str) -> bool: ...


class BlobDesk:
    """Answers PeerService's calls for blobs. It asks no other node in turn, so that no call goes round."""

    def __init__(self, tiers: Sequence[NodeTier]) -> None:
        self._tiers = tuple(tiers)
        self._reads = asyncio.Semaphore(READS_MAX)
        self.sent_bytes = 0
        """Of all blobs that were sent, or begun to be."""

    async def has(self, request: pb.HasBlobsRequest) -> pb.HasBlobsResponse:
        """Which of the digests some tier holds; one that does not answer holds none."""
        if len(request.digests) > PEER_ASK_DIGESTS_MAX:
            raise InvalidFieldError("digests", f"{len(request.digests)} digests, at most {PEER_ASK_DIGESTS_MAX} a call")
        digests = [_digest(digest, "digests") for digest in request.digests]
        return pb.HasBlobsResponse(held=[await self._holds(digest) for digest in digests])

    async def fetch(self, request: pb.FetchBlobRequest) -> AsyncIterator[pb.BlobFrame]:
        """The blob in pieces; the next one is made when gRPC's flow control took the last. Raises NotFoundError."""
        digest = _digest(request.digest, "digest")
        async with self._reads:
            blob = memoryview(await self._read(digest))
            for start in range(0, max(1, len(blob)), PEER_FRAME_BYTES_MAX):
                data = bytes(blob[start : start + PEER_FRAME_BYTES_MAX])
                self.sent_bytes += len(data)
                yield pb.BlobFrame(total_bytes=0 if start else len(blob), data=data)

    async def _holds(self, digest: str) -> bool:
        for tier in self._tiers:
            try:
                if await tier.has(digest):
                    return True
            except StoreUnavailableError:
                continue
        return False

    async def _read(self, digest: str) -> bytes:
        for tier in self._tiers:
            try:
                return await tier.get(digest)
            except (BlobMissingError, StoreUnavailableError):
                continue
        raise NotFoundError(f"blob {digest}", "is on no tier of this node")


def _digest(digest: bytes, field: str) -> str:
    if len(digest) != DIGEST_BYTES:
        raise InvalidFieldError(field, f"a digest of {len(digest)} bytes, expected {DIGEST_BYTES}")
    return digest.hex()
