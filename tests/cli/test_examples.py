"""The examples run, and show what they say they show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forkpoint.cli.demo.server import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = {
    "fork_and_resume.py": ["left says p7q9aa and right says k4m2zx", "exact: True", "left still says p7q9aa"],
    "recover_a_stream.py": ["nothing missing"],
}


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_an_example_shows_what_it_says(server: ServerProcess, example: str) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example), server.address],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for line in EXPECTED[example]:
        assert line in result.stdout
