"""CheckpointStore: save a session's state as blobs and a manifest, and load it back verified.

The manifest is committed after every blob is durable, in one catalog transaction guarded by the epoch. Whatever
dies in between leaves blobs that no manifest names: waste, never a checkpoint that lacks something. A collector may
delete such blobs at any moment, also those that a save found there: then the catalog refuses the manifest, and the save
looks for them again (statestore/collection.py).
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from forkpoint.errors import BlobDamagedError, BlobError
from forkpoint.ids import SessionName
from forkpoint.parts import PartSpec
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore, Buffer
from forkpoint.statestore.errors import BlobsCondemnedError
from forkpoint.statestore.fetch import fetch_ahead, fetch_groups
from forkpoint.statestore.manifest import (
    Manifest,
    ManifestPart,
    StateIdentity,
    check_identity,
    manifest_of,
    match_parts,
    seal,
    unseal,
)
from forkpoint.statestore.partsaver import InStore, PartSaver, SavedPart
from forkpoint.statestore.records import CheckpointRow, Durability, RequestKey

CONDEMNED_TRIES: Final = 22
CONDEMNED_FIRST_SECONDS: Final = 0.05
CONDEMNED_MOST_SECONDS: Final = 2.0
"""Waits for a collector to delete what it condemned: it doubles from the first to the most, 33 seconds in all. One that
died is replaced sooner."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A committed checkpoint and what it cost."""

    row: CheckpointRow
    manifest: bytes
    parts: tuple[SavedPart, ...]
    bytes_stored: int
    """Frame bytes written."""
    bytes_shared: int
    """Raw bytes that were there already."""


@dataclass(frozen=True, slots=True)
class PartCheck:
    """What `verify` found for one part; `problem` is None when it is whole."""

    spec: PartSpec
    digest: str
    problem: str | None


