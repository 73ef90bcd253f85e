"""Restore: the newest usable checkpoint, then the log's tail. Resume, recovery, forks from the past: all are this."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from forkpoint.errors import (
    BlobError,
    LogCorruptError,
    NotFoundError,
    StateIncompatibleError,
    StoreUnavailableError,
)
from forkpoint.limits import TILE_TOKENS
from forkpoint.parts import PartSpec
from forkpoint.server.engine.base import Engine
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.live import LiveSession, Restored
from forkpoint.server.session.logread import read_all
from forkpoint.server.session.pins import Pins
from forkpoint.server.session.stored_parts import StoredParts
from forkpoint.statestore.blobs import Buffer
from forkpoint.statestore.chain import HashChain, grid_hashes, root_hash
from forkpoint.statestore.manifest import Manifest, StateIdentity, manifest_of
from forkpoint.statestore.records import LogSlice, ManifestRow

log = logging.getLogger(__name__)

POINTS_PER_LOOKUP: Final = 512
"""Grid points asked for in one transaction, the newest first: 8,192 tokens."""
REACH_AGAIN_SECONDS: Final = 5.0
"""Once blobs did not answer, short logs are replayed without asking them for so long: one session waits for their
timeout, not each."""


@dataclass(frozen=True, slots=True)
class Usable:
    """A checkpoint on the session's chain. `exact`: only our numerics id computed it."""

    row: ManifestRow
    manifest: Manifest
    exact: bool


class _SilentBlobsError(Exception):
    """The store of the blobs failed: the catalog may be well."""

    def __init__(self, error: StoreUnavailableError) -> None:
        super().__init__(str(error))
        self.error = error


