"""`python -m tests.mutations`: try every mutation, write docs/mutations.md. `--only NAME`: one, and write nothing."""

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.mutations.importing import ROOT
from tests.mutations.listing import MUTATIONS
from tests.mutations.mutation import Mutation
from tests.mutations.trial import Trial, attempt

PAGE = ROOT / "docs" / "mutations.md"
HEAD = """# Mutations: the mistakes that the tests must find

Each row is a mistake put into the code on purpose, one change in one file, and the test that fails because of it;
without the mistake the same test passes. `python -m tests.mutations` tries them all and writes this page.

"""


def row(trial: Trial) -> str:
    """One line of the table."""
    mutation = trial.mutation
    test = " ".join(mutation.test).replace("|", "or")
    where = f"`{mutation.file}`"
    found = f"{trial.seconds:.1f} s" if trial.caught else "**not caught**"
    return f"| {mutation.name} | {mutation.mistake} | {where} | `{test}` | {found} |"


def page(trials: Sequence[Trial]) -> str:
    """The whole document."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    caught = sum(trial.caught for trial in trials)
    machine = f"{os.cpu_count()} {platform.machine()} cores, Python {platform.python_version()}"
    table = "| name | mistake | in | caught by | after |\n| --- | --- | --- | --- | --- |\n"
    tail = f"\n{caught} of {len(trials)} caught. Commit {commit}; {machine}. Times are of the whole pytest process.\n"
    return HEAD + table + "\n".join(map(row, trials)) + "\n" + tail


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


def main() -> int:
    """0 when each was caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", help="the name of one")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if given.only in (None, mutation.name)]
    if not chosen:
        parser.error(f"there is no {given.only}")
    tests = {mutation.test: mutation for mutation in chosen}
    with ThreadPoolExecutor(given.workers) as pool:
        sound = dict(zip(tests, pool.map(well, tests.values()), strict=True))
        trials = list(pool.map(tried, [mutation for mutation in chosen if sound[mutation.test]]))
    if given.only is None:
        PAGE.write_text(page(trials), encoding="utf-8")
    return 0 if len(trials) == len(chosen) and all(trial.caught for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
