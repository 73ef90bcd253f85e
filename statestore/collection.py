"""The part of the catalog's port that garbage collection needs: manifests as a whole, pins, condemned blobs, and who
collects which tier.

How a blob is deleted without ever deleting one that a manifest names, whatever stalls or dies in between:

1. The collector of a tier (elected, under a term that fences it) scans the manifests and finds blobs that none names.
2. It **condemns** them: from then on put_checkpoint refuses a manifest that names one of them, so that only manifests
   committed before can name them. It scans what was committed since its first scan, and spares what is named there.
3. It deletes the others from the tier, durably, under its term.
4. It **absolves** all it condemned. Each absolution takes a number.

A saver reads the number of the last absolution before it asks for the first time whether a blob is there, and hands
it to put_checkpoint. A blob that was there when it asked and was deleted since is then either condemned still or
absolved under a higher number, and put_checkpoint refuses it: the saver looks again, stores it again, tries again.
"""

from collections.abc import Sequence
from typing import Protocol

from forkpoint.statestore.records import CollectorRow, ManifestKey, Pin, ScannedManifest


class CollectionCatalog(Protocol):
    """See forkpoint.statestore.base.Catalog, which this is a part of: each method is one transaction."""

    # --- manifests ---------------------------------------------------------------------------------------------
    async def scan_manifests(self, after: int, limit: int) -> list[ScannedManifest]:
        """Up to `limit` manifests of the whole store with a number above `after`, ascending. Numbers follow the order
        of commits: a scan that goes on until it finds nothing has seen all that were there when it began, and a later
        one from its last number sees exactly what was written or replaced since."""
        ...

    async def remove_manifest(self, key: ManifestKey) -> bool:
        """Forget a manifest that no checkpoint names and no pin holds. False, with nothing done, when it is held or
        not there. Its blobs stay."""
        ...

    async def pin(self, pin: Pin) -> None:
        """Hold a manifest until unpin. The same pin id again moves the pin. NotFoundError when the manifest is gone."""
        ...

    async def unpin(self, pin: str) -> None:
        """Let a manifest go. Idempotent."""
        ...

    async def list_pins(self) -> list[Pin]:
        """All pins, ascending by id: as many as there are restores under way."""
        ...

    # --- who collects ------------------------------------------------------------------------------------------
    async def get_collector(self, tier: str) -> CollectorRow:
        """Who collects a tier; term 0 and holder "" when nobody ever did."""
        ...

    async def list_collectors(self) -> list[CollectorRow]:
        """The rows of all tiers that anybody ever collected, ascending by tier."""
        ...

    async def elect_collector(self, tier: str, holder: str, expected_term: int) -> CollectorRow:
        """Make `holder` the tier's collector, term + 1, counter 1. StaleCollectorError unless the tier is at
        `expected_term`. Whether an earlier holder lives is the caller's to judge; its term is over either way."""
        ...

    async def renew_collector(self, tier: str, term: int) -> int:
        """Add one to the counter and return it. Raises StaleCollectorError."""
        ...

    async def resign_collector(self, tier: str, term: int) -> None:
        """Holder "" from now on; the term stays. Nothing happens when the term is over."""
        ...

    # --- condemned blobs ---------------------------------------------------------------------------------------
    async def condemn(self, tier: str, term: int, digests: Sequence[str]) -> None:
        """From now on put_checkpoint refuses manifests that name one of them. Idempotent. StaleCollectorError."""
        ...

    async def absolve(self, tier: str, term: int, digests: Sequence[str]) -> None:
        """Those of `digests` that this tier condemned are so no more, each noted under a number of its own, above all
        given before. Idempotent. Raises StaleCollectorError."""
        ...

    async def list_condemned(self, tier: str, after: str, limit: int) -> list[str]:
        """Up to `limit` digests that the tier condemned and did not absolve, ascending, above `after`: what an
        interrupted collection left."""
        ...

    async def absolutions(self) -> int:
        """Number of the last absolution, of whatever tier; 0 before the first."""
        ...

    async def forget_absolutions(self, upto: int) -> None:
        """Drop notes with numbers up to `upto`, at most the last. Then put_checkpoint refuses all the blobs of a saver
        that began before: it looks for them again, which is never wrong."""
        ...
