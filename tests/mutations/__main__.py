"""`python -m tests.mutations`: try every mutation, write docs/mutations.md. `--only NAME ...`: these alone; the rows of
the others stay as they are."""

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Final

from tests.mutations.importing import ROOT
from tests.mutations.listing import MUTATIONS
from tests.mutations.mutation import Mutation
from tests.mutations.trial import Trial, attempt

PAGE = ROOT / "docs" / "mutations.md"
HEAD = """# Mutations: the mistakes that the tests must find

Each row is a mistake put into the code on purpose, one change in one file, and the test that fails because of it;
without the mistake the same test passes. `python -m tests.mutations` tries them all and writes this page. Times are of
the whole pytest process, on a machine that did other work too.

"""
COLUMNS: Final = ("name", "mistake", "in", "caught by", "after", "commit")
NOT_CAUGHT: Final = "**not caught**"


def row(trial: Trial, commit: str) -> str:
    """One line of the table."""
    mutation = trial.mutation
    test = " ".join(mutation.test).replace("|", "or")
    found = f"{trial.seconds:.1f} s" if trial.caught else NOT_CAUGHT
    cells = (mutation.name, mutation.mistake, f"`{mutation.file}`", f"`{test}`", found, commit)
    return f"| {' | '.join(cells)} |"


def commit() -> str:
    """Of the tree that is tried."""
    call = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def page(trials: Sequence[Trial], before: str) -> str:
    """The whole document; `before`: the one so far, whose rows stay where nothing was tried."""
    lines = [line for line in before.splitlines() if line.startswith("| ") and line.count(" | ") == len(COLUMNS) - 1]
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
    rows |= {trial.mutation.name: row(trial, commit()) for trial in trials}
    shown = [rows[mutation.name] for mutation in MUTATIONS if mutation.name in rows]
    missing = [mutation.name for mutation in MUTATIONS if mutation.name not in rows]
    caught = sum(NOT_CAUGHT not in line for line in shown)
    machine = f"{os.cpu_count()} {platform.machine()} cores, Python {platform.python_version()}"
    table = [f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS), *shown]
    tail = [f"{caught} of {len(MUTATIONS)} caught; {machine}."]
    if missing:
        tail += ["", f"Not tried: {', '.join(missing)}."]
    return "\n".join([HEAD.rstrip(), "", *table, "", *tail, ""])


def tried(mutation: Mutation) -> Trial:
    """The trial, told."""
    trial = attempt(mutation)
    verdict = "caught" if trial.caught else "NOT CAUGHT"
    print(f"{mutation.name}: {verdict} in {trial.seconds:.1f} s (code {trial.code}): {trial.problem}", flush=True)
    return trial


def well(mutation: Mutation) -> bool:
    """Whether its test passes without the mistake."""
    trial = attempt(mutation, well=True)
    if trial.code != 0:
        print(f"{' '.join(mutation.test)} fails without a mistake: {trial.problem}", flush=True)
    return trial.code == 0


def tried_group(mutations: Sequence[Mutation]) -> list[Trial]:
    """The trials of mutations that one test is to catch; none when it is not sound."""
    return [tried(mutation) for mutation in mutations] if well(mutations[0]) else []


def main() -> int:
    """0 when each was caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="names of some")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    if unknown := set(given.only) - {mutation.name for mutation in MUTATIONS}:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    chosen = [mutation for mutation in MUTATIONS if not given.only or mutation.name in given.only]
    groups = [[mutation for mutation in chosen if mutation.test == test] for test in {m.test: None for m in chosen}]
    trials: list[Trial] = []
    with ThreadPoolExecutor(given.workers) as pool:
        for group in as_completed([pool.submit(tried_group, group) for group in groups]):
            trials += group.result()
            # At once: a run takes long, and what it found is kept when it is broken off.
            PAGE.write_text(page(trials, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0 if len(trials) == len(chosen) and all(trial.caught for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
