"""`kill -9` of a real server at random moments, under clients that go on: nothing shown is lost, nothing changes."""

import asyncio
import random
from pathlib import Path
from typing import Final

import pytest

from forkpoint.cli.demo.server import ServerProcess
from forkpoint.client.client import Client
from forkpoint.limits import SHUTDOWN_SECONDS
from tests.support.stores import check_store
from tests.support.talkers import Talker, everybody, open_talkers

TALKERS: Final = 4
EVERY_TOKENS: Final = 64
LIFE_SECONDS: Final = (0.0, 1.2)
"""A server lives between these, counted from when it serves."""


async def talk_until(stop: asyncio.Event, talker: Talker) -> None:
    while not stop.is_set():
        await talker.turn()


async def kill_again_and_again(server: ServerProcess, talkers: list[Talker], count: int, rng: random.Random) -> None:
    """Kill and restart; after each restart every log holds what its client had seen when the server died."""
    for _ in range(count):
        await asyncio.sleep(rng.uniform(*LIFE_SECONDS))
        await server.kill()
        seen = [(one, dict(one.seen)) for one in everybody(talkers)]
        await server.start()
        async with Client(server.address) as client:
            for one, shown in seen:
                reader = await client.sessions.open(one.session.name).tokens().result()
                one.check(reader.token_ids, shown)


async def undisturbed(folder: Path, turns: list[int]) -> dict[str, tuple[list[int], list[int]]]:
    """The logs of as many turns on a server that nobody kills, with no automatic checkpoints."""
    server = ServerProcess("quiet", folder / "quiet", folder / "quiet.log", ("--checkpoint-every", "0"))
    await server.start()
    try:
        async with Client(server.address) as client:
            talkers = await open_talkers(client, len(turns), every_tokens=0)

            async def talk(talker: Talker, count: int) -> None:
                for _ in range(count):
                    await talker.turn()

            await asyncio.gather(*(talk(talker, count) for talker, count in zip(talkers, turns, strict=True)))
            return {one.short: await one.log() for one in everybody(talkers)}
    finally:
        await server.kill()


async def test_no_kill_loses_or_changes_a_token_that_a_client_saw(tmp_path: Path, kills: int, kill_seed: int) -> None:
    rng = random.Random(kill_seed)
    server = ServerProcess("killed", tmp_path / "store", tmp_path / "killed.log")
    await server.start()
    try:
        async with Client(server.address, patience_s=120) as client:
            talkers = await open_talkers(client, TALKERS, EVERY_TOKENS)
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                for talker in talkers:
                    group.create_task(talk_until(stop, talker))
                await kill_again_and_again(server, talkers, kills, rng)
                stop.set()
            logs = {one.short: await one.log() for one in everybody(talkers)}
        assert await server.stop(SHUTDOWN_SECONDS) == 0
    except BaseException:
        print(f"kill seed {kill_seed}; end of the server's log:\n{server.log_tail()}")
        raise
    finally:
        if server.running:
            await server.kill()
    for one in everybody(talkers):
        one.check(logs[one.short][0], one.seen)
    assert await check_store(tmp_path / "store") == []
    expected = await undisturbed(tmp_path, [talker.turns for talker in talkers])
    assert logs.keys() == expected.keys()
    different = [name for name in logs if logs[name] != expected[name]]
    assert different == [], f"kill seed {kill_seed}"
    assert sum(one.reconnects for one in everybody(talkers)) > 0 or kills < 5, "no kill ever hit a running stream"


@pytest.mark.parametrize("turns", [[2]])
async def test_the_comparison_can_fail(tmp_path: Path, turns: list[int]) -> None:
    logs = await undisturbed(tmp_path, turns)
    (ids, _) = logs["s0"]
    talker_seen = {len(ids) - 1: ids[-1] + 1}
    async with Client("127.0.0.1:1") as client:
        talker = Talker(client.sessions.open("workflows/kills/sessions/s0"))
        with pytest.raises(AssertionError, match="not in the log"):
            talker.check(ids, talker_seen)
        with pytest.raises(AssertionError, match="changed"):
            talker.saw(0, [ids[0]])
            talker.saw(0, [ids[0] + 1])
