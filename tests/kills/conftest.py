"""Real servers that are killed for real."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.small_disk import SmallDisk

KILLS_DEFAULT: Final = 5
KILLS_MANY: Final = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest tests/kills --kills 2000` for a long run."""
    parser.addoption("--kills", type=int, default=0, help=f"server kills (default {KILLS_DEFAULT} and {KILLS_MANY})")
    parser.addoption("--kill-seed", type=int, default=20261130, help="seed of the moments")


@pytest.fixture(params=[KILLS_DEFAULT, KILLS_MANY], ids=["some", "many"])
def kills(request: pytest.FixtureRequest) -> int:
    """How often the server is killed."""
    # Without tests/kills on the command line this file is loaded too late to add its options.
    count: int = request.config.getoption("--kills", default=0) or request.param
    return count


@pytest.fixture
def kill_seed(request: pytest.FixtureRequest) -> int:
    """Seed of the moments at which it is killed."""
    seed: int = request.config.getoption("--kill-seed", default=20261130)
    return seed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """64 MiB of tmpfs."""
    if os.geteuid() != 0:
        pytest.skip("a size-limited file system needs the right to mount one")
    try:
        disk = SmallDisk(tmp_path / "disk", 64 * 1024)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"tmpfs can't be mounted here: {error}")
    yield disk
    disk.unmount()
