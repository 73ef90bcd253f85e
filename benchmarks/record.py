"""Rows of a result file: what was measured, where, and at which commit."""

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from forkpoint.clock import SystemClock

RESULTS: Final = Path(__file__).parent / "results"
OPTIONAL: Final = ("p10", "p90", "predicted")


@dataclass(frozen=True)
class Measurement:
    """One figure. `unit` says the direction: ms, us, s, bytes, %, error are better when lower, others when higher."""

    case: str
    metric: str
    unit: str
    value: float
    peer: str | None = None
    peer_value: float | None = None
    floor: float | None = None
    target: float | None = None
    p10: float | None = None
    """A tenth of the samples are below; `value` is their median. Left out of the file when there is none."""
    p90: float | None = None
    predicted: str | None = None
    """What was expected before the first measurement, in the unit; left out when nothing was written down."""


def machine() -> str:
    """The machine in words."""
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{os.cpu_count()} cores, {names[0] if names else platform.processor() or platform.machine()}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def commit() -> str:
    """The commit that was measured, `-dirty` when the tree differed from it: as it was when the benchmark began. Raises
    RuntimeError where git can't be asked."""
    if not _COMMIT:
        raise RuntimeError("git can't say which commit this is")
    return _COMMIT


def known_commit() -> str:
    """$FORKPOINT_COMMIT, for a copy of the tree whose git knows nothing, or something else; without it, the commit."""
    named = os.environ.get("FORKPOINT_COMMIT")
    try:
        return named or commit()
    except RuntimeError:
        return "unknown"


def _described() -> str:
    call = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(call, capture_output=True, text=True, check=False, cwd=RESULTS.parent)
    except OSError:
        return ""
    return found.stdout.strip()


_COMMIT: Final = _described()


def save(
    benchmark: str,
    rows: list[Measurement],
    on: str | None = None,
    at: str | None = None,
    folder: Path = RESULTS,
) -> Path:
    """Write one run's rows; replaces those of an earlier run.

    `on` names another machine than this CPU, `at` the commit where git cannot be asked.
    """
    today = datetime.fromtimestamp(SystemClock().wall_us() / 1e6, UTC)
    facts = {"machine": on or machine(), "commit": at or commit(), "date": today.date().isoformat()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{benchmark}.jsonl"
    lines = []
    for row in rows:
        fields = {name: value for name, value in asdict(row).items() if name not in OPTIONAL or value is not None}
        lines.append(json.dumps({"benchmark": benchmark, **fields, **facts}))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write(benchmark: str, rows: list[Measurement], folder: Path = RESULTS) -> Path:
    """Save and print one run's rows."""
    path = save(benchmark, rows, folder=folder)
    show(rows)
    return path


def show(rows: list[Measurement]) -> None:
    """Print rows."""
    for row in rows:
        print(f"{row.case:48} {row.metric:16} {row.value:12.3f} {row.unit}", flush=True)
