"""RetryingBlobs: calls that a store could not take are made again, later and later."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from forkpoint.errors import StoreUnavailableError
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.wrappers.around import AroundBlobs

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How often, and after which pauses in seconds."""

    tries: int = 4
    """Calls in all."""
    first_seconds: float = 0.05
    factor: float = 2.0
    most_seconds: float = 2.0

    def pause(self, failures: int, jitter: float) -> float:
        """Seconds after so many failures (at least 1); `jitter` in [0, 1) takes up to a half off, so that callers that
        failed together do not come back together."""
        grown = min(self.most_seconds, self.first_seconds * self.factor ** (failures - 1))
        return grown * (1 - jitter / 2)


class RetryingBlobs(AroundBlobs):
    """Makes calls again that raised StoreUnavailableError: all of the port's may be. What is full, missing or broken
    for good is not tried again. A put whose answer was lost says False when the next try finds the blob."""

    def __init__(
        self,
        inner: BlobStore,
        backoff: Backoff | None = None,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__(inner)
        self._backoff = backoff or Backoff()
        self._rng = rng or random.Random()
        self._sleep = sleep
        self._closed = False
        self.retries = 0
        """Calls that were made again."""

    async def close(self) -> None:
        self._closed = True
        await super().close()

    async def _around(self, method: str, nbytes: int, call: Callable[[], Awaitable[T]]) -> T:
        failures = 0
        while True:
            try:
                return await call()
            except StoreUnavailableError:
                failures += 1
                if failures >= self._backoff.tries or self._closed or self.broken is not None:
                    raise
            await self._sleep(self._backoff.pause(failures, self._rng.random()))
            self.retries += 1
