"""A follower becomes the owner's session: what it lacks of the log is read, and what it knows is compared with it."""

import logging

from forkpoint.errors import ForkpointError
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.follower import Follower
from forkpoint.server.session.generation import RunningGeneration
from forkpoint.server.session.live import LiveSession
from forkpoint.server.session.logread import read_all, read_slices
from forkpoint.server.session.restore import numerics_of
from forkpoint.statestore.records import GenerationRow, SessionRow

log = logging.getLogger(__name__)


async def catch_up(core: NodeCore, follower: Follower, head: int, head_hash: bytes) -> bool:
    """Read what the follower does not know of a log that ends at `head`. Whether its log is that one now; one that is
    not ready, or that knows another past, can't be."""
    if follower.ready and follower.live.head < head:
        follower.take(await read_all(core.catalog, follower.name, follower.live.head, head))
    live = follower.live
    return follower.ready and (live.head, live.row.head_hash) == (head, head_hash)


async def adopt(core: NodeCore, live: LiveSession, row: GenerationRow) -> RunningGeneration:
    """Let the live session run an open generation, with what the log holds of it: all of it, though it may grow
    meanwhile."""
    generation = RunningGeneration(row, core.codec)
    while (position := generation.trail.position) < live.head:
        if live.tail.start <= position:
            generation.feed(live.tail.tokens(position, live.head))
            continue
        async for part in read_slices(core.catalog, live.name, position, live.head):
            generation.feed(part.token_ids)
    live.generation = generation
    return generation


async def fit_generation(core: NodeCore, live: LiveSession) -> None:
    """Let the live session run what the store has open: mostly it does already."""
    opened = await core.catalog.open_generation(live.name)
    if opened is None:
        live.generation = None
    elif live.generation is None or live.generation.row.generation != opened.generation:
        await adopt(core, live, opened)


def install(core: NodeCore, follower: Follower, row: SessionRow) -> LiveSession:
    """The follower's session is the node's own from now on, under the row's epoch."""
    live = follower.live
    live.note(row)
    del core.follows[follower.name]
    core.lives[follower.name] = live
    follower.owned = True
    if follower.tailing is not None:
        follower.tailing.cancel()
    live.wants_prefill = live.consumed < live.head
    live.slice_start, live.waiting_since = live.head, 0
    live.admitted = live.last_used = core.ticket()
    live.changed.fire()
    core.wake()
    return live


async def note_numerics(core: NodeCore, live: LiveSession) -> None:
    """Record which numerics ids the state passed through, where a restore of one's own would have done so."""
    ids = numerics_of(live, core.engine.facts.numerics_id)
    if ids is None:
        return
    try:
        live.note(await core.catalog.note_numerics(live.name, live.epoch, ids, live.row.exact and live.exact))
    except ForkpointError as error:
        log.warning("%s: the numerics that its state passed through were not recorded: %s", live.name, error)
