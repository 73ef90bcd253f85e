"""Two nodes whose blobs share a small disk: a full one costs checkpoints, never tokens, and room made is room used."""

import asyncio
from pathlib import Path

import pytest

from forkpoint.client.errors import RemoteError
from forkpoint.server.engine.batch import Sample
from tests.support.hash_engine import continuation
from tests.support.rpc_site import served, settled
from tests.support.small_disk import SmallDisk

GREEDY = Sample(0.0, 0, 1.0, 0.0, 0)
TEXT = "two nodes write their checkpoints to one disk, and it is full"


async def test_a_full_disk_of_blobs_stops_no_decode_and_only_who_asks_for_a_checkpoint_hears_of_it(
    tmp_path: Path, small_disk: SmallDisk
) -> None:
    blobs = f"file://{small_disk.folder}/blobs"
    async with (
        asyncio.timeout(90),
        served(tmp_path / "data", blobs=blobs, node="a") as first,
        served(tmp_path / "data", blobs=blobs, node="b", workflow=False) as second,
    ):
        sessions = [await site.session(f"s{number}", TEXT) for number, site in enumerate((first, second))]
        await asyncio.gather(*(settled(session) for session in sessions))
        await asyncio.to_thread(small_disk.fill)
        results = await asyncio.gather(*(session.generate(max_tokens=200).result() for session in sessions))
        assert all(result.token_ids == continuation(TEXT.encode(), 200, GREEDY)[0] for result in results)
        for session in sessions:
            with pytest.raises(RemoteError) as error:
                await session.checkpoint()
            assert (error.value.code, error.value.reason) == ("RESOURCE_EXHAUSTED", "STORE_FULL")
        failed = [site.running.node.counters.checkpoints_failed for site in (first, second)]
        assert all(failed), "the cadence tried and said so"
        await asyncio.to_thread(small_disk.free)
        for session in sessions:
            made = await session.checkpoint()
            assert made.name.startswith(session.name)
        for site in (first, second):
            assert site.running.blobs.broken is None, "without a restart"