class CheckpointStore:
    """Checkpoints over a catalog and a blob store. Safe for concurrent calls."""

    def __init__(
        self,
        catalog: Catalog,
        blobs: BlobStore,
        rest: Callable[[float], Awaitable[object]] = asyncio.sleep,
        compress: bool = True,
    ) -> None:
        """`rest` waits for seconds. `compress`: blobs are compressed where that pays, else never."""
        self._catalog = catalog
        self._rest = rest
        self._blobs = blobs
        self._saver = PartSaver(blobs, compress)

    @property
    def durability(self) -> Durability:
        """The class that a saved checkpoint reaches: its row and its blobs, so the lesser of the two."""
        order = list(Durability)
        return min(self._catalog.durability, self._blobs.durability, key=order.index)

    async def save(
        self,
        *,
        session: SessionName,
        epoch: int,
        checkpoint: str,
        position: int,
        grid_position: int,
        chain_hash: bytes,
        numerics_ids: Sequence[str],
        model_digest: bytes,
        tokenizer_digest: bytes,
        layout: str,
        parts: Sequence[tuple[PartSpec, Buffer | InStore]],
        automatic: bool = False,
        request: RequestKey | None = None,
        expire_us: int | None = None,
    ) -> SavedCheckpoint:
        """Store the state at `grid_position` as checkpoint `checkpoint` of a session.

        `numerics_ids` begins with the writer's own. The bytes of `parts` must not change until this returns. A part
        that an earlier checkpoint is known to have may be named by its digest alone: BlobMissingError says that this
        one is gone, and that the caller must come with the bytes. Raises
        what Catalog.put_checkpoint and BlobStore.put raise; then no checkpoint exists (blobs may be left over).
        BlobsCondemnedError only after many tries: whoever collects does not get on.
        """
        if not numerics_ids:
            raise ValueError("a checkpoint names at least the numerics id that wrote it")
        since = await self._catalog.absolutions()
        saved = await self._saver.save(parts)
        identity = StateIdentity(self._catalog.marker.namespace, model_digest, tokenizer_digest, layout)
        listed = tuple(ManifestPart(part.spec, part.digest) for part in saved)
        manifest = seal(Manifest(identity, tuple(numerics_ids), grid_position, chain_hash, listed))
        row = CheckpointRow(
            session, checkpoint, position, grid_position, chain_hash, numerics_ids[0], automatic, 0, expire_us
        )
        delay, digests = CONDEMNED_FIRST_SECONDS, [part.digest for part in saved]
        for left in reversed(range(CONDEMNED_TRIES)):
            heal = await self._stored_manifest_is_damaged(row)
            try:
                row = await self._catalog.put_checkpoint(row, manifest, epoch, request, heal, digests, since)
                break
            except BlobsCondemnedError:
                if not left:
                    raise
                await self._rest(delay)
                delay = min(CONDEMNED_MOST_SECONDS, 2 * delay)
                since = await self._catalog.absolutions()
                # All of them: what was there when we looked first may have been collected since, as well.
                saved = _merged(saved, await self._saver.save(parts))
        stored = sum(part.frame_bytes for part in saved)
        shared = sum(part.spec.nbytes for part in saved if part.shared)
        return SavedCheckpoint(row, manifest, saved, stored, shared)

    async def _stored_manifest_is_damaged(self, row: CheckpointRow) -> bool:
        """Whether an earlier checkpoint of this very state left a manifest that can't be read."""
        for stored in await self._catalog.find_manifests([(row.grid_position, row.chain_hash)]):
            if stored.numerics_id == row.numerics_id:
                try:
                    manifest_of(stored)
                except BlobDamagedError:
                    return True
        return False

    async def load(
        self, manifest: bytes, expected: Sequence[PartSpec], identity: StateIdentity | None = None
    ) -> AsyncGenerator[tuple[PartSpec, Buffer], None]:
        """The parts in the order of `expected`, each verified to the last bit. While the caller works on one (copies it
        to a device), the next ones are fetched.

        Before the first part the manifest is verified: StateIncompatibleError for another format version, part set,
        dtype or shape (and, when `identity` is given, another model, tokenizer, namespace or layout), BlobDamagedError
        when its bytes are damaged. Later BlobMissingError and BlobDamagedError name the part's blob: parts yielded
        before are whole, yet the state as a whole is not to be used.
        """
        async with aclosing(self.load_groups(manifest, expected, identity)) as groups:
            async for group in groups:
                for part in group:
                    yield part

    async def load_groups(
        self, manifest: bytes, expected: Sequence[PartSpec], identity: StateIdentity | None = None
    ) -> AsyncGenerator[list[tuple[PartSpec, Buffer]], None]:
        """As `load`, as many parts at a time as are there (some MiB at most, or one part): for a caller who waits for
        a turn each time, such as for a device between two steps."""
        found = unseal(manifest)
        if identity is not None:
            check_identity(found, identity)
        wanted = match_parts(found, expected)
        async with aclosing(fetch_groups(self._blobs, wanted)) as groups:
            async for group in groups:
                whole = list[tuple[PartSpec, Buffer]]()
                for part, raw in group:
                    if isinstance(raw, BlobError):
                        self._note(part, raw)
                        if whole:
                            yield whole
                        raise raw
                    whole.append((part.spec, raw))
                yield whole

    async def verify(self, manifest: bytes) -> AsyncGenerator[PartCheck, None]:
        """Fetch and verify every part: one result a part, in the manifest's order.

        Raises BlobDamagedError or StateIncompatibleError when the manifest itself is not good.
        """
        fetched = fetch_ahead(self._blobs, unseal(manifest).parts)
        async with aclosing(fetched):
            async for part, raw in fetched:
                self._note(part, raw)
                yield PartCheck(part.spec, part.digest, str(raw) if isinstance(raw, BlobError) else None)

    def _note(self, part: ManifestPart, found: Buffer | BlobError) -> None:
        if isinstance(found, BlobDamagedError):
            self._saver.note_damaged(part.digest)


def _merged(before: tuple[SavedPart, ...], now: tuple[SavedPart, ...]) -> tuple[SavedPart, ...]:
    """What was written at one of the two times was not there."""
    return tuple(was if part.shared else part for was, part in zip(before, now, strict=True))
