"""Checkpoints: captured between steps, written in the background, never in the way of decoding."""

import logging
from dataclasses import dataclass, field

from forkpoint.errors import BlobMissingError, ForkpointError
from forkpoint.ids import SessionName, new_id
from forkpoint.parts import PartSpec
from forkpoint.server.engine.base import Capture
from forkpoint.server.session.changes import Signal
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.live import LiveSession
from forkpoint.server.session.stored_parts import StoredParts
from forkpoint.statestore.checkpoint import SavedCheckpoint
from forkpoint.statestore.partsaver import InStore
from forkpoint.statestore.records import RequestKey

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Captured:
    """A state in memory of its own, with what its manifest says."""

    session: SessionName
    epoch: int
    position: int
    chain_hash: bytes
    numerics_ids: tuple[str, ...]
    state: Capture
    stored: StoredParts
    """Of the sequence that it was taken of."""
    left_out: dict[str, str]
    """Names and digests of the parts that `state` may lack."""

    def parts(self) -> list[tuple[PartSpec, bytes | InStore]]:
        """All parts in layer order, with their bytes or their digest."""
        given = {spec.name: data for spec, data in self.state.parts}
        return [
            (spec, given[spec.name] if spec.name in given else InStore(self.left_out[spec.name]))
            for spec in self.state.specs
        ]


@dataclass(slots=True)
class Lane:
    """One session's writes: one in flight, and the newest that waits."""

    waiting: Captured | None = None
    done: Signal = field(default_factory=Signal)


class Checkpointer:
    """Takes captures in the engine thread and stores them. A failure is counted and logged: the log is the truth."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        self._lanes: dict[SessionName, Lane] = {}

    async def capture_if_due(self, live: LiveSession) -> None:
        """The cadence: exactly when `consumed` is a multiple of the session's every_tokens."""
        every = live.policy.every_tokens
        if every > 0 and live.sequence is not None and live.consumed > 0 and live.consumed % every == 0:
            await self.capture(live)

    async def capture(self, live: LiveSession) -> None:
        """Between steps: capture a resident session and write it in the background, unless the store has it."""
        chain = live.chain
        if live.sequence is None or chain is None or chain.grid_position == 0:
            return
        if chain.grid_position in live.known_grids:
            return
        try:
            captured = await self.take(live)
        except Exception as error:  # noqa: BLE001 - a capture that fails costs a longer replay, nothing else
            self._failed(live, chain.grid_position, error)
            return
        live.known_grids.add(captured.state.grid_position)
        lane = self._lanes.get(live.name)
        if lane is None:
            lane = self._lanes[live.name] = Lane(captured)
            live.is_saved = False
            self._core.tasks.spawn(self._write(live, lane), f"checkpoint {live.name}")
            return
        if lane.waiting is not None:
            live.known_grids.discard(lane.waiting.state.grid_position)
            self._core.counters.checkpoints_skipped += 1
        lane.waiting = captured

    async def take(self, live: LiveSession, position: int | None = None) -> Captured:
        """Between steps: the state at the last grid point, as checkpoint of `position` (None: what is consumed)."""
        assert live.sequence is not None and live.chain is not None
        chain_hash, consumed = live.chain.grid_hash, live.consumed
        live.stored = stored = live.stored.of(live.sequence)
        known = dict(stored.digests)
        state = await self._core.engine.capture(live.sequence, known)
        at = consumed if position is None else position
        return Captured(live.name, live.epoch, at, chain_hash, self._numerics(live), state, stored, known)

    async def save(
        self,
        captured: Captured,
        checkpoint: str,
        automatic: bool,
        request: RequestKey | None = None,
        expire_us: int | None = None,
    ) -> SavedCheckpoint:
        """Store it; raises what the store raises. BlobMissingError: a part that it was taken without is gone; the next
        capture has all of them."""
        facts = self._core.engine.facts
        try:
            saved = await self._core.checkpoints.save(
                session=captured.session,
                epoch=captured.epoch,
                checkpoint=checkpoint,
                position=captured.position,
                grid_position=captured.state.grid_position,
                chain_hash=captured.chain_hash,
                numerics_ids=captured.numerics_ids,
                model_digest=facts.model_digest,
                tokenizer_digest=facts.tokenizer_digest,
                layout=facts.layout_tag,
                parts=captured.parts(),
                automatic=automatic,
                request=request,
                expire_us=expire_us,
            )
        except BlobMissingError:
            captured.stored.digests.clear()
            raise
        captured.stored.note(((part.spec.name, part.digest) for part in saved.parts), captured.state.settled)
        counters = self._core.counters
        counters.checkpoints_written += 1
        counters.checkpoint_bytes_stored += saved.bytes_stored
        counters.checkpoint_bytes_shared += saved.bytes_shared
        return saved

    async def settle(self, live: LiveSession) -> None:
        """Until nothing of the session is being written."""
        while (lane := self._lanes.get(live.name)) is not None:
            await lane.done.wait()

    async def _write(self, live: LiveSession, lane: Lane) -> None:
        try:
            while lane.waiting is not None:
                captured, lane.waiting = lane.waiting, None
                await self._write_one(live, captured)
        finally:
            del self._lanes[live.name]
            live.is_saved = True
            lane.done.fire()

    async def _write_one(self, live: LiveSession, captured: Captured) -> None:
        grid = captured.state.grid_position
        try:
            await self.save(captured, new_id("c"), automatic=True)
        except Exception as error:  # noqa: BLE001 - logged and counted; the log has what it would have saved
            self._failed(live, grid, error)
        else:
            live.last_grid = max(live.last_grid, grid)

    def _failed(self, live: LiveSession, grid: int, error: Exception) -> None:
        self._core.counters.checkpoints_failed += 1
        live.known_grids.discard(grid)
        known = isinstance(error, ForkpointError)
        log.warning("checkpoint of %s at %d was not written: %s", live.name, grid, error, exc_info=not known)

    def _numerics(self, live: LiveSession) -> tuple[str, ...]:
        """Our id first, then the others that the state passed through."""
        ours = self._core.engine.facts.numerics_id
        return (ours, *(numerics for numerics in live.numerics_ids if numerics != ours))
