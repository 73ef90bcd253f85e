"""Healing: a whole copy of a blob, from whichever tier of a stack has one, put over the copies that are not whole."""

import logging

from forkpoint.errors import BlobDamagedError, ForkpointError
from forkpoint.statestore.blobs import BlobStore, Buffer
from forkpoint.statestore.codec import decode
from forkpoint.statestore.threads import CODEC_THREADS, run_in
from forkpoint.statestore.tiers import Tier, TieredBlobs
from forkpoint.statestore.wrappers.forward import innermost

log = logging.getLogger(__name__)


async def heal(blobs: BlobStore, digest: str, expected_bytes: int | None = None) -> Buffer | None:
    """The blob's raw bytes from a whole copy, after every damaged copy was replaced by it and every tier that lacks the
    blob was given it, as far as they can be reached. None when no copy is whole, or `blobs` has no tiers."""
    stack = innermost(blobs)
    if not isinstance(stack, TieredBlobs):
        return None
    bad, whole = list[Tier](), None
    async for tier, frame in stack.copies(digest):
        raw = None if frame is None else await _open(digest, frame, expected_bytes)
        if frame is not None and raw is not None:
            whole = whole or (frame, raw)
        elif tier is not None:
            bad.append(tier)
    if whole is None:
        return None
    for tier in bad:
        try:
            await tier.blobs.replace(digest, whole[0])
        except ForkpointError as error:
            log.warning("blob %s was not healed in %s: %s", digest, tier.label, error)
    return whole[1]


async def _open(digest: str, frame: bytes, expected_bytes: int | None) -> Buffer | None:
    try:
        return await run_in(CODEC_THREADS, lambda: decode(digest, frame, expected_bytes))
    except BlobDamagedError:
        return None
