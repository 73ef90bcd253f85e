"""The table of the state store's figures is its result file's, and says by how much and against what."""

import json
from pathlib import Path

import pytest

from benchmarks.page import END
from benchmarks.plots import read
from benchmarks.record import RESULTS, Measurement, save
from benchmarks.store import table
from benchmarks.store.__main__ import earlier

ROWS = [
    Measurement("commits: the machine before it", "1-minute load", "load", 0.25),
    Measurement("SQLite, a step of 64", "commit p99", "ms", 1.2, "INSERT", 3.6, 0.4, 1.5),
    Measurement("SQLite, a step of 256", "commit p99", "ms", 4.0, target=3.0),
    Measurement("files", "write", "GB/s", 0.4, "torch.save", 0.2, 1.0, 0.9),
    Measurement("a tree", "stored", "bytes", 2_000_000.0, "each by itself", 20_000_000.0),
]


def test_more_is_better_of_rates_and_less_of_times_and_bytes(tmp_path: Path) -> None:
    text = table.table(read(save("store", ROWS, "two cores", "0123abcd", tmp_path)))
    assert "two cores, commit `0123abcd`" in text
    assert "| SQLite, a step of 64 | commit p99 | 1.2 ms | INSERT: 3.6 ms | 3.00 | 0.4 ms | 1.5 ms |" in text
    assert "| SQLite, a step of 256 | commit p99 | 4 ms |  |  |  | **3 ms** |" in text
    assert "| files | write | 0.4 GB/s | torch.save: 0.2 GB/s | 2.00 | 1 GB/s | **0.9 GB/s** |" in text
    assert "| a tree | stored | 2 MB | each by itself: 20 MB | 10.00 |  |  |" in text
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {8}


def test_the_table_replaces_what_is_between_the_marks(tmp_path: Path) -> None:
    rows = read(save("store", ROWS, "two cores", "0123abcd", tmp_path))
    once = table.filled(f"before\n{table.BEGIN}\nold\n{END}\nafter\n", rows)
    assert once.startswith("before\n") and once.endswith("after\n") and "old" not in once
    assert table.filled(once, rows) == once
    with pytest.raises(ValueError, match="needs"):
        table.filled("no marks", rows)


def test_the_page_in_the_repository_is_that_of_its_result_file() -> None:
    page = table.PAGE.read_text(encoding="utf-8")
    assert table.filled(page, read(RESULTS / "store.jsonl")) == page


def test_sections_of_an_earlier_run_keep_their_commit(tmp_path: Path) -> None:
    forks = Measurement("forks: the machine before it", "1-minute load", "load", 0.5)
    path = save("store", [*ROWS[:2], forks], at="0123abcd", folder=tmp_path)
    kept = earlier(path, {"forks"})
    assert [json.loads(line)["case"] for line in kept] == [row.case for row in ROWS[:2]]
    assert {json.loads(line)["commit"] for line in kept} == {"0123abcd"}
    again = save("store", [forks], at="4567cdef", folder=tmp_path)
    again.write_text("".join(kept) + again.read_text(encoding="utf-8"), encoding="utf-8")
    notes = table.notes(read(again))
    assert [note.partition("commit ")[2].partition(",")[0] for note in notes] == ["`0123abcd`", "`4567cdef`"]
    assert [note.rpartition(": ")[2] for note in notes] == ["commits.", "forks."]
