"""The store of blobs does not answer, the catalog does: sessions whose log is short are replayed from it."""

from dataclasses import replace

import pytest

from forkpoint.errors import StoreUnavailableError
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import GenerateCall
from forkpoint.statestore.records import CheckpointPolicy
from tests.support.faults import FaultyBlobs
from tests.support.hash_engine import continuation
from tests.support.session_site import FAST, Site, key

GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)
PROMPT = list(b"a log is shorter than the wait for what it would give")
SILENT = StoreUnavailableError("blobs", "no answer in time")


async def test_sessions_are_replayed_while_blobs_do_not_answer_and_restored_once_they_do(disk: Site) -> None:
    blobs = FaultyBlobs(disk.blobs)
    disk.blobs = blobs
    first = await disk.node()
    await first.workflow()
    names = [await first.session(f"s{number}", policy=CheckpointPolicy(16)) for number in range(4)]
    for number, name in enumerate(names):
        await first.append(name, [number, *PROMPT])
        await first.idle(name)
    await first.stop()
    second = await disk.node()
    blobs.errors["get"] = SILENT
    for number, name in enumerate(names[:3]):
        read = await second.generate(GenerateCall(name, key(f"g{number}"), max_tokens=10))
        assert read.tokens == continuation([number, *PROMPT], 10, GREEDY)[0]
    assert second.node.counters.restored_tokens == 0
    assert second.node.counters.fallback_restores == 1, "the others did not ask again"
    await second.stop()
    del blobs.errors["get"]
    third = await disk.node()
    assert (await third.node.resume(names[3], None)).restored_tokens == 48


async def test_a_long_log_waits_for_its_blobs(disk: Site) -> None:
    blobs = FaultyBlobs(disk.blobs)
    disk.blobs = blobs
    first = await disk.node()
    await first.workflow()
    name = await first.session("s", policy=CheckpointPolicy(16))
    await first.append(name, PROMPT)
    await first.idle(name)
    await first.stop()
    second = await disk.node(options=replace(FAST, replay_limit_tokens=len(PROMPT) - 1))
    blobs.errors["get"] = SILENT
    with pytest.raises(StoreUnavailableError):
        await second.node.resume(name, None)
    del blobs.errors["get"]
    assert (await second.node.resume(name, None)).restored_tokens == 48
