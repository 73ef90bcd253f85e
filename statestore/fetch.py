"""Parts of a checkpoint, fetched and verified ahead of whoever takes them."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from forkpoint.errors import BlobDamagedError, BlobError, BlobMissingError
from forkpoint.statestore.blobs import BlobStore, Buffer
from forkpoint.statestore.codec import decode
from forkpoint.statestore.heal import heal
from forkpoint.statestore.manifest import ManifestPart
from forkpoint.statestore.threads import CODEC_THREADS, run_in

AHEAD_PARTS_MAX: Final = 16
"""Parts fetched at once: enough to hide a disk's or a network's answer time behind one another."""
AHEAD_BYTES_MAX: Final = 64 * 1024 * 1024
"""Raw bytes that are being fetched or wait to be taken. With their frames, memory is at most twice this."""


async def fetch_ahead(
    blobs: BlobStore, parts: Sequence[ManifestPart]
) -> AsyncGenerator[tuple[ManifestPart, Buffer | BlobError], None]:
    """Every part with its raw bytes or what is wrong with its blob, in order. While the caller works on one part, the
    next ones are fetched: as one is taken another is begun, within the two bounds above (one part goes beyond them)."""
    window = deque[tuple[ManifestPart, asyncio.Task[Buffer | BlobError]]]()
    begun = ahead = 0

    def begin() -> None:
        nonlocal begun, ahead
        while begun < len(parts) and len(window) < AHEAD_PARTS_MAX:
            part = parts[begun]
            if window and ahead + part.spec.nbytes > AHEAD_BYTES_MAX:
                return
            # owner: this generator, which awaits it or, when it is closed, cancels it
            window.append((part, asyncio.create_task(_fetch(blobs, part))))
            begun, ahead = begun + 1, ahead + part.spec.nbytes

    try:
        begin()
        while window:
            part, task = window.popleft()
            raw = await task
            ahead -= part.spec.nbytes
            begin()
            yield part, raw
    finally:
        for _, task in window:
            task.cancel()
        await asyncio.gather(*(task for _, task in window), return_exceptions=True)


async def _fetch(blobs: BlobStore, part: ManifestPart) -> Buffer | BlobError:
    try:
        frame = await blobs.get(part.digest)
        return await run_in(CODEC_THREADS, lambda: decode(part.digest, frame, part.spec.nbytes))
    except BlobMissingError as error:
        return error
    except BlobDamagedError as error:
        healed = await heal(blobs, part.digest, part.spec.nbytes)
        return error if healed is None else healed
