"""The nodes of a run: real processes that are killed, stopped, started again."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.chaos.gate import Gate
from tests.chaos.knobs import Knobs
from tests.chaos.network import Network
from tests.chaos.order import NO_STORE, Order

ROOT: Final = Path(__file__).resolve().parents[2]
READY_SECONDS: Final = 180.0
STOP_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.01
CUT_OFF: Final = "the drain took too long and was cut off"
"""What such a server says (server/main.py)."""


class NodeFailedError(AssertionError):
    """A server ended by itself, or did not serve in time."""


class Zygote:
    """The process that forks servers (zygote.py)."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._pids: asyncio.Queue[int] = asyncio.Queue()
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Returns once it has imported everything."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
        environment |= {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"}
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.zygote"), cwd=ROOT, env=environment, stdin=PIPE, stdout=PIPE
        )
        assert self._process.stdout is not None
        assert json.loads(await self._process.stdout.readline() or b"{}").get("ready"), "the zygote did not start"
        self._reader = asyncio.get_running_loop().create_task(self._read())  # owner: close

    async def fork(self, order: Order) -> tuple[int, "asyncio.Future[int]"]:
        """A server: its process id, and its exit status to come (negative: the signal that killed it)."""
        assert self._process is not None and self._process.stdin is not None
        async with self._turn:
            self._process.stdin.write(order.line())
            pid = await self._pids.get()
        return pid, self._ends[pid]

    async def close(self) -> None:
        """End it, and all servers with it."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        if self._reader is not None:
            await self._reader

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            told = json.loads(line)
            if "status" in told:
                self._ends.pop(told["pid"]).set_result(told["status"])
            else:
                self._ends[told["pid"]] = asyncio.get_running_loop().create_future()
                self._pids.put_nowait(told["pid"])


@dataclass
class Seat:
    """One node through all its lives."""

    name: str
    network: Network
    zygote: Zygote
    folder: Path
    settings: dict[str, str | int]
    engine: str = "hash"
    step_pause_ms: float = 0.0
    far: bool = False
    """Whether its lock can't be seen by others, as on another machine: only its lease tells that it is dead."""
    gated: bool = False
    """Whether it can be made to wait at the steps of a move."""
    lives: int = 0
    statuses: list[int] = field(default_factory=list)
    """Of the lives that SIGTERM ended."""
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever does something to it."""
    _pid: int = 0
    _end: "asyncio.Future[int] | None" = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.knobs = Knobs(self.folder / "knobs")
        self.gate = Gate(self.folder / "gate")
        self.log = self.folder / "log"

    @property
    def address(self) -> str:
        return self.network.address(self.name)

    @property
    def running(self) -> bool:
        return self._end is not None and not self._end.done()

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self.running
        return self._pid

    def order(self) -> Order:
        """What starts it."""
        host, _, port = self.address.rpartition(":")
        flags: dict[str, str | int] = {
            "data": str(self.folder / "data"),
            "host": host,
            "port": int(port),
            "node": self.name,
        }
        flags["port_file"] = str(self.folder / "ready")
        return Order(
            flags={**flags, **self.settings},
            log=str(self.log),
            knobs=str(self.folder / "knobs"),
            engine=self.engine,
            step_pause_ms=self.step_pause_ms,
            netns=self.network.netns(self.name),
            gate=str(self.folder / "gate") if self.gated else "",
        )

    async def start(self) -> None:
        """Start it and wait until it serves; again and again while it has no store. Raises NodeFailedError."""
        try:
            async with asyncio.timeout(READY_SECONDS):
                while not await self._serves():
                    continue
        except TimeoutError:
            raise NodeFailedError(f"{self.name} does not serve:\n{self.log_tail()}") from None
        if self.far:
            for lock in (self.folder / "data" / "locks").glob("*"):
                lock.unlink(missing_ok=True)

    async def _serves(self) -> bool:
        """Whether a new process does, False when it has no store."""
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        self._pid, self._end = await self.zygote.fork(self.order())
        self.lives += 1
        while not ready.exists():
            if self._end.done():
                if self._end.result() == NO_STORE:
                    return False
                raise NodeFailedError(f"{self.name} ended with {self._end.result()}:\n{self.log_tail()}")
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def kill(self) -> None:
        """SIGKILL."""
        end = self._checked()
        os.kill(self._pid, signal.SIGKILL)
        await end

    def freeze(self) -> None:
        """SIGSTOP."""
        self._checked()
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self._pid, signal.SIGCONT)

    async def terminate(self) -> int:
        """SIGTERM; returns the exit status. Raises NodeFailedError when it does not end."""
        end = self._checked()
        os.kill(self._pid, signal.SIGTERM)
        try:
            status = await asyncio.wait_for(asyncio.shield(end), STOP_SECONDS)
        except TimeoutError:
            raise NodeFailedError(f"{self.name} does not end after SIGTERM:\n{self.log_tail()}") from None
        self.statuses.append(status)
        return status

    @property
    def cut_off(self) -> bool:
        """Whether its last life ended at the deadline of SIGTERM, as one may whose machine is too busy."""
        return bool(self.statuses) and self.statuses[-1] == 1 and CUT_OFF in self.log_tail(2)

    def log_tail(self, lines: int = 5) -> str:
        """Its last words."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _checked(self) -> "asyncio.Future[int]":
        """The end to come. Raises NodeFailedError when it has come already: nobody killed it."""
        assert self._end is not None
        if self._end.done():
            raise NodeFailedError(f"{self.name} ended by itself with {self._end.result()}:\n{self.log_tail()}")
        return self._end


async def start_all(seats: Sequence[Seat]) -> None:
    """All at once."""
    await asyncio.gather(*(seat.start() for seat in seats))
