"""One collector a tier: whoever holds the tier's row and moves its counter.

As with leases, others judge it dead once the counter stood still for its time to live on their own clock. Should it be
stopped and wake up later, its term is over: the catalog refuses it, and so does the tier (BlobStore.fence).
"""

from typing import Final

from forkpoint.clock import Clock
from forkpoint.limits import COLLECTOR_RENEW_SECONDS, COLLECTOR_TTL_SECONDS
from forkpoint.statestore.collection import CollectionCatalog
from forkpoint.statestore.errors import StaleCollectorError

NOBODY: Final = 0
"""No term: terms begin at 1."""


class Election:
    """One candidate for one tier. `term` is NOBODY while another one collects."""

    def __init__(
        self,
        catalog: CollectionCatalog,
        tier: str,
        holder: str,
        clock: Clock,
        ttl_seconds: float = COLLECTOR_TTL_SECONDS,
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self._ttl_seconds = ttl_seconds
        self._seen: tuple[int, int] | None = None
        self._seen_at = 0.0
        self._dead_term = NOBODY
        self._renewed_at = 0.0
        self.tier = tier
        self.holder = holder
        self.term = NOBODY
        self.other = ""
        """Who collects instead."""

    async def stand(self) -> bool:
        """Become the tier's collector, or stay it, unless another one lives. Whether it is now."""
        if self.term != NOBODY:
            try:
                await self._renew()
            except StaleCollectorError:
                self.term = NOBODY
            else:
                return True
        row = await self._catalog.get_collector(self.tier)
        if row.holder not in ("", self.holder) and not self._is_dead(row.term, row.counter):
            self.other = row.holder
            return False
        try:
            self.term = (await self._catalog.elect_collector(self.tier, self.holder, row.term)).term
        except StaleCollectorError:
            return False
        self.other, self._renewed_at = "", self._clock.monotonic()
        return True

    def presume_dead(self, term: int) -> None:
        """Whoever was elected under `term` is known to be dead: the next stand need not wait. A mistake costs that one
        its work, as any other judgement does."""
        self._dead_term = term

    def _is_dead(self, term: int, counter: int) -> bool:
        now = self._clock.monotonic()
        if self._seen != (term, counter):
            self._seen, self._seen_at = (term, counter), now
        return term == self._dead_term or now - self._seen_at >= self._ttl_seconds

    async def keep(self) -> None:
        """Between two batches of work: renew when it is time. StaleCollectorError when the term is over."""
        if self._clock.monotonic() - self._renewed_at >= COLLECTOR_RENEW_SECONDS:
            await self._renew()

    async def _renew(self) -> None:
        await self._catalog.renew_collector(self.tier, self.term)
        self._renewed_at = self._clock.monotonic()

    async def resign(self) -> None:
        """Let another one collect at once."""
        term, self.term = self.term, NOBODY
        if term != NOBODY:
            await self._catalog.resign_collector(self.tier, term)
