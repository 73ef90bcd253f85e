"""The mark of a collection: which blobs the manifests name."""

from collections.abc import AsyncGenerator, Collection

from forkpoint.errors import BlobDamagedError, StateIncompatibleError
from forkpoint.statestore.collection import CollectionCatalog
from forkpoint.statestore.gcreport import CollectionReport
from forkpoint.statestore.manifest import digests_in
from forkpoint.statestore.records import ManifestKey, ManifestRow
from forkpoint.statestore.scan import all_manifests


class Mark:
    """Blobs that some manifest names. Manifests that nothing holds are removed on the way."""

    def __init__(
        self, catalog: CollectionCatalog, report: CollectionReport, supposed: Collection[ManifestKey] | None = None
    ) -> None:
        """`supposed`: the manifests that would be held; then nothing is removed."""
        self._catalog = catalog
        self._report = report
        self._supposed = supposed
        self._last = 0
        self.named: set[bytes] = set()

    async def run(self) -> AsyncGenerator[None, None]:
        """Go through all manifests, a step each. Afterwards `named` is complete as of the beginning, unless the report
        says what stood in the way."""
        async for scanned in all_manifests(self._catalog):
            self._last = scanned.number
            key = scanned.row.key
            if await self._is_dropped(key, scanned.held):
                self._report.manifests_removed += 1
                if self._supposed is not None:
                    self._report.removed.append(key)
            else:
                self._report.manifests_kept += 1
                self._note(scanned.row)
            self._report.blobs_marked = len(self.named)
            yield

    async def _is_dropped(self, key: ManifestKey, held: bool) -> bool:
        if self._supposed is not None:
            return key not in self._supposed
        return not held and await self._catalog.remove_manifest(key)

    async def catch_up(self) -> None:
        """Add what was written since."""
        async for scanned in all_manifests(self._catalog, self._last):
            self._last = scanned.number
            self._note(scanned.row)

    def _note(self, row: ManifestRow) -> None:
        """A manifest that can't be read may name any blob: then none is deleted."""
        where = f"manifest {row.chain_hash.hex()[:16]} at {row.grid_position}"
        try:
            self.named.update(digests_in(row.manifest, where))
        except (BlobDamagedError, StateIncompatibleError) as error:
            self._report.stopped = f"which blobs {where} names can't be read: {error}"
