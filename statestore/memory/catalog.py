"""MemoryCatalog: the Catalog port over dictionaries."""

from collections.abc import Sequence
from dataclasses import replace

from forkpoint.errors import AlreadyExistsError, NotFoundError, PreconditionError
from forkpoint.ids import SessionName
from forkpoint.statestore.memory.log import MemoryLog
from forkpoint.statestore.records import CheckpointRow, ManifestRow, RequestKey
from forkpoint.statestore.rowjson import checkpoint_from_value, checkpoint_to_value
from forkpoint.statestore.rules import check_checkpoint, check_epoch


class MemoryCatalog(MemoryLog):
    """See forkpoint.statestore.base.Catalog. Nothing outlives the process; for one event loop."""

    async def put_checkpoint(
        self,
        row: CheckpointRow,
        manifest: bytes,
        epoch: int,
        request: RequestKey | None = None,
        replace_manifest: bool = False,
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
        saved = replace(row, create_us=now)
        if replace_manifest or _key(row) not in tables.manifests:
            new = ManifestRow(row.numerics_id, row.grid_position, row.chain_hash, bytes(manifest), now)
            tables.manifests[_key(row)] = new
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
        self._live(name)
        row = self._open().checkpoints.get((name, checkpoint))
        if row is None:
            raise NotFoundError(f"{name}/checkpoints/{checkpoint}")
        return row, self._open().manifests[_key(row)].manifest

    async def find_manifests(self, points: Sequence[tuple[int, bytes]]) -> list[ManifestRow]:
        wanted = set(points)
        rows = [row for row in await self.list_manifests() if (row.grid_position, row.chain_hash) in wanted]
        return sorted(rows, key=lambda row: (-row.grid_position, row.numerics_id))

    async def list_manifests(self) -> list[ManifestRow]:
        rows = self._open().manifests.values()
        return sorted(rows, key=lambda row: (-row.grid_position, row.chain_hash, row.numerics_id))


def _key(row: CheckpointRow) -> tuple[bytes, int, str]:
    return row.chain_hash, row.grid_position, row.numerics_id
