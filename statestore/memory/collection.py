"""Manifests as a whole, pins, condemned blobs and collectors of the in-memory catalog."""

from collections.abc import Sequence
from dataclasses import replace

from forkpoint.errors import NotFoundError
from forkpoint.statestore.errors import BlobsCondemnedError, StaleCollectorError
from forkpoint.statestore.memory.log import MemoryLog
from forkpoint.statestore.records import CollectorRow, ManifestKey, ManifestRow, Pin, ScannedManifest


class MemoryCollection(MemoryLog):
    """See forkpoint.statestore.collection.CollectionCatalog."""

    # --- manifests ---------------------------------------------------------------------------------------------
    async def scan_manifests(self, after: int, limit: int) -> list[ScannedManifest]:
        tables = self._open()
        held = self._held()
        numbers = sorted(number for number in tables.manifests if number > after)[:limit]
        rows = ((number, tables.manifests[number]) for number in numbers)
        return [ScannedManifest(number, row, row.key in held) for number, row in rows]

    async def remove_manifest(self, key: ManifestKey) -> bool:
        tables = self._open()
        if key not in tables.manifest_numbers or key in self._held():
            return False
        del tables.manifests[tables.manifest_numbers.pop(key)]
        return True

    def _held(self) -> set[ManifestKey]:
        tables = self._open()
        named = {row.manifest_key for row in tables.checkpoints.values()}
        return named | {pin.key for pin in tables.pins.values()}

    def _manifest(self, key: ManifestKey) -> ManifestRow | None:
        tables = self._open()
        number = tables.manifest_numbers.get(key)
        return None if number is None else tables.manifests[number]

    def _write_manifest(self, row: ManifestRow) -> None:
        """Add or replace, under the next number."""
        tables = self._open()
        tables.manifests.pop(tables.manifest_numbers.get(row.key, 0), None)
        tables.manifests_written += 1
        tables.manifest_numbers[row.key] = tables.manifests_written
        tables.manifests[tables.manifests_written] = row

    async def pin(self, pin: Pin) -> None:
        if self._manifest(pin.key) is None:
            raise NotFoundError(f"manifest {pin.key.chain_hash.hex()[:16]} at {pin.key.grid_position}")
        self._open().pins[pin.pin] = replace(pin, create_us=self._clock.wall_us())

    async def unpin(self, pin: str) -> None:
        self._open().pins.pop(pin, None)

    async def list_pins(self) -> list[Pin]:
        return sorted(self._open().pins.values(), key=lambda pin: pin.pin)

    # --- who collects ------------------------------------------------------------------------------------------
    async def get_collector(self, tier: str) -> CollectorRow:
        return self._open().collectors.get(tier, CollectorRow(tier, "", 0, 0))

    async def list_collectors(self) -> list[CollectorRow]:
        return sorted(self._open().collectors.values(), key=lambda row: row.tier)

    async def elect_collector(self, tier: str, holder: str, expected_term: int) -> CollectorRow:
        self._check_term(tier, expected_term)
        row = CollectorRow(tier, holder, expected_term + 1, 1)
        self._open().collectors[tier] = row
        return row

    async def renew_collector(self, tier: str, term: int) -> int:
        row = self._check_term(tier, term)
        self._open().collectors[tier] = replace(row, counter=row.counter + 1)
        return row.counter + 1

    async def resign_collector(self, tier: str, term: int) -> None:
        collectors = self._open().collectors
        if tier in collectors and collectors[tier].term == term:
            collectors[tier] = replace(collectors[tier], holder="")

    def _check_term(self, tier: str, term: int) -> CollectorRow:
        row = self._open().collectors.get(tier, CollectorRow(tier, "", 0, 0))
        if row.term != term:
            raise StaleCollectorError(tier, term, row.term)
        return row

    # --- condemned blobs ---------------------------------------------------------------------------------------
    async def condemn(self, tier: str, term: int, digests: Sequence[str]) -> None:
        self._check_term(tier, term)
        self._open().condemned.setdefault(tier, set()).update(digests)

    async def absolve(self, tier: str, term: int, digests: Sequence[str]) -> None:
        self._check_term(tier, term)
        tables = self._open()
        condemned = tables.condemned.get(tier, set())
        for digest in digests:
            if digest in condemned:
                condemned.discard(digest)
                tables.absolutions += 1
                tables.absolved[tables.absolutions] = digest

    async def list_condemned(self, tier: str, after: str, limit: int) -> list[str]:
        return sorted(digest for digest in self._open().condemned.get(tier, ()) if digest > after)[:limit]

    async def absolutions(self) -> int:
        return self._open().absolutions

    async def forget_absolutions(self, upto: int) -> None:
        absolved = self._open().absolved
        for number in [number for number in absolved if number <= upto]:
            del absolved[number]

    def _check_digests(self, digests: Sequence[str], since: int) -> None:
        """What put_checkpoint asks of its blobs. Raises BlobsCondemnedError."""
        tables = self._open()
        forgotten = min(tables.absolved, default=tables.absolutions + 1) - 1
        if digests and since < forgotten:
            raise BlobsCondemnedError(digests)
        gone = {digest for number, digest in tables.absolved.items() if number > since}
        refused = [digest for digest in digests if digest in gone.union(*tables.condemned.values())]
        if refused:
            raise BlobsCondemnedError(refused)
