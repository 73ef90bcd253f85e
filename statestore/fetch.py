"""Parts of a checkpoint, fetched and verified ahead of whoever takes them."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final, TypeAlias

from forkpoint.errors import BlobDamagedError, BlobError, BlobMissingError
from forkpoint.statestore.blobs import BlobStore, Buffer
from forkpoint.statestore.codec import decode
from forkpoint.statestore.heal import heal
from forkpoint.statestore.manifest import ManifestPart
from forkpoint.statestore.threads import CODEC_THREADS, run_in

AHEAD_PARTS_MAX: Final = 16
"""Parts fetched at once: enough to hide a disk's or a network's answer time behind one another."""
AHEAD_BYTES_MAX: Final = 64 * 1024 * 1024
"""Raw bytes that are being fetched, wait to be taken, or were taken last. With their frames, memory is at most twice
this."""
GROUP_BYTES_MAX: Final = 16 * 1024 * 1024
"""Of parts that come together: copying them takes some milliseconds, for which others wait."""

Fetched: TypeAlias = tuple[ManifestPart, Buffer | BlobError]
"""A part, and its raw bytes or what is wrong with its blob."""


async def fetch_ahead(blobs: BlobStore, parts: Sequence[ManifestPart]) -> AsyncGenerator[Fetched, None]:
    """Every part with its raw bytes or what is wrong with its blob, in order. While the caller works on one part, the
    next ones are fetched: as one is taken another is begun, within the two bounds above (one part goes beyond them)."""
    async with aclosing(fetch_groups(blobs, parts)) as groups:
        async for group in groups:
            for fetched in group:
                yield fetched


async def fetch_groups(blobs: BlobStore, parts: Sequence[ManifestPart]) -> AsyncGenerator[list[Fetched], None]:
    """As fetch_ahead, as many parts at a time as are there, up to GROUP_BYTES_MAX (one part goes beyond it): for a
    caller who waits for a turn each time."""
    window = deque[tuple[ManifestPart, asyncio.Task[Buffer | BlobError]]]()
    begun = ahead = 0

    def begin() -> None:
        nonlocal begun, ahead
        while begun < len(parts) and len(window) < AHEAD_PARTS_MAX:
            part = parts[begun]
            if ahead and ahead + part.spec.nbytes > AHEAD_BYTES_MAX:
                return
            # owner: this generator, which awaits it or, when it is closed, cancels it
            window.append((part, asyncio.create_task(_fetch(blobs, part))))
            begun, ahead = begun + 1, ahead + part.spec.nbytes

    try:
        begin()
        while window:
            await window[0][1]
            group, size = list[Fetched](), 0
            while (
                window and _is_there(window[0][1]) and (not group or size + window[0][0].spec.nbytes <= GROUP_BYTES_MAX)
            ):
                part, task = window.popleft()
                group.append((part, task.result()))
                size += part.spec.nbytes
            begin()
            yield group
            ahead -= size
            begin()
    finally:
        for _, task in window:
            task.cancel()
        await asyncio.gather(*(task for _, task in window), return_exceptions=True)


def _is_there(task: "asyncio.Task[Buffer | BlobError]") -> bool:
    """Whether it has an answer; one that failed is awaited, and raises there."""
    return task.done() and not task.cancelled() and task.exception() is None


async def _fetch(blobs: BlobStore, part: ManifestPart) -> Buffer | BlobError:
    try:
        frame = await blobs.get(part.digest)
        return await run_in(CODEC_THREADS, lambda: decode(part.digest, frame, part.spec.nbytes))
    except BlobMissingError as error:
        return error
    except BlobDamagedError as error:
        healed = await heal(blobs, part.digest, part.spec.nbytes)
        return error if healed is None else healed
