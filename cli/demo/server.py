"""A real `forkpoint serve` process that the demo starts, kills and starts again."""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence
from pathlib import Path

from forkpoint.config import ENVIRONMENT_PREFIX
from forkpoint.errors import UnavailableError

LOG_TAIL_LINES = 12


class ServerFailedError(UnavailableError):
    """A server process ended, or did not get ready in time."""

    reason = "SERVER_FAILED"

    def __init__(self, server: str, problem: str, log_tail: str) -> None:
        super().__init__(f"{server} {problem}\n{log_tail}")
        self.server, self.problem, self.log_tail = server, problem, log_tail


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """One node: the same port and store through every start. stdout and stderr go to a log file."""

    def __init__(self, name: str, store: Path, log: Path, extra: Sequence[str] = (), port: int | None = None) -> None:
        self.name, self.store, self.log, self.extra = name, store, log, tuple(extra)
        self.address = f"127.0.0.1:{port or free_port()}"
        self.ready_file = log.with_suffix(".address")
        self._process: Process | None = None

    def command(self) -> list[str]:
        """The command line."""
        return [
            *(sys.executable, "-m", "forkpoint.cli.main", "serve"),
            *("--address", self.address, "--port-file", str(self.ready_file), "--node", self.name),
            *("--data", str(self.store)),
            *self.extra,
        ]

    @staticmethod
    def environment() -> dict[str, str]:
        """This process's environment without settings of servers: the flags alone count."""
        return {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None or self._process.returncode is not None:
            raise ServerFailedError(self.name, "is not running", self.log_tail())
        return self._process.pid

    async def spawn(self) -> None:
        """Start the process; `wait_ready` comes next. Does nothing when it runs already."""
        if self.running:
            return
        self.store.mkdir(parents=True, exist_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.ready_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.command(), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment()
            )

    async def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Return once the server says that it serves. Raises ServerFailedError."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.ready_file.exists():
                    if not self.running:
                        raise ServerFailedError(self.name, "ended before it was ready", self.log_tail())
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise ServerFailedError(self.name, f"was not ready after {timeout_s:g} s", self.log_tail()) from None

    async def start(self) -> None:
        """Start the process and wait until it serves."""
        await self.spawn()
        await self.wait_ready()

    async def kill(self) -> None:
        """SIGKILL, as a power cut or an out-of-memory killer would."""
        await self._end(signal.SIGKILL, 10.0)

    async def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM; returns the exit status. Raises ServerFailedError when the process does not end in time."""
        return await self._end(signal.SIGTERM, timeout_s)

    async def _end(self, how: signal.Signals, timeout_s: float) -> int:
        process = self._process
        if process is None:
            return 0
        if process.returncode is None:
            process.send_signal(how)
        try:
            async with asyncio.timeout(timeout_s):
                return await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
            problem = f"did not end {timeout_s:g} s after {how.name}"
            raise ServerFailedError(self.name, problem, self.log_tail()) from None

    def log_tail(self) -> str:
        """The last lines of the log."""
        if not self.log.exists():
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])
