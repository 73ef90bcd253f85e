"""All store benchmarks, or those that are named: `python -m benchmarks.store [commits checkpoints forks collection]`.

Best on an idle machine: every section says what the load was before it, and waits for at most --wait seconds until it
is below --load. Stores on disk lie in --folder, which must not be in memory. Results of sections that are not run again
stay.
"""

import argparse
import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final

from benchmarks.record import RESULTS, Measurement, machine, write
from benchmarks.store import checkpoints, collection, commits, forks

Section = Callable[[Path, bool], Coroutine[None, None, list[Measurement]]]
SECTIONS: Final[dict[str, Section]] = {
    "commits": commits.measure,
    "checkpoints": checkpoints.measure,
    "forks": forks.measure,
    "collection": collection.measure,
}


def quiet(load: float, patience: float) -> float:
    """Wait until the load is below `load`, or for as long as the patience lasts; returns it."""
    deadline = time.monotonic() + patience
    while os.getloadavg()[0] > load and time.monotonic() < deadline:
        threading.Event().wait(5)
    return os.getloadavg()[0]


def main() -> None:
    """Measure and write benchmarks/results/store.jsonl."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store")
    parser.add_argument("sections", nargs="*", help=f"default: all of {', '.join(SECTIONS)}")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where stores on disk lie (default: here)")
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is written: to try the benchmark")
    parser.add_argument("--load", type=float, default=0.5, help="1-minute load that counts as quiet")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to wait for that, before each section")
    arguments = parser.parse_args()
    rows: list[Measurement] = []
    chosen = arguments.sections or list(SECTIONS)
    if unknown := set(chosen) - SECTIONS.keys():
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    for name in chosen:
        load = quiet(arguments.load, arguments.wait)
        rows.append(Measurement(f"{name}: the machine before it", "1-minute load", "load", load))
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix=".store-benchmark-") as folder:
            rows += asyncio.run(SECTIONS[name](Path(folder), arguments.quick))
    if arguments.quick:
        for row in rows:
            print(f"{row.case:64} {row.metric:24} {row.value:12.3f} {row.unit}")
        return
    before = earlier(RESULTS / "store.jsonl", set(chosen))
    path = write("store", rows)
    path.write_text("".join(before) + path.read_text(encoding="utf-8"), encoding="utf-8")
    print(path)


def earlier(path: Path, again: set[str]) -> list[str]:
    """Lines of sections that this run leaves alone, when they are of this machine, each with its own commit."""
    if not path.exists():
        return []
    kept, section = [], ""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        fields = json.loads(line)
        if fields["metric"] == "1-minute load":
            section = fields["case"].partition(":")[0]
        if section not in again and fields["machine"] == machine():
            kept.append(line)
    return kept


if __name__ == "__main__":
    main()
