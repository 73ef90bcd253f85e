"""MeteredBlobs: what was asked of a store, how it went, and how long it took, as plain numbers."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from forkpoint.clock import Clock, SystemClock
from forkpoint.errors import BlobMissingError
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.wrappers.around import AroundBlobs

T = TypeVar("T")


@dataclass(slots=True)
class CallTotals:
    """Calls of one method that have ended."""

    calls: int = 0
    failures: int = 0
    """Those that raised, or were cancelled."""
    missing: int = 0
    """Those that found no blob; no failures."""
    bytes: int = 0
    """Frame bytes written or read by those that succeeded. A blob that was there already counts none."""
    seconds: float = 0.0
    """Sum over all of them; several run at once, so it may pass faster than time."""
    most_seconds: float = 0.0


class MeteredBlobs(AroundBlobs):
    """Counts calls by method. Totals only grow."""

    def __init__(self, inner: BlobStore, clock: Clock | None = None) -> None:
        super().__init__(inner)
        self._clock = clock or SystemClock()
        self._totals: dict[str, CallTotals] = {}

    def totals(self) -> dict[str, CallTotals]:
        """Method -> totals so far, a copy; methods that were never called are not there."""
        return {method: replace(total) for method, total in self._totals.items()}

    async def _around(self, method: str, nbytes: int, call: Callable[[], Awaitable[T]]) -> T:
        total = self._totals.setdefault(method, CallTotals())
        began = self._clock.monotonic()
        failed = True
        try:
            result = await call()
            failed = False
        except BlobMissingError:
            failed = False
            total.missing += 1
            raise
        finally:
            seconds = self._clock.monotonic() - began
            total.calls += 1
            total.failures += failed
            total.seconds += seconds
            total.most_seconds = max(total.most_seconds, seconds)
        total.bytes += _moved(result, nbytes)
        return result


def _moved(result: object, brought: int) -> int:
    """Bytes that a call wrote or read: what it brought, unless that was there already, or what came back."""
    if isinstance(result, bytes):
        return len(result)
    return 0 if result is False else brought
