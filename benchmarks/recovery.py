"""How long clients wait when a node dies, against how many sessions it had: `python -m benchmarks.recovery`.

Two nodes of the tiny model over one Redis; all sessions stream from the first, which is killed. Each stream's wait is
from the kill to the first token that its client gets afterwards, from the other node; `taken` is when that node owned
the stream's session, by its log. `another host`: the dead node's
lock can't be seen, so that only its lease tells, which lives for 3 s; `the same host`: the lock tells at once.
"""

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.cluster import NodeProcess, TimedStream, grown, nodes
from benchmarks.percentile import percentile
from benchmarks.record import Measurement, write
from forkpoint.client.client import Client
from forkpoint.client.generation import Generation
from forkpoint.client.session import Session
from forkpoint.limits import LEASE_TTL_SECONDS

SESSIONS: Final = (1, 4, 16, 48)
PROMPT: Final = 1024
EVERY: Final = 256
"""Tokens between checkpoints."""
WARM_TOKENS: Final = 16
"""Every stream has so many before the kill."""
TARGET_SECONDS: Final = LEASE_TTL_SECONDS + 2.0


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds after the kill, one a stream: until the other node owned its session, and until its next token."""

    taken: tuple[float, ...]
    token: tuple[float, ...]


async def one(first: NodeProcess, second: NodeProcess, sessions: int, far: bool, round_: int) -> Waits:
    """Kill the first node under so many streams."""
    if far:
        for lock in first.locks.glob("*"):
            lock.unlink(missing_ok=True)
    workflow = f"w{sessions}-{int(far)}-{round_}"
    async with Client([first.address, second.address], patience_s=120) as client, asyncio.TaskGroup() as group:
        await client.workflows.create(workflow)
        parent = await grown(client, "parent", PROMPT, EVERY, workflow)
        names = [f"s{number}" for number in range(sessions)]
        forked = [session for name in names for session in await parent.fork(session_ids=[name])]
        streams = [TimedStream(partial(generation, session, number)) for number, session in enumerate(forked)]
        readers = [group.create_task(stream.read()) for stream in streams]
        for stream in streams:
            await stream.reach(WARM_TOKENS)
        # With many sessions some are placed on the other node from the beginning: nobody waits for those.
        home = [(await session.get()).node == f"nodes/{first.name}" for session in forked]
        before = [len(stream.times) for stream in streams]
        killed, said, read = time.perf_counter(), time.time(), second.log.stat().st_size
        await first.kill()
        # What was on its way at the kill comes at once: the wait ends with the first token after the longest pause.
        for stream, count in zip(streams, before, strict=True):
            await stream.reach(count + 2 * WARM_TOKENS)
        for reader in readers:
            reader.cancel()
        for session in forked:
            await session.cancel_generation()
    taken = tuple(when - said for when in takeovers(second.log, read))
    if len(taken) != sum(home):
        raise RuntimeError(f"{second.name} says that it took {len(taken)} sessions, of {sum(home)}")
    left = [stream for stream, at_home in zip(streams, home, strict=True) if at_home]
    return Waits(taken, tuple(resumed(stream.times, killed) - killed for stream in left))


def takeovers(log: Path, start: int) -> list[float]:
    """When a node took sessions over, in seconds since 1970, by its log from byte `start` on."""
    entries = [json.loads(line) for line in log.read_bytes()[start:].splitlines()]
    return [
        datetime.fromisoformat(entry["time"]).timestamp()
        for entry in entries
        if " is taken over from " in entry.get("message", "")
    ]


def generation(session: Session, seed: int, request_id: str, position: int | None) -> Generation:
    """A stream that is long enough."""
    return session.generate(
        text=f"# {seed}\n",
        max_tokens=4096,
        temperature=1.0,
        seed=seed,
        request_id=request_id,
        resume_position=position,
    )


def resumed(times: list[float], killed: float) -> float:
    """When the first token behind the longest gap that ended after the kill came."""
    ends = [number for number in range(1, len(times)) if times[number] > killed]
    return times[max(ends, key=lambda number: times[number] - times[number - 1])]


async def measure(folder: Path, counts: tuple[int, ...], rounds: int) -> list[Measurement]:
    """All cases."""
    settings = {"slots": 2 * max(counts) + 2, "pages": 4096, "gc_interval_seconds": 0}
    rows = []
    async with nodes(folder, 2, settings) as (first, second):
        for far in (True, False):
            for count in counts:
                waits = list[Waits]()
                for round_ in range(rounds):
                    waits.append(await one(first, second, count, far, round_))
                    first, second = second, first
                    await second.start()
                where = "another host" if far else "the same host"
                case = f"a node with {count} streams is killed, {where}"
                taken = [seconds for wait in waits for seconds in wait.taken]
                token = [seconds for wait in waits for seconds in wait.token]
                target = 1e3 * TARGET_SECONDS if far else None
                rows += [
                    Measurement(case, "taken p50", "ms", 1e3 * percentile(taken, 0.5)),
                    Measurement(case, "taken p99", "ms", 1e3 * percentile(taken, 0.99), target=target),
                    Measurement(case, "p50", "ms", 1e3 * percentile(token, 0.5)),
                    Measurement(case, "p99", "ms", 1e3 * percentile(token, 0.99)),
                ]
                print([f"{row.case}: {row.metric} {row.value:.0f} ms" for row in rows[-4:]], flush=True)
    return rows


def main() -> None:
    """Measure and write benchmarks/results/recovery.jsonl."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery")
    parser.add_argument("--quick", action="store_true", help="few sessions, one round, nothing is written")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    counts, rounds = ((1, 3), 1) if given.quick else (SESSIONS, given.rounds)
    with tempfile.TemporaryDirectory(prefix="forkpoint-recovery-") as folder:
        rows = asyncio.run(measure(Path(folder), counts, rounds))
    if not given.quick:
        print(write("recovery", rows))


if __name__ == "__main__":
    main()
