"""Commit of an engine step: one token for each session that decodes in it, 5,000 sessions living in the store.

Sessions are in workflows of eight, whose sessions decode together. Steps follow each other without a pause, which is
the worst case: beside an engine, a step's commit has the whole next step to get done.
"""

import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Final

import apsw

from benchmarks.percentile import percentile
from benchmarks.record import Measurement
from benchmarks.store.places import ALWAYS, EVERYSEC, PRODUCTS, server, sync_ms
from forkpoint.ids import SessionName
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, ForkSessions, StepCommit, StepStatus
from forkpoint.statestore.open import open_catalog
from forkpoint.statestore.records import (
    SCHEMA_VERSION,
    CheckpointPolicy,
    GenerationParams,
    NewSession,
    SamplingParams,
    StoreMarker,
    WorkflowRow,
)

COUNTS: Final = (1, 64, 256, 1024)
TARGET_P99_MS: Final = {64: 1.5, 256: 3.0, 1024: 6.0}
LIVE: Final = 5000
A_WORKFLOW: Final = 8
AT_ONCE: Final = 64
PROMPT: Final = 64
MARKER: Final = StoreMarker(SCHEMA_VERSION, "default", bytes(32), bytes(32))
PARAMS: Final = GenerationParams(SamplingParams(0.0, 0, 1.0, 0.0, 0), 1_000_000)
BY_HAND: Final = "one INSERT a session"


async def measure(folder: Path, quick: bool) -> list[Measurement]:
    """Every catalog, every number of sessions."""
    live, steps, rounds = (512, 20, 1) if quick else (LIVE, 200, 3)
    counts = [count for count in COUNTS if count <= live]
    sync = sync_ms(folder)
    rows = [
        Measurement("append 4 KiB to a file and sync it", "p50", "ms", percentile(sync, 0.5)),
        Measurement("append 4 KiB to a file and sync it", "p99", "ms", percentile(sync, 0.99)),
    ]
    floors = {"p50": rows[0].value, "p99": rows[1].value}
    peers = by_hand(folder / "by-hand.db", live, counts, steps, rounds)
    rows += await _catalog("SQLite", f"sqlite://{folder}/catalog.db", live, counts, steps, rounds, floors, peers)
    for product, shown in PRODUCTS.items():
        for label, options in (("always", ALWAYS), ("everysec", EVERYSEC)):
            with server(product, folder / f"{product}-{label}", *options) as process:
                if process is None:
                    continue
                name, own = f"{shown}, appendfsync {label}", floors if label == "always" else {}
                rows += await _catalog(name, process.url(), live, counts, steps, rounds, own, {})
    return rows


async def _catalog(
    label: str,
    url: str,
    live: int,
    counts: list[int],
    steps: int,
    rounds: int,
    floors: dict[str, float],
    peers: dict[int, dict[str, float]],
) -> list[Measurement]:
    catalog = open_catalog(url)
    await catalog.open(MARKER)
    heads = await populate(catalog, live)
    rows = []
    for count in counts:
        chosen = list(heads)[:count]
        found: dict[str, list[float]] = {"p50": [], "p99": []}
        for _ in range(rounds):
            times = [await step(catalog, chosen, heads) for _ in range(steps)]
            for metric, share in (("p50", 0.5), ("p99", 0.99)):
                found[metric].append(percentile(times, share))
        for metric, values in found.items():
            peer = peers.get(count, {}).get(metric)
            rows.append(
                Measurement(
                    f"{label}, a step of {count} of {live} sessions",
                    f"commit {metric}",
                    "ms",
                    statistics.median(values),
                    peer=BY_HAND if peer else None,
                    peer_value=peer,
                    floor=floors.get(metric),
                    target=TARGET_P99_MS.get(count) if metric == "p99" else None,
                )
            )
    rows.append(await fork_of_a_hundred(label, catalog, next(iter(heads))))
    await catalog.close()
    return rows


async def populate(catalog: Catalog, live: int) -> dict[SessionName, int]:
    """Sessions that generate, with their heads, whole workflows in random order."""
    workflows = [f"w{number:04d}" for number in range(-(-live // A_WORKFLOW))]
    for first in range(0, len(workflows), AT_ONCE):
        await asyncio.gather(*(catalog.create_workflow(WorkflowRow(w)) for w in workflows[first : first + AT_ONCE]))
    random.Random(1).shuffle(workflows)
    names = [SessionName(w, f"session-{number}") for w in workflows for number in range(A_WORKFLOW)][:live]

    async def begin(name: SessionName) -> None:
        await catalog.create_session(NewSession(name, 0, CheckpointPolicy(512)))
        await catalog.acquire(name, "node-1", 0)
        await catalog.append(AppendTokens(name, 1, (1,) * PROMPT))
        await catalog.begin_generation(BeginGeneration(name, 1, "generation-1", PARAMS))

    for first in range(0, len(names), AT_ONCE):
        await asyncio.gather(*map(begin, names[first : first + AT_ONCE]))
    return dict.fromkeys(names, PROMPT)


async def step(catalog: Catalog, names: list[SessionName], heads: dict[SessionName, int]) -> float:
    """Commit one token for each session; returns milliseconds."""
    commits = [StepCommit(name, 1, heads[name], (7,), "generation-1") for name in names]
    began = time.perf_counter()
    outcomes = await catalog.commit_step(commits)
    took = (time.perf_counter() - began) * 1e3
    assert all(outcome.status is StepStatus.COMMITTED for outcome in outcomes)
    for name in names:
        heads[name] += 1
    return took


async def fork_of_a_hundred(label: str, catalog: Catalog, parent: SessionName) -> Measurement:
    """100 children at the head, in one call."""
    times = []
    for number in range(5):
        children = tuple(
            NewSession(SessionName(parent.workflow, f"child-{number}-{child}"), child, CheckpointPolicy(512))
            for child in range(100)
        )
        began = time.perf_counter()
        await catalog.fork(ForkSessions(parent, None, children))
        times.append((time.perf_counter() - began) * 1e3)
    return Measurement(f"{label}, 100 children at the head", "fork", "ms", statistics.median(times), target=20.0)


def by_hand(path: Path, live: int, counts: list[int], steps: int, rounds: int) -> dict[int, dict[str, float]]:
    """What one would write first: a table of tokens, an INSERT for each session and a COMMIT; no epochs, no hashes, no
    checksums, no outcome. In this thread, without an event loop."""
    db = apsw.Connection(str(path))
    db.pragma("journal_mode", "wal")
    db.pragma("synchronous", "FULL")
    db.execute(
        "CREATE TABLE tokens (session INTEGER, position INTEGER, token INTEGER, PRIMARY KEY (session, position))"
    )
    db.execute("BEGIN")
    db.executemany(
        "INSERT INTO tokens VALUES (?, ?, 1)", [(session, p) for session in range(live) for p in range(PROMPT)]
    )
    db.execute("COMMIT")
    order = random.Random(1).sample(range(live), live)
    found, position = {}, PROMPT
    for count in counts:
        p50, p99 = [], []
        for _ in range(rounds):
            times = []
            for _ in range(steps):
                began = time.perf_counter()
                db.execute("BEGIN IMMEDIATE")
                for session in order[:count]:
                    db.execute("INSERT INTO tokens VALUES (?, ?, ?)", (session, position, 7))
                db.execute("COMMIT")
                times.append((time.perf_counter() - began) * 1e3)
                position += 1
            p50.append(percentile(times, 0.5))
            p99.append(percentile(times, 0.99))
        found[count] = {"p50": statistics.median(p50), "p99": statistics.median(p99)}
    db.close()
    return found
