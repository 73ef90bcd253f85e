"""The tables of a cluster's figures are those of their result files."""

import json
from pathlib import Path

from benchmarks.cluster_table import NAMES, NOT_RUN, PAGE, filled
from benchmarks.page import END
from benchmarks.percentile import percentile
from benchmarks.record import Measurement, save
from benchmarks.recovery import resumed, takeovers


def test_every_result_file_has_its_table_and_a_missing_one_is_told(tmp_path: Path) -> None:
    row = Measurement("tiny, 1,024 tokens", "downtime of a move, p50", "ms", 10.0, "re-prefill", 500.0)
    save("migration", [row], "two cores", "0123abcd", tmp_path)
    page = filled("\n".join(f"<!-- table: {name} -->\n{END}" for name in NAMES), tmp_path)
    assert "| tiny, 1,024 tokens | downtime of a move, p50 | 10 ms | re-prefill: 500 ms | 50.00 |" in page
    assert page.count(NOT_RUN) == len(NAMES) - 1


def test_the_page_in_the_repository_is_that_of_its_result_files() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page


def test_a_wait_ends_with_the_token_behind_the_longest_gap_after_the_kill() -> None:
    times = [1.0, 9.0, 9.1, 9.2, 13.0, 13.1, 14.0]
    assert resumed(times, killed=9.15) == 13.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0 and percentile([3.0, 1.0, 2.0], 0.99) == 3.0


def test_takeovers_are_those_that_the_log_tells_after_the_kill(tmp_path: Path) -> None:
    name, says = "workflows/w/sessions/s", "is taken over from i-1, under epoch 2"
    lines = [
        {"time": "2026-11-30T19:19:50.000+00:00", "message": f"{name}0 {says}"},
        {"event": "serving", "node": "n2"},
        {"time": "2026-11-30T19:19:58.250+00:00", "message": f"{name}1 {says}"},
        {"time": "2026-11-30T19:19:59.000+00:00", "message": "the model is loaded"},
    ]
    log = tmp_path / "n2.log"
    text = [json.dumps(line) + "\n" for line in lines]
    log.write_text("".join(text))
    assert takeovers(log, start=len(text[0])) == [1796066398.25]
