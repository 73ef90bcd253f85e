"""The first half of a collection: checkpoints that retention, or the tier's budget, does not keep."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from forkpoint.clock import Clock
from forkpoint.errors import BlobDamagedError, StateIncompatibleError
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.budget import evict
from forkpoint.statestore.gcreport import CollectionReport
from forkpoint.statestore.manifest import digests_in
from forkpoint.statestore.records import CheckpointRow, ManifestKey
from forkpoint.statestore.retention import Drop, RetentionPolicy, Verdict
from forkpoint.statestore.scan import all_manifests, stored_sizes
from forkpoint.statestore.thinning import Thinned, all_workflows, drop, thin

Row = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Retirement:
    """Drops the checkpoints of a whole store that are not to stay; in a dry run it drops none."""

    catalog: Catalog
    blobs: BlobStore
    policy: RetentionPolicy
    budget_bytes: int
    """0: any amount."""
    clock: Clock
    report: CollectionReport
    kept: set[ManifestKey]
    """Filled with the manifests of checkpoints that stay."""

    async def run(self) -> AsyncGenerator[None, None]:
        """Workflow by workflow, a step each; then the budget."""
        serving = {node.numerics_id for node in await self.catalog.list_nodes()}
        now_us, dry_run = self.clock.wall_us(), self.report.dry_run
        judged: list[Thinned] = []
        async for workflow in all_workflows(self.catalog):
            one = await thin(self.catalog, workflow, self.policy, serving, now_us, dry_run)
            self._note(one)
            if self.budget_bytes:
                judged.append(one)
            yield
        if self.budget_bytes:
            await self._fit(judged)
            yield

    def _note(self, one: Thinned) -> None:
        report = self.report
        report.workflows_left += not (one.done or report.dry_run)
        for verdict in one.verdicts:
            if isinstance(verdict.reason, Drop):
                self._drop(verdict)
            else:
                report.checkpoints_kept += 1
                self.kept.add(verdict.row.manifest_key)

    def _drop(self, verdict: Verdict) -> None:
        reason = verdict.reason
        assert isinstance(reason, Drop)
        self.report.checkpoints_dropped[reason] = self.report.checkpoints_dropped.get(reason, 0) + 1
        if self.report.dry_run:
            self.report.dropped.append(verdict)

    async def _fit(self, judged: list[Thinned]) -> None:
        """Drop what the budget does not allow, unless the tree has grown: then the next collection does."""
        pinned = {pin.key for pin in await self.catalog.list_pins()}
        blobs = await self._names(self.kept | pinned)
        staying = [verdict for one in judged for verdict in one.verdicts if verdict.stays]
        gone, self.report.bytes_over_budget = evict(
            staying, blobs, await stored_sizes(self.blobs), pinned, self.budget_bytes
        )
        rows = {_row(verdict.row) for verdict in gone}
        for one in judged:
            theirs = [replace(v, reason=Drop.OVER_BUDGET) for v in one.verdicts if v.stays and _row(v.row) in rows]
            if theirs and (self.report.dry_run or await drop(self.catalog, one.workflow, one.lineage, theirs)):
                for verdict in theirs:
                    self._drop(verdict)
                    self.report.checkpoints_kept -= 1
                    self.kept.discard(verdict.row.manifest_key)

    async def _names(self, keys: set[ManifestKey]) -> dict[ManifestKey, list[bytes]]:
        """What the manifests name. One that can't be read seems to name nothing; the mark will report it."""
        found: dict[ManifestKey, list[bytes]] = {}
        async for scanned in all_manifests(self.catalog):
            if scanned.row.key in keys:
                try:
                    found[scanned.row.key] = digests_in(scanned.row.manifest)
                except (BlobDamagedError, StateIncompatibleError):
                    found[scanned.row.key] = []
        return found


def _row(row: CheckpointRow) -> Row:
    return row.session.workflow, row.session.session, row.checkpoint
