"""Write the table of docs/models.md from benchmarks/results/serving.jsonl: `python -m benchmarks.serving.table`."""

from pathlib import Path
from typing import Final

from benchmarks.page import filled_between
from benchmarks.plots import read
from benchmarks.record import RESULTS
from benchmarks.store.table import table

PAGE: Final = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN: Final = "<!-- table: python -m benchmarks.serving.table -->"
NOT_RUN: Final = "Not measured yet."


def filled(page: str, results: Path = RESULTS) -> str:
    """The page with the table, or a word where there is no result file. Raises ValueError for a mark that lacks."""
    path = results / "serving.jsonl"
    return filled_between(page, BEGIN, table(read(path)) if path.exists() else NOT_RUN)


def main() -> None:
    """Rewrites the page in place."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
