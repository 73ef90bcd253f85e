"""What a follower makes of the log that it is told."""

import pytest

from forkpoint.server.session.follower import Follower
from forkpoint.server.session.generation import RunningGeneration
from forkpoint.server.session.ports import FollowAsk
from forkpoint.statestore.calls import AppendTokens
from forkpoint.statestore.chain import HashChain, root_hash
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.records import GenerationRow, Kind, LogSlice
from tests.support.hash_engine import ByteCodec
from tests.support.store import MARKER, PARAMS, name, owned

LOG = (10, 11, 12, 13)


async def followed() -> Follower:
    """A follower of a session of four prompt tokens, restored from nothing."""
    catalog = MemoryCatalog()
    await catalog.open(MARKER)
    await owned(catalog, "s")
    await catalog.append(AppendTokens(name("s"), 1, LOG))

    async def own(_: object) -> None:
        raise AssertionError("nobody takes it here")

    follower = Follower(await catalog.get_session(name("s")), FollowAsk(name("s"), 1, "i-a", "a:1"), 1, own)
    follower.live.tail.prepend(LogSlice(0, LOG, (Kind.PROMPT,) * 4, (None,) * 4))
    follower.live.chain = HashChain(0, root_hash(MARKER))
    follower.restored()
    return follower


@pytest.mark.parametrize("kind", Kind)
async def test_what_lies_before_a_generation_is_not_counted_for_it(kind: Kind) -> None:
    """It was learned of from the store before the owner told the last tokens of the one before, or its own input."""
    follower = await followed()
    running = RunningGeneration(GenerationRow("g", name("s"), "r", 6, PARAMS), ByteCodec())
    follower.live.generation = running
    follower.take(LogSlice(4, (97, 98), (kind,) * 2, (None,) * 2))
    assert follower.live.generation is running and running.trail.position == 6
    follower.take(LogSlice(6, (99,), (Kind.GENERATED,), (None,)))
    assert follower.live.generation is running and running.trail.position == 7
    assert follower.live.head == 7


async def test_a_run_that_reaches_into_a_generation_counts_from_its_start_on() -> None:
    follower = await followed()
    running = RunningGeneration(GenerationRow("g", name("s"), "r", 6, PARAMS), ByteCodec())
    follower.live.generation = running
    follower.take(LogSlice(4, (97, 98, 99, 100), (Kind.GENERATED,) * 4, (None,) * 4))
    assert running.trail.position == 8
