"""Checkpoints in a real Redis that lost a part, holds what nobody of ours wrote, does not answer, or is not there."""

import asyncio
from pathlib import Path

import pytest

from forkpoint.errors import StoreUnavailableError
from forkpoint.server.engine.batch import Sample
from forkpoint.statestore.manifest import manifest_of
from forkpoint.statestore.scan import all_manifests
from tests.support.hash_engine import continuation
from tests.support.redis_servers import RedisServerProcess, free_port, redis_server
from tests.support.rpc_site import Served, served, settled

GREEDY = Sample(0.0, 0, 1.0, 0.0, 0)
TEXT = "checkpoints come and go, tokens stay, whatever became of them"
PRODUCT = "valkey"


def bomb(path: Path) -> bytes:
    """A pickle, written by hand, that makes a folder when it is loaded."""
    return b"cos\nmkdir\n(V" + str(path).encode() + b"\ntR."


def chunks_of(redis: RedisServerProcess, digest: str) -> list[bytes]:
    """Keys of a blob's chunks."""
    found = redis.command("KEYS", f"*{digest}:*")
    assert isinstance(found, list) and found
    return found


async def filled(site: Served) -> None:
    """A session with checkpoints at 32, 64 and 96."""
    session = await site.session("s", TEXT)
    await session.generate(max_tokens=40).result()
    await settled(session)
    while site.running.node.counters.checkpoints_written < 3:
        await asyncio.sleep(0.01)


async def newest_parts(site: Served) -> list[str]:
    """Digests that only the newest checkpoint names."""
    manifests = [manifest_of(scanned.row) async for scanned in all_manifests(site.running.catalog)]
    newest, *others = sorted(manifests, key=lambda manifest: -manifest.position)
    shared = {part.digest for manifest in others for part in manifest.parts}
    return [part.digest for part in newest.parts if part.digest not in shared]


@pytest.mark.parametrize("damage", ["evicted", "pickle"])
async def test_a_blob_that_lost_a_chunk_or_holds_a_pickle_costs_a_longer_replay(tmp_path: Path, damage: str) -> None:
    planted = tmp_path / "executed"
    with redis_server(PRODUCT) as redis:
        url = redis.url()
        async with asyncio.timeout(60), served(tmp_path / "data", blobs=url, durability="memory") as site:
            await filled(site)
            digests = await newest_parts(site)
        for key in chunks_of(redis, digests[0]):
            if damage == "evicted":
                redis.command("DEL", key)
            else:
                redis.command("SET", key, bomb(planted))
        folder = tmp_path / "data"
        async with (
            asyncio.timeout(60),
            served(folder, workflow=False, blobs=url, durability="memory") as again,
        ):
            session = again.client.sessions.open("workflows/w/sessions/s")
            resumed = await session.resume()
            assert (resumed.restored_tokens, resumed.exact) == (64, True)
            more = await session.generate(max_tokens=10).result()
            assert more.token_ids == continuation(TEXT.encode(), 50, GREEDY)[0][40:]
            assert again.running.node.counters.fallback_restores == 1
    assert not planted.exists()


@pytest.mark.parametrize("state", ["nobody listens", "stopped"])
async def test_a_server_whose_redis_is_not_there_says_so_instead_of_waiting(tmp_path: Path, state: str) -> None:
    with redis_server(PRODUCT) as redis:
        redis.pause()
        port = redis.port if state == "stopped" else free_port()
        url = f"redis://127.0.0.1:{port}/?timeout=0.3&connect_timeout=0.3"
        for number, (catalog, blobs) in enumerate(((url, ""), ("", url))):
            folder = tmp_path / str(number)
            async with asyncio.timeout(20):
                with pytest.raises(StoreUnavailableError) as error:
                    async with served(folder, durability="memory", catalog=catalog, blobs=blobs):
                        raise AssertionError("it serves")
            assert str(port) in str(error.value)
        redis.resume()


async def test_a_state_whose_parts_lie_in_different_tiers_is_the_same_state(tmp_path: Path) -> None:
    with redis_server(PRODUCT) as redis:
        url = f"host://1MiB file://{tmp_path}/near {redis.url()}"
        async with asyncio.timeout(60), served(tmp_path / "data", blobs=url, durability="memory") as site:
            await filled(site)
        near = sorted(path for path in (tmp_path / "near" / "blobs").rglob("*") if path.is_file())
        assert len(near) >= 4
        for path in near[::2]:
            path.unlink()
        async with (
            asyncio.timeout(60),
            served(tmp_path / "data", workflow=False, blobs=url, durability="memory") as again,
        ):
            session = again.client.sessions.open("workflows/w/sessions/s")
            resumed = await session.resume()
            assert (resumed.restored_tokens, resumed.exact) == (96, True)
            more = await session.generate(max_tokens=30).result()
            assert more.token_ids == continuation(TEXT.encode(), 70, GREEDY)[0][40:]
            assert again.running.node.counters.fallback_restores == 0
