"""The examples run, and show what they say they show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forkpoint.cli.demo.server import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = {
    "background_agent.py": ["finished it: 96 tokens", "nobody disturbed: True"],
    "blobs_in_one_file.py": ["54 bytes hold 100000, whole"],
    "empty_a_node.py": [
        "3 moved off a, 0 parked, 0 left",
        "a stopped with status 0",
        "every stream is what its log says: True",
    ],
    "fork_and_resume.py": ["left says p7q9aa and right says k4m2zx", "exact: True", "left still says p7q9aa"],
    "recover_a_stream.py": ["nothing missing"],
    "store_on_its_own.py": [
        "replayed 9 tokens; same state: True",
        "refused: epoch 1, the session is at 2",
        "the fork shares 262148 bytes and stored 0",
        "both tell the same: True",
        "0 findings",
    ],
    "sub_agents.py": ["round 2: ", " tokens of 150"],
}
WITHOUT_SERVER = ("blobs_in_one_file.py", "store_on_its_own.py")
"""These take a folder instead of a server's address."""
WITH_NODES = ("background_agent.py", "empty_a_node.py")
"""These start servers of their own."""
HELPERS = ("cluster.py",)


@pytest.mark.parametrize(
    "example", sorted(path.name for path in (ROOT / "examples").glob("*.py") if path.name not in HELPERS)
)
def test_an_example_shows_what_it_says(request: pytest.FixtureRequest, tmp_path: Path, example: str) -> None:
    arguments = []
    if example in WITHOUT_SERVER:
        arguments = [str(tmp_path)]
    elif example not in WITH_NODES:
        server: ServerProcess = request.getfixturevalue("server")
        arguments = [server.address]
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for line in EXPECTED[example]:
        assert line in result.stdout
