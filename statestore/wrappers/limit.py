"""LimitedBlobs: so many calls and bytes at once, the others wait their turn."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.gate import Gate
from forkpoint.statestore.wrappers.around import AroundBlobs

T = TypeVar("T")

CALLS_MAX_DEFAULT: Final = 16
BYTES_MAX_DEFAULT: Final = 64 * 1024 * 1024
"""Of frames being written; a read's size is not known before it is there."""


class LimitedBlobs(AroundBlobs):
    """Bounds what is asked of a store at once."""

    def __init__(
        self, inner: BlobStore, calls_max: int = CALLS_MAX_DEFAULT, bytes_max: int = BYTES_MAX_DEFAULT
    ) -> None:
        super().__init__(inner)
        self._gate = Gate(calls_max, bytes_max)

    @property
    def waiting(self) -> int:
        """Calls that wait for their turn."""
        return self._gate.waiting

    async def _around(self, method: str, nbytes: int, call: Callable[[], Awaitable[T]]) -> T:
        async with self._gate.hold(nbytes):
            return await call()
