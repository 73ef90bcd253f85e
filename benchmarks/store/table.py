"""Write the table of docs/statestore.md from benchmarks/results/store.jsonl: `python -m benchmarks.store.table`."""

from pathlib import Path
from typing import Any, Final

from benchmarks.page import filled_between
from benchmarks.plots import read
from benchmarks.record import RESULTS

Row = dict[str, Any]
PAGE: Final = Path(__file__).parents[2] / "docs" / "statestore.md"
BEGIN: Final = "<!-- table: python -m benchmarks.store.table -->"
HEAD: Final = "| case | what | ours | by hand | times as good | floor | target |"
FALLING: Final = ("ms", "us", "s", "bytes", "load")
"""Units of which less is better."""


def number(value: float | None, unit: str = "") -> str:
    """A figure with three digits, bytes in powers of ten."""
    if value is None:
        return ""
    if unit == "bytes":
        value, unit = value / 1e6, "MB"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} {unit}".strip()


def line(row: Row) -> str:
    """One row in Markdown; a target that was missed is bold."""
    value, unit, falling = row["value"], row["unit"], row["unit"] in FALLING
    times = ""
    if row["peer_value"]:
        times = f"{row['peer_value'] / value if falling else value / row['peer_value']:.2f}"
    target = number(row["target"], unit)
    if row["target"] is not None and (value > row["target"] if falling else value < row["target"]):
        target = f"**{target}**"
    peer = f"{row['peer']}: {number(row['peer_value'], unit)}" if row["peer_value"] else ""
    cells = (row["case"], row["metric"], number(value, unit), peer, times, number(row["floor"], unit), target)
    return f"| {' | '.join(cells)} |"


def table(rows: list[Row]) -> str:
    """All rows, with the machine above them."""
    note = "\n".join(notes(rows))
    rule = "|" + " --- |" * (HEAD.count("|") - 1)
    return "\n".join([note, "", HEAD, rule, *map(line, rows)])


def notes(rows: list[Row]) -> list[str]:
    """Where rows were measured: a line for each run, which names its sections if there are several runs."""
    runs = dict[tuple[str, str, str], list[str]]()
    for row in rows:
        sections = runs.setdefault((row["machine"], row["commit"], row["date"]), [])
        if row["metric"] == "1-minute load":
            sections.append(row["case"].partition(":")[0])
    told = [(f"{machine}, commit `{commit}`, {date}", sections) for (machine, commit, date), sections in runs.items()]
    return [f"{run}: {', '.join(sections)}." if len(told) > 1 else f"{run}." for run, sections in told]


def filled(page: str, rows: list[Row]) -> str:
    """The page with the table between its marks. Raises ValueError when the marks are not there once."""
    return filled_between(page, BEGIN, table(rows))


def main() -> None:
    """Rewrites the page in place."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(filled(page, read(RESULTS / "store.jsonl")), encoding="utf-8")


if __name__ == "__main__":
    main()
