"""FaultInjectingBlobs: a blob store that fails at random, and as its seed says. For tests and for trying out a site."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar, cast

from forkpoint.errors import StoreFullError, StoreUnavailableError
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.wrappers.around import AroundBlobs

T = TypeVar("T")

WRITES: Final = frozenset({"put", "replace"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRates:
    """Probabilities for each call, in [0, 1], and a pause in seconds."""

    before: float = 0.0
    """StoreUnavailableError, and nothing happened."""
    after: float = 0.0
    """StoreUnavailableError, though it happened: the answer is lost."""
    full: float = 0.0
    """StoreFullError of a put or replace, and nothing happened."""
    damage: float = 0.0
    """One bit of a frame that is read is flipped; the stored one stays whole."""
    pause_seconds: float = 0.0
    """The longest pause before a call; its length is random."""


class FaultInjectingBlobs(AroundBlobs):
    """Injects the faults of the port's contract, none else. `rates` may be changed at any time."""

    def __init__(self, inner: BlobStore, rates: FaultRates, seed: int = 0) -> None:
        super().__init__(inner)
        self.rates = rates
        self._rng = random.Random(seed)
        self.injected = 0
        """Faults so far."""

    async def _around(self, method: str, nbytes: int, call: Callable[[], Awaitable[T]]) -> T:
        rates = self.rates
        if rates.pause_seconds:
            await asyncio.sleep(self._rng.uniform(0, rates.pause_seconds))
        if self._hits(rates.before):
            raise StoreUnavailableError("blobs", "injected: not done")
        if method in WRITES and self._hits(rates.full):
            raise StoreFullError("blobs", "injected")
        result = await call()
        if self._hits(rates.after):
            raise StoreUnavailableError("blobs", "injected: the answer is lost")
        if isinstance(result, bytes) and result and self._hits(rates.damage):
            damaged = bytearray(result)
            damaged[self._rng.randrange(len(damaged))] ^= 1 << self._rng.randrange(8)
            return cast(T, bytes(damaged))
        return result

    def _hits(self, rate: float) -> bool:
        hit = self._rng.random() < rate
        self.injected += hit
        return hit
