"""Where stores are rebuilt."""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forkpoint.statestore.sqlite import connection
from tests.crash.runs import Run, record


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of recoveries need no disk."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder of the test's own."""
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """The workload as it should be, with WAL pages moved often enough to crash in the middle of that too."""
    with pytest.MonkeyPatch.context() as patch, folder_in_memory() as folder:
        patch.setattr(connection, "CHECKPOINT_PAGES", 60)
        yield asyncio.run(record(folder, rounds=3, collecting=2))
