"""The tiny model and the embedded store on a CPU: decode, prefill, capture, restore, commit, fork.

Best run alone on an idle machine: `python -m benchmarks.cpu`.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `forkpoint serve` does, before torch is imported

from benchmarks.record import Measurement, write
from forkpoint.ids import SessionName
from forkpoint.model.tiny.data import make_document
from forkpoint.server.engine.batch import Sample, Work
from forkpoint.server.engine.open import open_engine
from forkpoint.server.engine.runner import TorchEngine
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, ForkSessions, StepCommit
from forkpoint.statestore.codec import decode, digest_of, encode
from forkpoint.statestore.open import open_blobs, open_catalog
from forkpoint.statestore.records import (
    SCHEMA_VERSION,
    CheckpointPolicy,
    GenerationParams,
    NewSession,
    SamplingParams,
    StoreMarker,
    WorkflowRow,
)

TINY = Path(__file__).parents[1] / "model" / "tiny"
PROMPT_TOKENS = 4096
GREEDY = Sample(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _prefill(engine: TorchEngine, tokens: tuple[int, ...]) -> int:
    sequence = engine.create()
    for start in range(0, len(tokens), 512):
        engine.step([Work(sequence, start, tokens[start : start + 512])])
    return sequence


def _decode(engine: TorchEngine, sequences: list[int], steps: int) -> float:
    """Tokens a second, all sequences together."""

    def run() -> None:
        for _ in range(steps):
            engine.step([Work(s, engine.consumed(s), (32,), GREEDY) for s in sequences])

    return steps * len(sequences) / _seconds(run)


def engine_figures() -> list[Measurement]:
    """Decode, prefill, fork, capture and restore of one session of 4,096 tokens."""
    engine, _ = open_engine(TINY, slots=8, pages=600)
    tokens = tuple(make_document(4, PROMPT_TOKENS, 8)[0])
    prefill = statistics.median(_seconds(lambda: engine.free(_prefill(engine, tokens))) for _ in range(3))
    first = _prefill(engine, tokens)
    alone = _decode(engine, [first], 100)
    fork = statistics.median(_seconds(lambda: engine.free(engine.fork(first))) for _ in range(20))
    four = _decode(engine, [first, *[engine.fork(first) for _ in range(3)]], 60)
    case = f"tiny model at {PROMPT_TOKENS} tokens"
    capture = statistics.median(_seconds(lambda: engine.capture(first)) for _ in range(10))
    with tempfile.TemporaryDirectory() as folder:
        restore = asyncio.run(_restore_seconds(engine, first, Path(folder)))
    return [
        Measurement(case, "prefill", "s", prefill),
        Measurement(case, "decode alone", "tokens/s", alone),
        Measurement(case, "decode four", "tokens/s", four),
        Measurement(case, "fork in memory", "ms", fork * 1e3),
        Measurement(case, "capture", "ms", capture * 1e3),
        Measurement(case, "restore (files)", "ms", restore * 1e3, peer="prefill again", peer_value=prefill * 1e3),
    ]


async def _restore_seconds(engine: TorchEngine, sequence: int, folder: Path) -> float:
    """Median time to read, verify and load all parts of a checkpoint from files."""
    blobs = open_blobs(f"file://{folder}")
    captured = engine.capture(sequence)
    names = [(spec, digest_of(data)) for spec, data in captured.parts]
    for (_, digest), (_, data) in zip(names, captured.parts, strict=True):
        await blobs.put(digest, encode(data))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        copy = engine.begin_restore(captured.grid_position)
        for spec, digest in names:
            engine.load_part(copy, spec, decode(digest, await blobs.get(digest)))
        engine.end_restore(copy)
        times.append(time.perf_counter() - began)
        engine.free(copy)
    await blobs.close()
    return statistics.median(times)


async def store_figures() -> list[Measurement]:
    """Commit of a step of many sessions, and fork of a hundred children: SQLite on this machine's disk, with fsync."""
    rows = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        catalog = open_catalog(f"sqlite://{folder}/catalog.db")
        await catalog.open(StoreMarker(SCHEMA_VERSION, "default", bytes(32), bytes(32)))
        await catalog.create_workflow(WorkflowRow("w"))
        params = GenerationParams(SamplingParams(0.0, 0, 1.0, 0.0, 0), 100_000)
        heads: dict[SessionName, int] = {}
        for number in range(256):
            name = SessionName("w", f"s-{number}")
            await catalog.create_session(NewSession(name, 0, CheckpointPolicy(512)))
            await catalog.acquire(name, "node", 0)
            await catalog.append(AppendTokens(name, 1, (1,) * 64))
            await catalog.begin_generation(BeginGeneration(name, 1, f"g-{number}", params))
            heads[name] = 64
        for count in (1, 64, 256):
            times = []
            for _ in range(200):
                names = list(heads)[:count]
                commits = [StepCommit(n, 1, heads[n], (7,), f"g-{n.session[2:]}") for n in names]
                began = time.perf_counter()
                await catalog.commit_step(commits)
                times.append((time.perf_counter() - began) * 1e3)
                for name in names:
                    heads[name] += 1
            times.sort()
            case = f"SQLite, a step of {count} sessions"
            rows += [
                Measurement(case, "commit p50", "ms", times[100]),
                Measurement(case, "commit p99", "ms", times[198]),
            ]
        children = tuple(NewSession(SessionName("w", f"c-{n}"), n, CheckpointPolicy(512)) for n in range(100))
        began = time.perf_counter()
        await catalog.fork(ForkSessions(SessionName("w", "s-0"), None, children))
        rows.append(Measurement("SQLite, 100 children at the head", "fork", "ms", (time.perf_counter() - began) * 1e3))
        await catalog.close()
    return rows


def main() -> None:
    """Measure everything and write benchmarks/results/cpu.jsonl."""
    print(write("cpu", engine_figures() + asyncio.run(store_figures())))


if __name__ == "__main__":
    main()
