"""A cluster is restarted node by node, as for a new version, under clients that go on."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from forkpoint.cli.demo.server import free_port
from forkpoint.client.client import Client
from forkpoint.limits import SHUTDOWN_SECONDS
from forkpoint.statestore.check import Severity, check
from forkpoint.statestore.open import find_marker, open_blobs, open_catalog
from tests.chaos.fleet import Zygote
from tests.chaos.order import Order
from tests.kills.test_kills import talk_until
from tests.support.redis_servers import redis_server
from tests.support.redis_stores import DURABLE
from tests.support.talkers import Talker, everybody, open_talkers

NAMES: Final = ("a", "b", "c")
TALKERS: Final = 3
ROUNDS_MAX: Final = 6
"""A quick round may fall between all turns of the clients."""


@dataclass
class Node:
    """A serving process, at one address through all its lives, with its checkpoints on a disk of its own."""

    zygote: Zygote
    folder: Path
    catalog: str
    engine: str
    port: int = field(default_factory=free_port)
    pid: int = 0
    end: "asyncio.Future[int] | None" = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Returns once it serves."""
        self.folder.mkdir(parents=True, exist_ok=True)
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        flags: dict[str, str | int] = {"node": self.folder.name, "data": str(self.folder), "port": self.port}
        flags |= {"port_file": str(ready), "checkpoint_every": 64}
        if self.catalog:
            flags["catalog"] = self.catalog
        order = Order(flags=flags, log=str(self.folder / "log"), engine=self.engine, step_pause_ms=5.0)
        self.pid, self.end = await self.zygote.fork(order)
        async with asyncio.timeout(60):
            while not ready.exists():
                assert not self.end.done(), self.log_tail()
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """SIGTERM: it must end inside its deadline, with nothing left in its pools."""
        assert self.end is not None
        os.kill(self.pid, signal.SIGTERM)
        async with asyncio.timeout(SHUTDOWN_SECONDS):
            assert await self.end == 0, self.log_tail()

    def log_tail(self) -> str:
        """The last lines of its log."""
        return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-12:])


@pytest.fixture
async def zygote() -> AsyncIterator[Zygote]:
    """Forks the servers of a test; what still runs dies with it."""
    zygote = Zygote()
    await zygote.start()
    yield zygote
    await zygote.close()


@asynccontextmanager
async def shared(store: str, folder: Path) -> AsyncIterator[str]:
    """URL of the catalog that the nodes share."""
    if store == "sqlite":
        yield f"sqlite://{folder / 'catalog.sqlite'}"
        return
    with redis_server(store, *DURABLE) as redis:
        yield redis.url()


async def restart_all(nodes: list[Node]) -> None:
    """One after the other: SIGTERM, and the next one once this one serves again."""
    for node in nodes:
        await node.stop()
        await node.start()


async def problems(url: str, folder: Path) -> list[str]:
    """What is wrong with the store, and sessions that a node lost instead of handing them over."""
    marker = await find_marker(url)
    assert marker is not None
    rows = open_catalog(url)
    blobs = open_blobs(" ".join(f"file://{folder / name / 'blobs'}" for name in NAMES))
    await rows.open(marker)
    try:
        found = [str(finding) async for finding in check(rows, blobs) if finding.severity is Severity.ERROR]
        sessions = await rows.list_sessions(None, None, 1000)
        return found + [f"{row.name} was lost {row.takeovers} times" for row in sessions if row.takeovers]
    finally:
        await rows.close()
        await blobs.close()


async def undisturbed(node: Node, turns: list[int]) -> dict[str, tuple[list[int], list[int]]]:
    """The logs of as many turns on a node that nobody stops."""
    await node.start()
    async with Client(node.address) as client:
        talkers = await open_talkers(client, len(turns), every_tokens=0)

        async def talk(talker: Talker, count: int) -> None:
            for _ in range(count):
                await talker.turn()

        await asyncio.gather(*(talk(talker, count) for talker, count in zip(talkers, turns, strict=True)))
        return {one.short: await one.log() for one in everybody(talkers)}


@pytest.mark.parametrize(("store", "engine"), [("sqlite", "tiny"), ("valkey", "hash")])
async def test_a_cluster_that_is_restarted_node_by_node_loses_and_repeats_nothing(
    tmp_path: Path, zygote: Zygote, store: str, engine: str
) -> None:
    """Clients append, generate, fork and read all the time; nodes fetch checkpoints from one another."""
    async with shared(store, tmp_path) as url:
        nodes = [Node(zygote, tmp_path / name, url, engine) for name in NAMES]
        await asyncio.gather(*(node.start() for node in nodes))
        async with Client([node.address for node in nodes], patience_s=120) as client:
            talkers = await open_talkers(client, TALKERS, every_tokens=64)
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                for talker in talkers:
                    group.create_task(talk_until(stop, talker))
                for _ in range(ROUNDS_MAX):
                    await restart_all(nodes)
                    if any(one.reconnects for one in everybody(talkers)):
                        break
                stop.set()
            logs = {one.short: await one.log() for one in everybody(talkers)}
        for node in nodes:
            await node.stop()
        assert await problems(url, tmp_path) == []
    for one in everybody(talkers):
        one.check(logs[one.short][0], one.seen)
    assert sum(one.reconnects for one in everybody(talkers)) > 0, "no restart ever hit a stream"
    expected = await undisturbed(Node(zygote, tmp_path / "quiet", "", engine), [talker.turns for talker in talkers])
    assert logs.keys() == expected.keys()
    assert [name for name in logs if logs[name] != expected[name]] == []
