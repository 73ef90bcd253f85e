"""`python -m tests.chaos --seconds S --seed N`: real nodes over a real store, under everything that goes wrong.

The seed decides what goes wrong, in which order, and every session's prompts; when it happens is up to the machine. The
last line is a summary in JSON; the exit status is 0 when every promise was kept.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.chaos.run import play
from tests.chaos.verdict import Settings, Verdict

BROKEN_OFF: Final = 130
"""Exit status of a run that two signals broke off."""


def settings() -> tuple[Settings, Path | None, bool]:
    """From the command line: the run, where its files stay, and whether it is told."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long things go wrong")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="default: any")
    parser.add_argument("--kills", type=int, default=0, help="go on until nodes were killed so often")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=50, help="at once")
    parser.add_argument("--tokens", type=int, default=60, help="of the longest stream")
    parser.add_argument("--catalog", choices=("redis", "sqlite"), default="redis")
    parser.add_argument("--engine", choices=("hash", "tiny"), default="hash")
    parser.add_argument("--step-pause-ms", type=float, default=20.0, help="of the hash engine")
    parser.add_argument("--slots", type=int, default=24, help="sessions in a node's memory")
    parser.add_argument("--evils", choices=("all", "kills"), default="all")
    parser.add_argument("--killers", type=int, default=1, help="sequences of kills beside each other")
    parser.add_argument("--between", type=int, default=50, help="tokens that clients get between two kills")
    parser.add_argument("--folder", type=Path, help="where files of the run stay (default: removed when it is over)")
    parser.add_argument("--quiet", action="store_true", help="print the seed and the summary only")
    given = vars(parser.parse_args())
    folder, quiet = given.pop("folder"), given.pop("quiet")
    return Settings(**given), folder, quiet


async def until_told(chosen: Settings, folder: Path, tell: Callable[[str], None]) -> Verdict:
    """The run; the first SIGTERM or SIGINT ends it early, with a verdict, the second breaks it off. Either way its
    networks and processes go."""
    enough, loop = asyncio.Event(), asyncio.get_running_loop()
    task = loop.create_task(play(chosen, folder, tell, enough))  # owner: this function

    def on_signal() -> None:
        if enough.is_set():
            task.cancel()
        enough.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return await task


def main() -> int:
    """0 when every promise was kept."""
    chosen, folder, quiet = settings()
    began = time.monotonic()
    print(f"seed {chosen.seed}", flush=True)

    def tell(what: str) -> None:
        if not quiet:
            print(f"{time.monotonic() - began:8.2f} {what}", flush=True)

    with tempfile.TemporaryDirectory(prefix="forkpoint-chaos-") as temporary:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        try:
            verdict = asyncio.run(until_told(chosen, (folder or Path(temporary)).absolute(), tell))
        except asyncio.CancelledError:
            print("broken off")
            return BROKEN_OFF
    for problem in (*verdict.lost, *verdict.divergent, *verdict.stale, *verdict.findings, *verdict.nodes):
        print(f"PROBLEM: {problem}", flush=True)
    print(verdict.line(chosen))
    return 0 if verdict.sound else 1


if __name__ == "__main__":
    sys.exit(main())
