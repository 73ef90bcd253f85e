"""Errors that only a store raises, all of garbage collection.

ForkpointError
├── AbortedError
│   └── BlobsCondemnedError         a checkpoint names blobs that are about to be, or were just, deleted
└── PreconditionError
    ├── CollectedElsewhereError     another collector lives
    └── StaleCollectorError         another collector was elected
"""

from collections.abc import Sequence

from forkpoint.errors import AbortedError, PreconditionError


class BlobsCondemnedError(AbortedError):
    """A checkpoint names blobs that a collector condemned, or deleted since the saver looked for them: look for them
    again, and store again what is gone."""

    reason = "BLOBS_CONDEMNED"

    def __init__(self, digests: Sequence[str]) -> None:
        self.digests = tuple(digests)
        super().__init__(f"{len(self.digests)} blobs are being collected, {self.digests[0][:16]} among them")

    def facts(self) -> dict[str, str]:
        """Their number only: a checkpoint may name thousands."""
        return {"blobs": str(len(self.digests))}


class CollectedElsewhereError(PreconditionError):
    """Somebody else collects the tier, and lives as far as can be told."""

    reason = "COLLECTED_ELSEWHERE"

    def __init__(self, tier: str, holder: str) -> None:
        self.tier = tier
        self.holder = holder
        super().__init__(f"{holder or 'somebody else'} collects tier {tier}")


class StaleCollectorError(PreconditionError):
    """The collector's term is over: another one was elected for the tier."""

    reason = "STALE_COLLECTOR"

    def __init__(self, tier: str, term: int, current: int) -> None:
        self.tier = tier
        self.term = term
        self.current = current
        super().__init__(f"term {term} of the collector of {tier} is over: the tier is at {current}")
