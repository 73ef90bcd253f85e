"""The real server over real Redis-compatible servers that stall, die, fill up and forget."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forkpoint.cli.demo.server import ServerProcess
from forkpoint.client.client import Client
from forkpoint.client.errors import RemoteError
from forkpoint.server.engine.batch import Sample
from tests.support.hash_engine import continuation
from tests.support.redis_servers import RedisServerProcess, redis_server
from tests.support.redis_stores import DURABLE
from tests.support.rpc_site import Served, served

GREEDY = Sample(0.0, 0, 1.0, 0.0, 0)
TEXT = "a prompt that is longer than one tile of the state"
PRODUCT = "valkey"


@asynccontextmanager
async def over_redis(folder: Path, redis: RedisServerProcess, workflow: bool = True) -> AsyncIterator[Served]:
    """A server whose catalog is in Redis and whose blobs are files."""
    async with served(folder, workflow=workflow, catalog=redis.url("timeout=1&connect_timeout=1")) as site:
        yield site


def aof_of(redis: RedisServerProcess) -> Path:
    """The file that the server appends to."""
    (path,) = redis.folder.glob("appendonlydir/*.incr.aof")
    return path


# --- blobs in Redis ------------------------------------------------------------------------------------------------
async def test_a_stalled_redis_for_blobs_stalls_no_decode_and_takes_checkpoints_again(tmp_path: Path) -> None:
    with redis_server(PRODUCT, *DURABLE) as redis:
        url = redis.url("timeout=1&connect_timeout=1")
        async with asyncio.timeout(60), served(tmp_path / "data", blobs=url) as site:
            counters = site.running.node.counters
            names = [await site.session(f"s{number}", TEXT) for number in range(3)]
            redis.pause()
            generations = [session.generate(max_tokens=400) for session in names]
            results = await asyncio.gather(*(generation.result() for generation in generations))
            expected = continuation(TEXT.encode(), 400, GREEDY)[0]
            assert all(result.token_ids == expected for result in results), "decode went on while Redis was stopped"
            stored = counters.checkpoints_written
            redis.resume()
            again = await names[0].generate(max_tokens=64).result()
            assert expected + again.token_ids == continuation(TEXT.encode(), 464, GREEDY)[0]
            while counters.checkpoints_written <= stored:
                await asyncio.sleep(0.02)


async def test_a_checkpoint_that_is_asked_for_while_redis_is_stalled_is_refused_and_works_afterwards(
    tmp_path: Path,
) -> None:
    with redis_server(PRODUCT, *DURABLE) as redis:
        url = redis.url("timeout=0.3&connect_timeout=0.3")
        async with asyncio.timeout(60), served(tmp_path / "data", blobs=url, checkpoint_every=0) as site:
            session = await site.session("s", TEXT)
            await session.generate(max_tokens=20).result()
            redis.pause()
            with pytest.raises(RemoteError) as error:
                await session.checkpoint()
            assert error.value.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
            redis.resume()
            while True:
                try:
                    await session.checkpoint()
                    break
                except RemoteError:
                    await asyncio.sleep(0.05)


# --- the catalog in Redis ------------------------------------------------------------------------------------------
async def test_a_redis_that_is_killed_and_started_again_costs_a_pause_and_nothing_else(tmp_path: Path) -> None:
    with redis_server(PRODUCT, *DURABLE) as redis:
        async with asyncio.timeout(90), over_redis(tmp_path / "data", redis) as site:
            site.engine.step_pause = 0.003
            session = await site.session("s", TEXT)
            generation = session.generate(max_tokens=300, patience_s=60)
            async for _ in generation:
                if len(generation.token_ids) >= 30:
                    break
            seen = list(generation.token_ids)
            redis.kill()
            await asyncio.sleep(0.5)
            with pytest.raises(RemoteError) as error:
                await site.client.sessions.open("workflows/w/sessions/other").append(text="x", timeout_s=2)
            assert error.value.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
            redis.start()
            await generation.result()
            assert generation.token_ids == continuation(TEXT.encode(), 300, GREEDY)[0]
            assert generation.token_ids[: len(seen)] == seen
            assert site.running.catalog.broken is None, "the same process serves on"
            read = await session.tokens(len(TEXT)).result()
            assert read.token_ids == generation.token_ids


async def test_a_redis_without_memory_refuses_clearly_and_decode_goes_on_once_there_is_room(tmp_path: Path) -> None:
    with redis_server(PRODUCT, *DURABLE) as redis:
        async with asyncio.timeout(90), over_redis(tmp_path / "data", redis) as site:
            session = await site.session("s", TEXT)
            first = await session.generate(max_tokens=40).result()
            redis.command("CONFIG", "SET", "maxmemory", 1)
            with pytest.raises(RemoteError) as error:
                await session.append(text="more", timeout_s=5)
            assert (error.value.code, error.value.reason) == ("RESOURCE_EXHAUSTED", "STORE_FULL")
            read = await session.tokens(len(TEXT)).result()
            assert read.token_ids == first.token_ids, "what was acknowledged can be read"
            redis.command("CONFIG", "SET", "maxmemory", 0)
            again = await session.generate(max_tokens=40).result()
            assert first.token_ids + again.token_ids == continuation(TEXT.encode(), 80, GREEDY)[0]


async def test_a_generation_that_meets_a_full_redis_ends_clearly_and_goes_on_where_it_was(tmp_path: Path) -> None:
    with redis_server(PRODUCT, *DURABLE) as redis:
        async with asyncio.timeout(90), over_redis(tmp_path / "data", redis) as site:
            site.engine.step_pause = 0.003
            session = await site.session("s", TEXT)
            generation = session.generate(max_tokens=200, request_id="g")
            async for _ in generation:
                if len(generation.token_ids) >= 20:
                    break
            redis.command("CONFIG", "SET", "maxmemory", 1)
            with pytest.raises(RemoteError) as error:
                await generation.result()
            assert (error.value.code, error.value.reason) == ("RESOURCE_EXHAUSTED", "STORE_FULL")
            redis.command("CONFIG", "SET", "maxmemory", 0)
            again = session.generate(max_tokens=200, request_id="g")
            while again.finished is None:
                try:
                    await again.result()
                except RemoteError as refused:
                    assert refused.reason == "STORE_FULL", refused
                    await asyncio.sleep(0.05)
                    again = session.generate(max_tokens=200, request_id="g")
            expected = continuation(TEXT.encode(), 200, GREEDY)[0]
            assert again.token_ids == expected
            assert generation.token_ids == expected[: len(generation.token_ids)], "what was seen stays"


@pytest.mark.parametrize("restarted", [True, False], ids=["another server", "the same server"])
async def test_a_tail_that_redis_lost_is_data_loss_with_both_positions(tmp_path: Path, restarted: bool) -> None:
    with redis_server(PRODUCT, *DURABLE) as redis:
        async with asyncio.timeout(90), over_redis(tmp_path / "data", redis) as site:
            session = await site.session("s", TEXT)
            kept = aof_of(redis).stat().st_size
            answer = await session.append(text="acknowledged and lost")
            assert answer.head == len(TEXT) + 21
            if not restarted:
                lose_tail(redis, kept)
                await expect_data_loss(site, answer.head, answer.head_hash)
        if restarted:
            lose_tail(redis, kept)
            async with over_redis(tmp_path / "data", redis, workflow=False) as again:
                await expect_data_loss(again, answer.head, answer.head_hash)


def lose_tail(redis: RedisServerProcess, size: int) -> None:
    """As a disk that lied about a sync: the server comes back without what it wrote last."""
    redis.kill()
    with aof_of(redis).open("r+b") as file:
        file.truncate(size)
    redis.start()


async def expect_data_loss(site: Served, head: int, head_hash: bytes) -> None:
    """The next append of a client that knows more is refused, and says so; nothing is written."""
    session = site.client.sessions.open("workflows/w/sessions/s")
    async with asyncio.timeout(30):
        while True:
            try:
                await session.append(text="next", expected_position=head, expected_head_hash=head_hash, timeout_s=3)
            except RemoteError as error:
                if error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED"):
                    await asyncio.sleep(0.1)
                    continue
                assert (error.code, error.reason) == ("DATA_LOSS", "LOG_TAIL_MISSING"), error
                assert error.metadata["client_position"] == str(head)
                assert error.metadata["head"] == str(len(TEXT))
                break
            raise AssertionError("a client that lost tokens was let go on")
    assert (await session.get()).head == len(TEXT)


# --- real processes ------------------------------------------------------------------------------------------------
async def test_servers_over_one_redis_take_over_from_each_other_after_a_kill(tmp_path: Path) -> None:
    with redis_server(PRODUCT, *DURABLE) as redis:
        flags = ("--catalog", redis.url(), "--blobs", redis.url())
        first, second = (
            ServerProcess(name, tmp_path / name, tmp_path / f"{name}.log", flags) for name in ("first", "second")
        )
        try:
            await asyncio.gather(first.start(), second.start())
            async with asyncio.timeout(120), Client([first.address, second.address]) as client:
                await client.workflows.create("w")
                session = await client.sessions.create("w", "s", seed=1, every_tokens=32)
                generation = session.generate(
                    messages=[("user", "continue")], add_generation_prompt=True, max_tokens=100, temperature=1.0, seed=5
                )
                async for _ in generation:
                    if len(generation.token_ids) >= 40:
                        break
                await first.kill()
                await generation.result()
                assert (await session.get()).node == "nodes/second"
                resumed = await session.generate(max_tokens=4).result()
                read = await session.tokens(generation.started.start if generation.started else 0).result()
                assert read.token_ids == generation.token_ids + resumed.token_ids
            assert await second.stop() == 0
        finally:
            for server in (first, second):
                if server.running:
                    await server.kill()
