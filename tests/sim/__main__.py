"""`python -m tests.sim --seeds N --first S`: many runs on all cores. `--seed S`: one, again, with its story."""

import argparse
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from tests.sim.world import Outcome, run_seed

CHUNK = 25
FAILURES_SHOWN = 5
TOLD_EVERY = 500


def run_many(first: int, count: int) -> list[Outcome]:
    """Runs of seeds from `first` on, in this process."""
    return [run_seed(seed) for seed in range(first, first + count)]


def outcomes(first: int, count: int, workers: int) -> Iterator[Outcome]:
    """In the order of seeds."""
    starts = range(first, first + count, CHUNK)
    sizes = [min(CHUNK, first + count - start) for start in starts]
    with ProcessPoolExecutor(workers) as pool:
        for chunk in pool.map(run_many, starts, sizes):
            yield from chunk


def commit() -> str:
    """Of the tree that runs."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def again(seed: int, quiet: bool) -> int:
    """One run with all that happens."""
    if not quiet:
        logging.basicConfig(level=logging.DEBUG, format="    %(name)s: %(message)s", stream=sys.stdout)
        logging.getLogger("forkpoint").setLevel(logging.DEBUG)
    outcome = run_seed(seed, None if quiet else print)
    print(f"seed {seed}: {outcome.problem or 'all well'}, digest {outcome.digest}, {outcome.facts} facts")
    return 0 if outcome.problem is None else 1


def main() -> int:
    """0 when every promise held in every run."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this one only and tell what happens")
    parser.add_argument("--quiet", action="store_true", help="with --seed: its outcome only")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--digests", action="store_true", help="print what each run comes to, in this process")
    given = parser.parse_args()
    if given.seed is not None:
        return again(given.seed, given.quiet)
    if given.digests:
        for outcome in run_many(given.first, given.seeds):
            print(outcome.seed, outcome.digest, outcome.facts, outcome.problem or "well")
        return 0
    began, totals, failures = time.perf_counter(), Counter[str](), 0
    for outcome in outcomes(given.first, given.seeds, given.workers):
        totals.update(outcome.counts)
        if outcome.problem is not None:
            failures += 1
            print(f"seed {outcome.seed} at commit {commit()}: {outcome.problem}", flush=True)
            print(f"    again: python -m tests.sim --seed {outcome.seed}", flush=True)
            if failures >= FAILURES_SHOWN:
                break
        if (done := outcome.seed + 1 - given.first) % TOLD_EVERY == 0:
            print(f"{done} of {given.seeds} ran, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - began
    print(f"{given.seeds} seeds from {given.first}, {failures} failed, {seconds:.0f} s")
    print(", ".join(f"{count} {what}" for what, count in sorted(totals.items())))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
