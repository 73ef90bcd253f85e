"""Healing: a whole copy of a blob, from whichever tier of a stack has one, put over the copies that are not whole."""

import logging
from dataclasses import dataclass

from forkpoint.errors import BlobDamagedError, ForkpointError
from forkpoint.statestore.blobs import BlobStore, Buffer
from forkpoint.statestore.codec import decode
from forkpoint.statestore.threads import CODEC_THREADS, run_in
from forkpoint.statestore.tiers import Role, Tier, TieredBlobs
from forkpoint.statestore.wrappers.forward import innermost

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Healed:
    """A blob's raw bytes, and the tiers that got a whole copy, or could not be given one."""

    raw: Buffer
    healed: tuple[str, ...]
    failed: tuple[str, ...]


async def heal(blobs: BlobStore, digest: str, expected_bytes: int | None = None) -> Buffer | None:
    """The blob's raw bytes, all copies healed as far as they can be reached. See heal_copies."""
    healed = await heal_copies(blobs, digest, expected_bytes)
    return None if healed is None else healed.raw


async def heal_copies(blobs: BlobStore, digest: str, expected_bytes: int | None = None) -> Healed | None:
    """Look at every copy; put a whole one over each that is damaged, and into each durable tier that lacks the blob.
    None when no copy is whole, or `blobs` has no tiers."""
    stack = innermost(blobs)
    if not isinstance(stack, TieredBlobs):
        return None
    bad, whole = list[Tier](), None
    async for tier, frame in stack.copies(digest):
        raw = None if frame is None else await _open(digest, frame, expected_bytes)
        if frame is not None and raw is not None:
            whole = whole or (frame, raw)
        elif tier is not None and (frame is not None or tier.role is Role.DURABLE):
            bad.append(tier)
    if whole is None:
        return None
    healed, failed = list[str](), list[str]()
    for tier in bad:
        try:
            await tier.blobs.replace(digest, whole[0])
            healed.append(tier.label)
        except ForkpointError as error:
            failed.append(tier.label)
            log.warning("blob %s was not healed in %s: %s", digest, tier.label, error)
    return Healed(whole[1], tuple(healed), tuple(failed))


async def _open(digest: str, frame: bytes, expected_bytes: int | None) -> Buffer | None:
    try:
        return await run_in(CODEC_THREADS, lambda: decode(digest, frame, expected_bytes))
    except BlobDamagedError:
        return None
