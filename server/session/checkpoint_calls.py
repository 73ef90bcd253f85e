"""Checkpoints as callers ask for them."""

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

from forkpoint.errors import BlobMissingError, NotFoundError
from forkpoint.ids import SessionName, check_id, new_id
from forkpoint.server.session.api import CheckpointPart, CheckpointView, VerifiedPart
from forkpoint.server.session.checkpoint import Captured, Checkpointer
from forkpoint.server.session.claims import Claims
from forkpoint.server.session.live import LiveSession
from forkpoint.server.session.loop import StepLoop
from forkpoint.server.session.pins import Pins
from forkpoint.server.session.writers import REPLAY_EPOCH
from forkpoint.statestore.checkpoint import SavedCheckpoint
from forkpoint.statestore.manifest import unseal
from forkpoint.statestore.records import CheckpointRow, RequestKey

log = logging.getLogger(__name__)


class CheckpointCalls:
    """Create, get, list, delete, verify."""

    def __init__(self, claims: Claims, loop: StepLoop, checkpointer: Checkpointer, pins: Pins) -> None:
        self._claims = claims
        self._core = claims.core
        self._loop = loop
        self._checkpointer = checkpointer
        self._pins = pins

    async def create(
        self, name: SessionName, checkpoint: str, request: RequestKey | None, expire_us: int | None = None
    ) -> CheckpointView:
        """Pin the session's position; its state at the last grid point is stored when this returns. Retention drops it
        at `expire_us`."""
        if checkpoint:
            check_id(checkpoint, "checkpoint_id")
        checkpoint = checkpoint or new_id("c")
        async with self._claims.request(request) as stored:
            if stored:
                row = CheckpointRow(name, checkpoint, 0, 0, b"", "", False, 0)
                row = await self._core.catalog.put_checkpoint(row, b"", REPLAY_EPOCH, request)
                return await self._get_or_row(row)
            return await self._claims.owned(name, lambda live: self._create(live, checkpoint, request, expire_us))

    async def _create(
        self, live: LiveSession, checkpoint: str, request: RequestKey | None, expire_us: int | None
    ) -> CheckpointView:
        captured = await self._captured(live)
        try:
            saved = await self._save(captured, checkpoint, request, expire_us)
        except BlobMissingError as error:
            log.warning("%s: %s; its state is captured once more, as a whole", live.name, error)
            captured = await self._captured(live)
            saved = await self._save(captured, checkpoint, request, expire_us)
        live.known_grids.add(captured.state.grid_position)
        live.last_grid = max(live.last_grid, captured.state.grid_position)
        view = self._view(saved.row, saved.manifest)
        return replace(view, bytes_stored=saved.bytes_stored, bytes_shared=saved.bytes_shared)

    async def _captured(self, live: LiveSession) -> Captured:
        """The state at the session's head, as soon as the engine has it."""
        captured: Captured | None = None
        live.wanted += 1
        live.will_sample = live.generation is not None
        try:
            while captured is None:
                # A generation stays one token behind its head: what the log holds now is enough.
                behind = 1 if live.generation is not None else 0
                await self._claims.at_head(live, live.head - behind)
                captured = await self._loop.at_tick(lambda: self._take(live))
        finally:
            live.wanted -= 1
            self._core.wake()
        return captured

    async def _save(
        self, captured: Captured, checkpoint: str, request: RequestKey | None, expire_us: int | None
    ) -> SavedCheckpoint:
        return await self._checkpointer.save(
            captured, checkpoint, automatic=False, request=request, expire_us=expire_us
        )

    async def _take(self, live: LiveSession) -> Captured | None:
        """None when the session was parked since, or has grown by more than it consumed."""
        if live.gone is not None:
            raise live.gone
        if live.sequence is None or live.chain is None or live.consumed < live.head - 1:
            return None
        if live.generation is None and live.consumed < live.head:
            return None
        return await self._checkpointer.take(live, live.head)

    async def get(self, name: SessionName, checkpoint: str) -> CheckpointView:
        """Raises NotFoundError."""
        row, manifest = await self._core.catalog.get_checkpoint(name, checkpoint)
        return self._view(row, manifest)

    async def delete(self, name: SessionName, checkpoint: str, request: RequestKey | None) -> CheckpointView:
        """Take the checkpoint's row away; answers with it, without its parts. Raises NotFoundError."""
        async with self._claims.request(request):
            row = await self._core.catalog.delete_checkpoint(name, checkpoint, request)
        live = self._core.lives.get(name)
        if live is not None:
            # Nothing may hold that state any more: what we know to be stored must not keep us from storing it.
            live.known_grids.discard(row.grid_position)
            live.stored.digests.clear()
        return CheckpointView(row, (), (), 0, 0)

    async def _get_or_row(self, row: CheckpointRow) -> CheckpointView:
        """What a repeated create answers: the row alone once the checkpoint was deleted."""
        try:
            return await self.get(row.session, row.checkpoint)
        except NotFoundError:
            return CheckpointView(row, (), (), 0, 0)

    async def list(self, name: SessionName) -> list[CheckpointView]:
        """Ascending by position, with their parts."""
        rows = await self._core.catalog.list_checkpoints(name)
        return [await self.get(name, row.checkpoint) for row in rows]

    async def verify(self, name: SessionName, checkpoint: str) -> AsyncIterator[VerifiedPart]:
        """Every part, fetched and compared with its digest."""
        row, manifest = await self._core.catalog.get_checkpoint(name, checkpoint)
        async with self._pins.hold(row.manifest_key), aclosing(self._core.checkpoints.verify(manifest)) as checks:
            async for check in checks:
                part = CheckpointPart(check.spec.name, check.spec.nbytes, check.digest)
                yield VerifiedPart(part, check.problem or "")

    def _view(self, row: CheckpointRow, manifest: bytes) -> CheckpointView:
        found = unseal(manifest, f"{row.session}/checkpoints/{row.checkpoint}")
        parts = tuple(CheckpointPart(part.spec.name, part.spec.nbytes, part.digest) for part in found.parts)
        return CheckpointView(row, parts, found.numerics_ids, 0, 0, self._core.checkpoints.durability)
