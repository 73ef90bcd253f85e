"""Whether a frame that came from elsewhere is what its digest says."""

import logging

from forkpoint.errors import BlobDamagedError
from forkpoint.statestore.codec import decode
from forkpoint.statestore.threads import CODEC_THREADS, run_in

log = logging.getLogger(__name__)


async def is_whole(digest: str, frame: bytes) -> bool:
    """Verified to the last bit, in a thread; why not is logged."""
    try:
        await run_in(CODEC_THREADS, lambda: decode(digest, frame))
    except BlobDamagedError as error:
        log.warning("it is not used: %s", error)
        return False
    return True
