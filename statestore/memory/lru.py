"""HostMemoryBlobs: the newest frames in this process's memory, up to a budget. A tier that may forget anything."""

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence

from forkpoint.errors import BlobMissingError, StoreUnavailableError
from forkpoint.statestore.blobs import Buffer, joined, size_of
from forkpoint.statestore.records import Durability


class HostMemoryBlobs:
    """The port of forkpoint.statestore.blobs.BlobStore, but a cache: what was used longest ago is dropped as others
    come, so that a put is no promise. For the front of a tier stack, never alone."""

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 1:
            raise ValueError(f"a budget is at least one byte, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self._frames: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
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

    @property
    def tier(self) -> str:
        return f"host-memory-{id(self):x}"

    @property
    def used_bytes(self) -> int:
        """Frame bytes held now; never above the budget."""
        return self._bytes

    async def open(self) -> None:
        self._open()

    async def put(self, digest: str, *pieces: Buffer) -> bool:
        if digest in self._open():
            self._frames.move_to_end(digest)
            return False
        self._keep(digest, pieces)
        return True

    async def get(self, digest: str) -> bytes:
        frame = self._open().get(digest)
        if frame is None:
            raise BlobMissingError(digest)
        self._frames.move_to_end(digest)
        return frame

    async def has(self, digest: str) -> bool:
        return digest in self._open()

    async def replace(self, digest: str, *pieces: Buffer) -> None:
        self._drop(digest)
        self._keep(digest, pieces)

    async def delete(self, digests: Sequence[str], term: int = 0) -> None:
        for digest in digests:
            self._drop(digest)

    async def fence(self, term: int) -> None:
        self._open()

    async def sizes(self, digests: Sequence[str]) -> list[int | None]:
        frames = self._open()
        return [len(frames[digest]) if digest in frames else None for digest in digests]

    async def digests(self) -> AsyncIterator[str]:
        for digest in list(self._open()):
            yield digest

    async def close(self) -> None:
        self._closed = True
        self._frames.clear()
        self._bytes = 0

    def _keep(self, digest: str, pieces: tuple[Buffer, ...]) -> None:
        """Make room, then hold a copy. A frame larger than the budget is not held."""
        size = size_of(pieces)
        if size > self.budget_bytes:
            return
        while self._bytes + size > self.budget_bytes:
            _, oldest = self._frames.popitem(last=False)
            self._bytes -= len(oldest)
        self._frames[digest] = joined(pieces)
        self._bytes += size

    def _drop(self, digest: str) -> None:
        frame = self._open().pop(digest, None)
        self._bytes -= 0 if frame is None else len(frame)

    def _open(self) -> OrderedDict[str, bytes]:
        if self._closed:
            raise StoreUnavailableError("host memory", "it is closed")
        return self._frames
