"""The tables of the documents are the result files' figures."""

from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.page import END
from benchmarks.plots import read
from benchmarks.record import RESULTS, Measurement, save

ROWS = [
    Measurement("prefill", "time", "ms", 1.25, "fla", 3.0, 0.25, 1.2, 1.24, 1.3, "1.2-1.4"),
    Measurement("decode", "time", "us", 150.0, floor=102.0, target=160.0),
    Measurement("decode", "alone equals together", "equal", 1.0, target=1.0),
    Measurement("mla", "alone equals together", "equal", 0.0, target=1.0),
]


def test_a_row_says_what_it_measured_beside_its_peer_and_marks_a_missed_target(tmp_path: Path) -> None:
    rows = read(save("kernels", ROWS, "a GPU", "0123abcd", tmp_path))
    text = tables.table(rows)
    assert "a GPU, commit `0123abcd`" in text
    assert "| prefill | time | 1.25 ms | 1.24-1.3 | fla 3 ms | 2.40 | 0.25 (20%) | **1.2** | 1.2-1.4 |" in text
    assert "| decode | time | 150 us | | | | 102 (68%) | 160 | |" in text
    assert "| mla | alone equals together | **unequal** |" in text
    counts = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert counts == {10}


def test_the_table_replaces_what_is_between_the_marks(tmp_path: Path) -> None:
    rows = read(save("kernels", ROWS, "a GPU", "0123abcd", tmp_path))
    page = f"before\n{tables.BEGIN}\nold\n{END}\nafter\n"
    once = tables.filled(page, rows)
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert "old" not in once
    assert tables.filled(once, rows) == once
    with pytest.raises(ValueError, match="needs"):
        tables.filled("no marks", rows)


def test_the_page_in_the_repository_is_that_of_its_result_file() -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.filled(page, read(RESULTS / "kernels.jsonl")) == page
