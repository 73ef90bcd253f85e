"""Somebody dies at a step of a move: every step, and everybody. `python -m tests.chaos.moving` tries all cases.

A session streams on the source; a client asks a third node to move it to the target. At the step the source (or the
target) waits, the victim is killed, and whoever waited goes on. Then there is one owner, the stream has all its tokens,
and the session goes on.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forkpoint.client.client import Client
from forkpoint.client.errors import RemoteError
from forkpoint.client.generation import Generation
from forkpoint.client.session import Session
from forkpoint.server.engine.batch import Sample
from tests.chaos.chatter import WORKFLOW, open_workflow
from tests.chaos.fleet import Seat
from tests.chaos.gate import SOURCE, TARGET
from tests.chaos.records import records_in, stale_records
from tests.chaos.run import check_store
from tests.chaos.site import Site
from tests.chaos.verdict import Settings, unexpected
from tests.support.hash_engine import continuation
from tests.support.talkers import insist

VICTIMS: Final = ("source", "target", "ingress", "store", "caller")
"""The source leads the move, so it is its coordinator. The caller is whoever asked for it: its call is cancelled."""
TEXT: Final = b"wherever it is, its tokens say what it is: " * 2
TOKENS: Final = 120
BEGUN: Final = 12
"""Tokens that the client has before the move begins."""
BEHIND_SECONDS: Final = 2.0
"""A step that the end of the call does not wait for comes within this."""
TRIES: Final = 5
"""A busy machine may be late for a cut-over, which then ends in another way than by the step."""
CASE_SECONDS: Final = 90.0
REACH_SECONDS: Final = 30.0
GREEDY: Final = Sample(0.0, 0, 1.0, 0.0, 0)


class NotReachedError(Exception):
    """The move took another way."""


@dataclass(frozen=True, slots=True)
class Case:
    """Where, and who."""

    side: str
    step: str
    victim: str

    def __str__(self) -> str:
        return f"{self.victim} at {self.side}'s {self.step}"


def cases() -> list[Case]:
    """All of them."""
    sides = (("source", SOURCE), ("target", TARGET))
    return [Case(side, step, victim) for side, steps in sides for step in steps for victim in VICTIMS]


def diagonal() -> list[Case]:
    """Every step once, each victim in turn."""
    every, count = cases(), len(VICTIMS)
    return [every[count * step + step % count] for step in range(len(every) // count)]


class Stage:
    """A site on which case after case is played."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.problems: list[str] = []
        self.played = 0

    async def play(self, case: Case) -> None:
        """One case; what is wrong is kept as a problem."""
        began = time.monotonic()
        for _ in range(TRIES):
            try:
                async with asyncio.timeout(CASE_SECONDS):
                    found = await self._play(case)
            except NotReachedError as error:
                found = f"not reached: {error}"
            except (RemoteError, AssertionError, TimeoutError) as error:
                found = f"{type(error).__name__}: {error}"
            for seat in self.site.seats:
                seat.gate.arm("")
                if not seat.running:
                    await seat.start()
            self.played += 1
            if not found.startswith("not reached"):
                break
        print(f"{case}: {found or 'well'} ({time.monotonic() - began:.1f} s)", flush=True)
        if found:
            self.problems.append(f"{case}: {found}")

    async def _play(self, case: Case) -> str:
        """What is wrong, "" when nothing is."""
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(self.site.client(self.played % 3))
            session = await self._session(client)
            stream = session.generate(max_tokens=TOKENS, request_id=f"stream-{self.played}")
            reading = asyncio.get_running_loop().create_task(self._begin(stream))  # owner: this function
            await reading
            source = self.site.seat((await session.get()).node)
            target, ingress = [seat for seat in self.site.seats if seat is not source]
            caller = await stack.enter_async_context(Client(ingress.address))
            waiter = source if case.side == "source" else target
            waiter.gate.arm(case.step)
            ended = asyncio.get_running_loop().create_task(stream.result())  # owner: this function
            move = asyncio.get_running_loop().create_task(self._move(caller, session, target))  # owner: this function
            await self._reached(waiter, move)
            if not waiter.gate.waits:
                ended.cancel()
                raise NotReachedError("the move ended before")
            await self._strike(case.victim, {"source": source, "target": target, "ingress": ingress}, move)
            waiter.gate.open()
            await ended
            await asyncio.gather(move, return_exceptions=True)
            return await self._judge(session, stream)

    async def _session(self, client: Client) -> Session:
        name = f"s{self.played}"
        session = await insist(
            lambda: client.sessions.create(WORKFLOW, name, seed=1, every_tokens=32, request_id=f"create-{name}")
        )
        await insist(lambda: session.append(text=TEXT, request_id=f"append-{name}"))
        return session

    async def _begin(self, stream: Generation) -> None:
        async for _ in stream:
            if len(stream.token_ids) >= BEGUN:
                return

    async def _move(self, caller: Client, session: Session, target: Seat) -> None:
        """Ask for the move. It may be refused or broken off; what then is so is looked at, not what was answered."""
        try:
            await caller.sessions.open(session.name).migrate(target.name).result()
        except RemoteError:
            return

    async def _reached(self, waiter: Seat, move: "asyncio.Task[None]") -> None:
        """Wait until the node waits at the step, or does not come there any more."""
        async with asyncio.timeout(REACH_SECONDS):
            while not waiter.gate.waits and not move.done():
                await asyncio.sleep(0.002)
        deadline = time.monotonic() + BEHIND_SECONDS
        while not waiter.gate.waits and time.monotonic() < deadline:
            await asyncio.sleep(0.002)

    async def _strike(self, victim: str, seats: dict[str, Seat], move: "asyncio.Task[None]") -> None:
        if victim == "caller":
            move.cancel()
        elif victim == "store":
            assert self.site.redis is not None
            await self.site.redis.restart(0.1)
        else:
            await seats[victim].kill()

    async def _judge(self, session: Session, stream: Generation) -> str:
        """The stream, the log behind it, and one more turn that both sides of a split would answer differently."""
        expected = continuation(TEXT, TOKENS, GREEDY)[0]
        if stream.token_ids != expected:
            return f"the stream has {len(stream.token_ids)} tokens, or others"
        again = await session.generate(max_tokens=8, request_id=f"again-{self.played}").result()
        log = [*TEXT, *expected]
        if again.token_ids != continuation(log, 8, GREEDY)[0]:
            return "what comes behind the stream is not what the log leads to"
        reader = await session.tokens().result()
        if reader.token_ids != [*log, *again.token_ids]:
            return "the log is not what was streamed"
        return ""

    async def part(self) -> list[str]:
        """Stop the nodes; what is wrong with what they leave, and with what they said."""
        found = list(self.problems)
        for seat in self.site.seats:
            if (status := await seat.terminate()) and not seat.cut_off:
                found.append(f"{seat.name} ended with {status}:\n{seat.log_tail()}")
        found += unexpected([seat.log for seat in self.site.seats])
        found += stale_records(records_in(self.site.catalog_url))
        return found + await check_store(self.site.catalog_url, self.site.blobs_url)


