"""Write the table of docs/performance.md from benchmarks/results/kernels.jsonl: `python -m benchmarks.tables`."""

from itertools import groupby
from pathlib import Path
from typing import Any, Final

from benchmarks.page import filled_between
from benchmarks.record import RESULTS

Row = dict[str, Any]
PAGE: Final = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN: Final = "<!-- table: python -m benchmarks.tables -->"
HEAD: Final = "| case | what | ours | p10-p90 | peer | its time / ours | floor | target | predicted |"


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return ""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} {unit}".strip()


def line(row: Row) -> str:
    """One row in Markdown; a target that was missed is bold."""
    value, unit = row["value"], row["unit"]
    if unit == "equal":
        bits = "equal" if value == 1.0 else "**unequal**"
        return f"| {row['case']} | {row['metric']} | {bits} | | | | | | |"
    unit = "" if unit == "error" else unit
    spread = f"{_number(row['p10'])}-{_number(row['p90'])}" if "p10" in row and "p90" in row else ""
    peer = f"{row['peer']} {_number(row['peer_value'], unit)}" if row["peer_value"] else ""
    ratio = f"{row['peer_value'] / value:.2f}" if row["peer_value"] else ""
    floor = f"{_number(row['floor'])} ({row['floor'] / value:.0%})" if row["floor"] else ""
    target = _number(row["target"])
    if row["target"] is not None and value > row["target"]:
        target = f"**{target}**"
    cells = [row["case"], row["metric"], _number(value, unit), spread, peer, ratio, floor, target]
    return f"| {' | '.join([*cells, row.get('predicted', '')])} |".replace("  ", " ")


def table(rows: list[Row]) -> str:
    """All rows: a table for each run, with its machine above."""
    rule = "|" + " --- |" * HEAD.strip("|").count(" | ") + " --- |"
    tables = []
    for (machine, commit, date), run in groupby(rows, key=lambda row: (row["machine"], row["commit"], row["date"])):
        tables.append("\n".join([f"{machine}, commit `{commit}`, {date}.", "", HEAD, rule, *map(line, run)]))
    return "\n\n".join(tables)


def filled(page: str, rows: list[Row]) -> str:
    """The page with the table between its marks. Raises ValueError when the marks are not there once."""
    return filled_between(page, BEGIN, table(rows))


def main() -> None:
    """Rewrites docs/performance.md in place."""
    from benchmarks.plots import read

    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(filled(page, read(RESULTS / "kernels.jsonl")), encoding="utf-8")


if __name__ == "__main__":
    main()
