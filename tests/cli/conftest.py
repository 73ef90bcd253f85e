"""One real server for all tests of the command line, and a way to run commands against it."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forkpoint.cli.demo.server import ServerProcess


@dataclass(frozen=True)
class Cli:
    """Runs `forkpoint …` in a process of its own."""

    address: str

    def run(self, *arguments: str, stdin: bytes = b"", status: int = 0) -> subprocess.CompletedProcess[bytes]:
        """Run a command, which must exit with `status`."""
        result = subprocess.run(
            [sys.executable, "-m", "forkpoint.cli.main", *arguments],
            input=stdin,
            capture_output=True,
            env=os.environ | {"FORKPOINT_ADDRESS": self.address},
            timeout=120,
            check=False,
        )
        assert result.returncode == status, f"{arguments}: {result.returncode}\n{result.stdout!r}\n{result.stderr!r}"
        return result

    def text(self, *arguments: str, stdin: bytes = b"") -> str:
        """stdout of a command that succeeds."""
        return self.run(*arguments, stdin=stdin).stdout.decode()

    def json(self, *arguments: str) -> Any:
        """stdout of a command with --json."""
        return json.loads(self.run(*arguments, "--json").stdout)

    def lines(self, *arguments: str) -> list[Any]:
        """stdout of a streaming command with --json: an object a line."""
        return [json.loads(line) for line in self.run(*arguments, "--json").stdout.splitlines()]

    def error(self, *arguments: str, stdin: bytes = b"") -> str:
        """The one line on stderr of a command that fails."""
        result = self.run(*arguments, stdin=stdin, status=1)
        lines = result.stderr.decode().splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), lines
        return lines[0]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the shared server's store."""
    return tmp_path_factory.mktemp("cli") / "store"


@pytest.fixture(scope="session")
def server(store: Path) -> Iterator[ServerProcess]:
    """The shared server. Its child process outlives the event loop that started it, so it is watched by hand."""
    process = ServerProcess("cli", store, store.with_suffix(".log"))
    log = process.log.open("wb")
    child = subprocess.Popen(
        process.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=process.environment()
    )
    log.close()
    try:
        asyncio.run(asyncio.wait_for(_ready(process, child), 60))
        yield process
    finally:
        child.terminate()
        assert child.wait(30) == 0


async def _ready(process: ServerProcess, child: "subprocess.Popen[bytes]") -> None:
    while not process.ready_file.exists():
        assert child.poll() is None, process.log_tail()
        await asyncio.sleep(0.05)


@pytest.fixture(scope="session")
def cli(server: ServerProcess) -> Cli:
    """Commands against the shared server."""
    return Cli(server.address)
