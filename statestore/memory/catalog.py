"""MemoryCatalog: the Catalog port over dictionaries."""

from collections.abc import Sequence
from dataclasses import replace

from forkpoint.errors import AlreadyExistsError, NotFoundError, PreconditionError
from forkpoint.ids import SessionName
from forkpoint.statestore.memory.collection import MemoryCollection
from forkpoint.statestore.records import CheckpointRow, ManifestRow, RequestKey
from forkpoint.statestore.rowjson import checkpoint_from_value, checkpoint_to_value
from forkpoint.statestore.rules import check_checkpoint, check_epoch


class MemoryCatalog(MemoryCollection):
    """See forkpoint.statestore.base.Catalog. Nothing outlives the process; for one event loop."""

    async def put_checkpoint(
        self,
        row: CheckpointRow,
        manifest: bytes,
        epoch: int,
        request: RequestKey | None = None,
        replace_manifest: bool = False,
        digests: Sequence[str] = (),
        since: int = 0,
    ) -> CheckpointRow:
        answer = self._answer(request, "put_checkpoint")
        if answer is not None:
            return checkpoint_from_value(answer)
        name = row.session
        stored = self._live(name)
        check_epoch(name, epoch, stored.row.epoch)
        check_checkpoint(row, stored.row.head)
        if self._chain_at(stored, row.grid_position).grid_hash != row.chain_hash:
            raise PreconditionError(f"{name}: the checkpoint's chain hash at {row.grid_position} is not the log's")
        tables, now = self._open(), self._clock.wall_us()
        if (name, row.checkpoint) in tables.checkpoints:
            raise AlreadyExistsError(f"{name}/checkpoints/{row.checkpoint}")
        self._check_digests(digests, since)
        saved = replace(row, create_us=now)
        if replace_manifest or self._manifest(row.manifest_key) is None:
            new = ManifestRow(row.numerics_id, row.grid_position, row.chain_hash, bytes(manifest), now)
            self._write_manifest(new)
        tables.checkpoints[name, row.checkpoint] = saved
        self._keep(request, "put_checkpoint", checkpoint_to_value(saved))
        return saved

    async def list_checkpoints(self, name: SessionName) -> list[CheckpointRow]:
        stored = self._live(name)
        rows = [
            row
            for (owner, _), row in self._open().checkpoints.items()
            if owner == name
            and row.grid_position <= stored.row.head
            and self._chain_at(stored, row.grid_position).grid_hash == row.chain_hash
        ]
        return sorted(rows, key=lambda row: (row.position, row.create_us, row.checkpoint))

    async def get_checkpoint(self, name: SessionName, checkpoint: str) -> tuple[CheckpointRow, bytes]:
        row = self._checkpoint(name, checkpoint)
        manifest = self._manifest(row.manifest_key)
        if manifest is None:
            raise NotFoundError(f"{name}/checkpoints/{checkpoint}", "has lost its manifest")
        return row, manifest.manifest

    async def delete_checkpoint(
        self, name: SessionName, checkpoint: str, request: RequestKey | None = None
    ) -> CheckpointRow:
        answer = self._answer(request, "delete_checkpoint")
        if answer is not None:
            return checkpoint_from_value(answer)
        row = self._checkpoint(name, checkpoint)
        del self._open().checkpoints[name, checkpoint]
        self._keep(request, "delete_checkpoint", checkpoint_to_value(row))
        return row

    def _checkpoint(self, name: SessionName, checkpoint: str) -> CheckpointRow:
        self._live(name)
        row = self._open().checkpoints.get((name, checkpoint))
        if row is None:
            raise NotFoundError(f"{name}/checkpoints/{checkpoint}")
        return row

    async def find_manifests(self, points: Sequence[tuple[int, bytes]]) -> list[ManifestRow]:
        wanted = set(points)
        rows = [row for row in self._open().manifests.values() if (row.grid_position, row.chain_hash) in wanted]
        return sorted(rows, key=lambda row: (-row.grid_position, row.numerics_id))

    # --- retention ---------------------------------------------------------------------------------------------
    async def scan_checkpoints(self, workflow: str, after: tuple[str, str] | None, limit: int) -> list[CheckpointRow]:
        rows = self._open().checkpoints
        keys = sorted((name.session, checkpoint) for name, checkpoint in rows if name.workflow == workflow)
        found = [key for key in keys if after is None or key > after]
        return [rows[SessionName(workflow, session), checkpoint] for session, checkpoint in found[:limit]]

    async def nearest_checkpoint(
        self, name: SessionName, position: int, numerics_id: str | None = None
    ) -> CheckpointRow | None:
        stored = self._load(name)
        limits = self._ancestry(name, min(position, stored.row.head))
        rows = [
            row
            for (maker, _), row in self._open().checkpoints.items()
            if row.grid_position <= limits.get(maker, -1)
            and numerics_id in (None, row.numerics_id)
            and self._chain_at(stored, row.grid_position).grid_hash == row.chain_hash
        ]
        order = {maker: index for index, maker in enumerate(limits)}
        rows.sort(key=lambda r: (-r.grid_position, order[r.session], r.position, r.create_us, r.checkpoint))
        return rows[0] if rows else None

    def _ancestry(self, name: SessionName, limit: int) -> dict[SessionName, int]:
        """The session and those it descends from, each with the highest position that may be shared with it."""
        limits: dict[SessionName, int] = {}
        current: SessionName | None = name
        while current is not None and current not in limits and current in self._open().sessions:
            limits[current] = limit
            row = self._load(current).row
            current, limit = row.parent, min(limit, row.fork_position)
        return limits

    async def lineage(self, workflow: str) -> int:
        return self._open().lineages.get(workflow, 0)

    async def drop_checkpoints(self, workflow: str, lineage: int, rows: Sequence[tuple[str, str]]) -> bool:
        if lineage != self._open().lineages.get(workflow, 0):
            return False
        for session, checkpoint in rows:
            self._open().checkpoints.pop((SessionName(workflow, session), checkpoint), None)
        return True
