"""`forkpoint demo`: a session that survives, and the proof that nothing changed."""

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from forkpoint.cli.demo.report import Step
from forkpoint.cli.demo.run import STEPS, Demo
from forkpoint.cli.output import fail, print_json
from forkpoint.errors import InvalidFieldError

SABOTAGES: Final = ("conv-tail",)
EXIT_UNEQUAL: Final = 1


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `demo`."""
    parser = verbs.add_parser(
        "demo", help="fork, kill, restore, move and rewind real sessions, then prove that nothing changed"
    )
    parser.add_argument(
        "--sabotage", choices=SABOTAGES, help="flip a sign bit in each restored state: must end unequal"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep stores and server logs in this new folder")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.add_argument("--json", action="store_true", help="the report, machine-readable")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run both sides and compare them: 0 when all is equal, else 1."""
    shown = not arguments.no_progress and sys.stderr.isatty()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not shown,
    )
    with _folder(arguments.keep) as folder, progress:
        task = progress.add_task("starting a server", total=STEPS)

        def told(step: Step) -> None:
            progress.update(task, advance=1, description=step.what)

        report = asyncio.run(Demo(folder, told, arguments.sabotage).run())
    if arguments.json:
        print_json(report.as_dict())
    else:
        report.print()
    if not report.equal:
        return fail("UNEQUAL", "the interrupted sessions differ from the undisturbed ones", EXIT_UNEQUAL)
    return 0


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """A new folder, deleted at the end unless it is to be kept."""
    if keep is not None:
        try:
            keep.mkdir(parents=True)
        except FileExistsError as error:
            raise InvalidFieldError("--keep", f"{keep} exists already") from error
        yield keep.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="forkpoint-demo-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