class Restorer:
    """Puts a session's state onto the engine; the loop's prefill then replays what the log has beyond it."""

    def __init__(self, core: NodeCore, pins: Pins) -> None:
        self._core = core
        facts = core.engine.facts
        self._identity = StateIdentity(
            core.options.namespace, facts.model_digest, facts.tokenizer_digest, facts.layout_tag
        )
        self._pins = pins
        self._silent_until = 0.0
        """On our clock: until then no answer is expected of the blobs."""

    async def restore(self, live: LiveSession, follows: bool = False) -> Restored:
        """Restore to the newest usable checkpoint at or below the head; below it when the session will sample. While
        the store of blobs does not answer, a session whose log is short is replayed from its start instead.

        `follows`: for a follower, which writes nothing. An exact session stays exact then: its owner's state is, and
        goes on when nothing else will do.

        Raises NodeCapacityError, LogCorruptError, StoreUnavailableError; then the session holds no sequence.
        """
        head, head_hash = live.head, live.row.head_hash
        live.needed_from = head
        tokens = await read_all(self._core.catalog, live.name, 0, head)
        points = await asyncio.to_thread(grid_hashes, root_hash(self._core.marker), tokens.token_ids)
        self._check_head(live, tokens, points[-1], head_hash)
        limit = head - 1 if live.will_sample else head
        damaged: set[tuple[str, int]] = set()
        while True:
            exact_only = follows and live.row.exact
            known, usable = await self._choose([p for p in points if 0 < p[0] <= limit], head, damaged, exact_only)
            if usable is None or self._skips_blobs(head):
                engine, usable = self._core.engine, None
                sequence, size, stored = await engine.call(engine.engine.create), 0, StoredParts()
                break
            known = await self._kept(live, known)
            try:
                async with self._pins.hold(usable.row.key):
                    sequence, size, stored = await self._load(usable)
                break
            except (BlobError, StateIncompatibleError, NotFoundError) as error:
                damaged.add((usable.row.numerics_id, usable.row.grid_position))
                self._core.counters.fallback_restores += 1
                log.warning("%s: the checkpoint at %d is not usable: %s", live.name, usable.row.grid_position, error)
            except _SilentBlobsError as silent:
                self._silent_until = self._core.clock.monotonic() + REACH_AGAIN_SECONDS
                if not self._skips_blobs(head):
                    raise silent.error from silent
                self._core.counters.fallback_restores += 1
                log.warning("%s is replayed from its start: %s", live.name, silent.error)
        live.will_sample = True
        self._attach(live, tokens, points, sequence, usable, known)
        live.stored = stored
        restored = self._note(live, usable, head, size, len(damaged))
        if not follows:
            await self._record(live)
        return restored

    def _skips_blobs(self, head: int) -> bool:
        """Whether replaying all of the log is short, and the blobs did not answer a moment ago."""
        silent = self._core.clock.monotonic() < self._silent_until
        return silent and head <= self._core.options.replay_limit_tokens

    async def _kept(self, live: LiveSession, known: set[int]) -> set[int]:
        """Those of `known` whose checkpoint is the session's own or an ancestor's: they stay while it needs them. One
        that only a session with an equal prefix has may go at any time, and must not keep us from making our own."""
        ours, kept = self._core.engine.facts.numerics_id, set[int]()
        for grid in known:
            row = await self._core.catalog.nearest_checkpoint(live.name, grid, ours)
            if row is not None and row.grid_position == grid:
                kept.add(grid)
        return kept

    def _check_head(self, live: LiveSession, tokens: LogSlice, last: tuple[int, bytes], head_hash: bytes) -> None:
        """The log must hash to what the session's row says."""
        chain = HashChain(last[0], last[1])
        chain.extend(tokens.token_ids[last[0] :])
        if chain.head_hash() != head_hash:
            cause = "the tokens do not hash to the session's head hash"
            raise LogCorruptError(str(live.name), 0, 0, cause)

    async def _choose(
        self, points: Sequence[tuple[int, bytes]], head: int, damaged: set[tuple[str, int]], exact_only: bool
    ) -> tuple[set[int], Usable | None]:
        """Grid positions whose exact checkpoint is in the store (as far as looked), and the one to restore: the newest
        exact one, unless replaying from there is too long and other numerics left a newer one."""
        known: set[int] = set()
        foreign: Usable | None = None
        async for usable in self._usable(points, damaged):
            if usable.exact:
                known.add(usable.row.grid_position)
                too_long = head - usable.row.grid_position > self._core.options.replay_limit_tokens
                return known, foreign if foreign is not None and too_long else usable
            if not exact_only:
                foreign = foreign or usable
        if foreign is not None and head > self._core.options.replay_limit_tokens:
            return known, foreign
        return known, None

    async def _usable(
        self, points: Sequence[tuple[int, bytes]], damaged: set[tuple[str, int]]
    ) -> AsyncIterator[Usable]:
        """Checkpoints on the chain, the newest first, ours before others' at one position."""
        ours = self._core.engine.facts.numerics_id
        for end in range(len(points), 0, -POINTS_PER_LOOKUP):
            rows = await self._core.catalog.find_manifests(points[max(0, end - POINTS_PER_LOOKUP) : end])
            for row in sorted(rows, key=lambda r: (-r.grid_position, r.numerics_id != ours, r.numerics_id)):
                if (row.numerics_id, row.grid_position) in damaged:
                    continue
                try:
                    manifest = manifest_of(row)
                except (BlobError, StateIncompatibleError) as error:
                    damaged.add((row.numerics_id, row.grid_position))
                    self._core.counters.fallback_restores += 1
                    log.warning("a manifest at %d is not usable: %s", row.grid_position, error)
                    continue
                yield Usable(row, manifest, manifest.numerics_ids == (ours,))

    async def _load(self, usable: Usable) -> tuple[int, int, StoredParts]:
        """A sequence with the checkpoint's state, its bytes, and what the store has of it. When it raises, nothing is
        left on the engine."""
        call, port = self._core.engine.call, self._core.engine.engine
        grid = usable.row.grid_position
        expected, settled = await call(port.parts, grid), frozenset(await call(port.settled_parts, grid))
        sequence = await call(port.begin_restore, grid)
        began = self._core.clock.monotonic()
        size = 0
        try:
            async with aclosing(self._parts(usable, expected)) as groups:
                async for group in groups:
                    # One turn of the engine's for all that are there: while it steps, each turn costs a step's time.
                    await call(load_parts, port, sequence, group)
                    size += sum(len(data) for _, data in group)
            await call(port.end_restore, sequence)
        except BaseException:
            await call(port.free, sequence)
            raise
        self._core.counters.note_load(size, self._core.clock.monotonic() - began)
        stored = StoredParts(sequence)
        stored.note(((part.spec.name, part.digest) for part in usable.manifest.parts), settled)
        return sequence, size, stored

    async def _parts(
        self, usable: Usable, expected: tuple[PartSpec, ...]
    ) -> AsyncGenerator[list[tuple[PartSpec, Buffer]], None]:
        load = self._core.checkpoints.load_groups
        try:
            async with aclosing(load(usable.row.manifest, expected, self._identity)) as groups:
                async for group in groups:
                    yield group
        except StoreUnavailableError as error:
            raise _SilentBlobsError(error) from error

    def _attach(
        self,
        live: LiveSession,
        tokens: LogSlice,
        points: Sequence[tuple[int, bytes]],
        sequence: int,
        usable: Usable | None,
        known: set[int],
    ) -> None:
        position = 0 if usable is None else usable.row.grid_position
        live.sequence = sequence
        live.tail.prepend(
            LogSlice(position, tokens.token_ids[position:], tokens.kinds[position:], tokens.logprobs[position:])
        )
        live.consumed = live.needed_from = position
        live.chain = HashChain(position, points[position // TILE_TOKENS][1])
        live.can_sample = False
        live.known_grids = known
        live.last_grid = position

    def _note(self, live: LiveSession, usable: Usable | None, head: int, size: int, fallbacks: int) -> Restored:
        """Count it, and note which numerics the state passed through."""
        position = 0 if usable is None else usable.row.grid_position
        exact = usable is None or usable.exact
        ours = self._core.engine.facts.numerics_id
        live.numerics_ids = (ours,) if usable is None or usable.exact else usable.manifest.numerics_ids
        counters = self._core.counters
        counters.restores += 1
        counters.restored_tokens += position
        counters.restored_bytes += size
        counters.inexact_restores += not exact
        live.exact = exact
        source = "empty" if usable is None else "checkpoint"
        live.restored = Restored(position, head - position, size, source, exact, fallbacks)
        return live.restored

    async def _record(self, live: LiveSession) -> None:
        """Record on the session which numerics its state passed through."""
        ids = numerics_of(live, self._core.engine.facts.numerics_id)
        if ids is not None:
            live.note(await self._core.catalog.note_numerics(live.name, live.epoch, ids, live.row.exact and live.exact))


def load_parts(engine: Engine, sequence: int, parts: Sequence[tuple[PartSpec, Buffer]]) -> None:
    """In the engine's thread: fill these parts. Raises what load_part raises."""
    for spec, data in parts:
        engine.load_part(sequence, spec, data)


def numerics_of(live: LiveSession, ours: str) -> tuple[str, ...] | None:
    """Numerics ids that the session's row is to name; None when it says all there is to say."""
    ids = tuple(dict.fromkeys((*live.row.numerics_ids, ours, *live.numerics_ids)))
    return None if ids == live.row.numerics_ids and (live.exact or not live.row.exact) else ids
