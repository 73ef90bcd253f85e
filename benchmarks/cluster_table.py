"""Write the tables of docs/performance-cluster.md from their result files: `python -m benchmarks.cluster_table`."""

from pathlib import Path
from typing import Final

from benchmarks.page import filled_between
from benchmarks.plots import read
from benchmarks.record import RESULTS
from benchmarks.store.table import table

PAGE: Final = Path(__file__).parents[1] / "docs" / "performance-cluster.md"
NAMES: Final = ("migration", "migration-h200", "recovery", "replay")
NOT_RUN: Final = "Not measured yet."


def filled(page: str, results: Path = RESULTS) -> str:
    """The page with every table, or a word where there is no result file. Raises ValueError for a mark that lacks."""
    for name in NAMES:
        path = results / f"{name}.jsonl"
        text = table(read(path)) if path.exists() else NOT_RUN
        page = filled_between(page, f"<!-- table: {name} -->", text)
    return page


def main() -> None:
    """Rewrites the page in place."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
