"""The demo itself, once as it should be and once sabotaged."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forkpoint.cli.demo import story
from forkpoint.cli.demo.report import SessionResult, compare
from forkpoint.cli.main import main


def demo(*arguments: str) -> tuple[int, dict[str, Any], str]:
    result = subprocess.run(
        [sys.executable, "-m", "forkpoint.cli.main", "demo", "--json", "--no-progress", *arguments],
        capture_output=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("FORKPOINT_")},
        timeout=300,
        check=False,
    )
    assert result.stdout, result.stderr.decode()
    return result.returncode, json.loads(result.stdout), result.stderr.decode()


def test_the_demo_ends_equal_and_shows_what_it_promises(tmp_path: Path) -> None:
    status, report, errors = demo("--keep", str(tmp_path / "kept"))
    assert (status, report["equal"], errors) == (0, True, "")
    assert report["generated_tokens"] <= 600
    assert {c["session"] for c in report["comparisons"]} == {"reader", "child-a", "child-b", "child-c"}
    assert all(c["tokens"] > 4000 and c["parts"] > 24 for c in report["comparisons"])
    killed = next(step for step in report["steps"] if "kill -9" in step["what"])
    assert re.search(r"[1-4] streams go on", killed["what"])
    assert killed["restored"] > 0 and killed["replayed"] > 0
    moved = next(step for step in report["steps"] if "second server" in step["what"])
    assert moved["restored"] > 0
    assert report["store"]["checkpoints"] > 4 and report["store"]["shared"] > report["store"]["distinct"] > 0
    assert sum(answer["right"] for answer in report["answers"]) >= 6
    assert (tmp_path / "kept" / "store" / "catalog.sqlite").is_file()


def test_the_sabotaged_demo_ends_unequal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a document that is just long enough to be checkpointed and restored: what it takes is reading it twice."""
    monkeypatch.setattr(story, "DOCUMENT_BYTES", 1000)
    status = main(["demo", "--json", "--no-progress", "--sabotage", "conv-tail"])
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert status == 1 and printed.err.startswith("error: UNEQUAL: ")
    assert not report["equal"] and report["sabotage"] == "conv-tail"
    reader = next(c for c in report["comparisons"] if c["session"] == "reader")
    assert reader["other_parts"]


def test_the_comparison_finds_one_token_one_part_and_a_missing_part() -> None:
    same = SessionResult((1, 2, 3), {"a": "00", "b": "01"})
    assert compare("s", same, same).equal
    assert compare("s", same, SessionResult((1, 9, 3), same.parts)).first_other_token == 1
    assert compare("s", same, SessionResult((1, 2), same.parts)).first_other_token == 2
    assert compare("s", same, SessionResult((1, 2, 3), {"a": "00", "b": "02"})).other_parts == ("b",)
    assert compare("s", same, SessionResult((1, 2, 3), {"a": "00"})).other_parts == ("b",)


def test_a_folder_that_exists_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--keep", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: INVALID_FIELD: --keep")