async def play_all(chosen: Sequence[Case], folder: Path) -> list[str]:
    """All cases on one site, one after the other; what is wrong."""
    settings = Settings(seed=0, seconds=0, step_pause_ms=6, gated=True, far=False, apart=False)
    folder.mkdir(parents=True)
    async with Site(settings, folder) as site:
        async with site.client(0) as client:
            await open_workflow(client)
        stage = Stage(site)
        for case in chosen:
            await stage.play(case)
        return await stage.part()


async def play_beside(chosen: Sequence[Case], folder: Path, sites: int) -> list[str]:
    """The cases dealt out to some sites beside each other: each waits more than it computes."""
    folders = [folder / f"site-{number}" for number in range(sites)]
    played = await asyncio.gather(*(play_all(chosen[number::sites], place) for number, place in enumerate(folders)))
    return [problem for problems in played for problem in problems]


def main() -> int:
    """0 when all went well."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.moving", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose words hold this")
    parser.add_argument("--sites", type=int, default=3, help="beside each other")
    given = parser.parse_args()
    chosen = [case for case in cases() if given.only in str(case)]
    with tempfile.TemporaryDirectory(prefix="forkpoint-moving-") as folder:
        problems = asyncio.run(play_beside(chosen, Path(folder), min(given.sites, len(chosen))))
    print(f"{len(chosen)} cases, {len(problems)} problems", *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
