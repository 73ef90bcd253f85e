"""The catalog's Redis: a primary that syncs every write, and where addresses can move a replica that takes over."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Final

import redis

from tests.chaos.network import STORE, Network
from tests.support.redis_servers import binary, free_port

PORT: Final = 6379
SERVERS: Final = ("r1", "r2")
ALWAYS: Final = ("--appendonly", "yes", "--appendfsync", "always", "--save", "", "--protected-mode", "no")
POLL_SECONDS: Final = 0.02
PATIENCE_SECONDS: Final = 120.0
"""A server on a busy machine may take long to answer, and a replica to come along; one that takes longer is broken."""


class RedisMachine:
    """One server, on a machine of its own where there are any."""

    def __init__(self, name: str, network: Network, folder: Path) -> None:
        self.name = name
        self.host = network.host(name)
        self.port = PORT if network.can_cut else free_port()
        self._netns = network.netns(name)
        self._folder = folder / name
        self._folder.mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, primary: "RedisMachine | None" = None) -> None:
        """Start it on the files it has, as a replica when a primary is given; returns once it answers."""
        server = binary("valkey")
        assert server is not None
        inside = ("ip", "netns", "exec", self._netns) if self._netns else ()
        command = [*inside, server, "--port", str(self.port), "--bind", "*" if self._netns else "127.0.0.1"]
        command += ["--dir", str(self._folder), "--repl-diskless-sync-delay", "0", *ALWAYS]
        if primary is not None:
            command += ["--replicaof", f"{primary.host} {primary.port}"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await self._answers():
                assert self._process.poll() is None, f"{self.name} ended: {(self._folder / 'log').read_text()[-500:]}"
                await asyncio.sleep(POLL_SECONDS)

    async def command(self, *words: str) -> object:
        """Run one command. Raises redis-py's errors."""
        return await asyncio.to_thread(self._command, *words)

    async def in_sync(self) -> None:
        """Wait until this replica has all that its primary has."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                with_link = await self.command("INFO", "replication")
                if isinstance(with_link, dict) and with_link.get("master_link_status") == "up":
                    return
                await asyncio.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """SIGKILL. `ip netns exec` becomes the server, so this is the server's process."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP or SIGCONT."""
        assert self._process is not None
        os.kill(self._process.pid, number)

    async def _answers(self) -> bool:
        try:
            return await self.command("PING") in (b"PONG", True)
        except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError):
            return False

    def _command(self, *words: str) -> object:
        with redis.Redis(self.host, self.port, socket_timeout=30, socket_connect_timeout=30) as client:
            return client.execute_command(*words)


class RedisPair:
    """One store for all nodes."""

    def __init__(self, network: Network, folder: Path) -> None:
        self._network = network
        names = SERVERS if network.can_cut else SERVERS[:1]
        self.machines = [RedisMachine(name, network, folder) for name in names]

    @property
    def primary(self) -> RedisMachine:
        """The one that the store's address leads to."""
        return self.machines[0]

    @property
    def url(self) -> str:
        """What nodes open."""
        if not self._network.can_cut:
            return f"redis://127.0.0.1:{self.primary.port}/?timeout=2&connect_timeout=1"
        return f"redis://{self._network.host(STORE)}:{PORT}/?wait=1&timeout=2&connect_timeout=1"

    async def start(self) -> None:
        """All of it."""
        await self.primary.start()
        for replica in self.machines[1:]:
            await replica.start(self.primary)
            await replica.in_sync()
        self._network.move_store(self.primary.name)

    async def stall(self, seconds: float) -> None:
        """The primary does nothing for a while, as behind a disk that takes its time."""
        self.primary.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.primary.signal(signal.SIGCONT)

    async def restart(self, seconds: float) -> None:
        """Kill the primary and start it again on its files."""
        self.primary.kill()
        await asyncio.sleep(seconds)
        await self.primary.start()
        for replica in self.machines[1:]:
            await replica.in_sync()

    async def fail_over(self, seconds: float) -> None:
        """Kill the primary; the replica takes its place and its address, and the old one comes back as replica."""
        old, new = self.machines
        await new.in_sync()
        old.kill()
        await asyncio.sleep(seconds)
        await new.command("REPLICAOF", "NO", "ONE")
        self._network.move_store(new.name)
        self.machines = [new, old]
        await old.start(new)
        await old.in_sync()

    def close(self) -> None:
        """Kill them."""
        for machine in self.machines:
            machine.kill()
