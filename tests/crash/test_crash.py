"""No acknowledged change is ever lost: crashes at every file operation of a scripted workload, in every shape."""

import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from forkpoint.statestore.blobs import BlobStore, Buffer
from forkpoint.statestore.check import Severity, check
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.sqlite import connection
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from tests.crash.disk import Crash, Operation, Replay
from tests.crash.recording import (
    OpsWithoutContentSync,
    OpsWithoutFolderSync,
    Recording,
    RecordingOps,
    RecordingVFS,
)
from tests.crash.recover import Recoverer, Snapshot, snapshot
from tests.crash.script import Workload
from tests.support.store import MARKER, ManualClock


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of recoveries need no disk."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        yield Path(folder)


@dataclass(frozen=True)
class Run:
    """A recorded run: its operations, and the store after each acknowledged action."""

    operations: list[Operation]
    snapshots: list[Snapshot]
    root: Path
    opened: int
    """Index of the first operation after the store was made."""
    database: int
    """The database's file number."""


async def record(
    folder: Path,
    rounds: int,
    synchronous: str = "FULL",
    ops: Callable[[Recording], RecordingOps] = RecordingOps,
    wrap: Callable[[BlobStore], BlobStore] = lambda blobs: blobs,
    after: Callable[[], Awaitable[None]] | None = None,
) -> Run:
    """Run the script on a recorded store."""
    root = folder / "store"
    root.mkdir()
    recording = Recording()
    vfs = RecordingVFS(recording)
    catalog = SqliteCatalog(root / "catalog.db", ManualClock(), vfs=vfs.vfs_name, synchronous=synchronous)
    blobs = FileBlobs(root / "blobs", ops(recording))
    try:
        await catalog.open(MARKER)
        snapshots = [snapshot(root / "catalog.db")]
        opened = len(recording.operations)
        for action in Workload(catalog, CheckpointStore(catalog, wrap(blobs)), rounds).actions():
            await action()
            recording.note(Operation("ack", None))
            if after is not None:
                await after()
            snapshots.append(snapshot(root / "catalog.db"))
            findings = [finding async for finding in check(catalog, blobs)]
            assert [finding for finding in findings if finding.severity is Severity.ERROR] == []
    finally:
        await catalog.close()
        await blobs.close()
        vfs.unregister()
    return Run(recording.operations, snapshots, root, opened, recording.number_of(str(root / "catalog.db")))


def first_problem(run: Run, scratch: Path, crashes: Iterator[Crash]) -> tuple[str | None, int]:
    """The first crash that loses something, and how many were tried."""
    scratch.mkdir(exist_ok=True)
    recoverer = Recoverer(run.root, scratch, run.snapshots)
    for crash in crashes:
        if crash.point < run.opened:
            continue
        problem = recoverer.problem(crash)
        if problem is not None:
            return problem, recoverer.recoveries
    return None, recoverer.recoveries


async def reopened(run: Run, folder: Path, crash: Crash) -> list[str]:
    """Put everything that a crash left in a folder, open it as a server would, and check it: errors found."""
    for path, data in sorted(crash.state.files().items()):
        target = folder / Path(path).relative_to(run.root)
        if Path(path).is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif target.parent.is_dir() or target.parent == folder:
            target.parent.mkdir(exist_ok=True, parents=True)
            target.write_bytes(data)
    catalog, blobs = SqliteCatalog(folder / "catalog.db"), FileBlobs(folder / "blobs")
    try:
        await catalog.open(MARKER)
        findings = [finding async for finding in check(catalog, blobs)]
        return [str(finding) for finding in findings if finding.severity is Severity.ERROR]
    finally:
        await catalog.close()
        await blobs.close()


@pytest.fixture
async def run(memory_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The workload as it should be, with WAL pages moved often enough to crash in the middle of that too."""
    monkeypatch.setattr(connection, "CHECKPOINT_PAGES", 60)
    return await record(memory_folder, rounds=9)


async def test_a_crash_at_any_operation_in_any_shape_keeps_everything_acknowledged(
    run: Run, memory_folder: Path
) -> None:
    moved = [operation for operation in run.operations[run.opened :] if operation.target == run.database]
    assert {operation.kind for operation in moved} >= {"write", "sync"}, "the WAL was never moved into the database"
    problem, tried = first_problem(run, memory_folder / "scratch", Replay(run.operations).crashes())
    assert problem is None
    assert tried > 10 * len(run.operations)


async def test_a_crash_that_keeps_a_random_part_of_what_was_not_synced_loses_nothing(
    run: Run, memory_folder: Path
) -> None:
    crashes = Replay(run.operations).random_crashes(2000, seed=20_261_130, first=run.opened)
    problem, tried = first_problem(run, memory_folder / "scratch", crashes)
    assert problem is None
    assert tried == 2000


async def test_whatever_a_crash_leaves_opens_and_checks_clean(run: Run, memory_folder: Path) -> None:
    """One crash a stage of the script, half of the unsynced operations gone, through the real catalog and blobs."""
    crashes = Replay(run.operations).random_crashes(60, seed=5, first=run.opened)
    for number, crash in enumerate(crashes):
        folder = memory_folder / f"reopened-{number}"
        folder.mkdir()
        assert await reopened(run, folder, crash) == [], f"{crash.story} at {crash.point}"


async def test_a_crash_while_the_store_is_made_leaves_something_that_opens(run: Run, memory_folder: Path) -> None:
    folder = memory_folder / "making"
    early = [crash for crash in Replay(run.operations).crashes() if crash.point < run.opened]
    assert len(early) > 20
    for number, crash in enumerate(early[:: max(1, len(early) // 60)]):
        target = folder / str(number)
        target.mkdir(parents=True)
        assert await reopened(run, target, crash) == [], f"{crash.story} at {crash.point}"


# --- tests of the test: each mistake must be found -----------------------------------------------------------------
async def test_commits_that_do_not_sync_the_wal_are_found_out(memory_folder: Path) -> None:
    run = await record(memory_folder, rounds=1, synchronous="NORMAL")
    problem, _ = first_problem(run, memory_folder / "scratch", Replay(run.operations).crashes())
    assert problem is not None
    assert "were acknowledged" in problem


@pytest.mark.parametrize("ops", [OpsWithoutFolderSync, OpsWithoutContentSync])
async def test_blobs_that_are_not_synced_are_found_out(
    memory_folder: Path, ops: Callable[[Recording], RecordingOps]
) -> None:
    run = await record(memory_folder, rounds=1, ops=ops)
    problem, _ = first_problem(run, memory_folder / "scratch", Replay(run.operations).crashes())
    assert problem is not None
    assert "of a committed manifest is missing or torn" in problem


class LateBlobs:
    """A mistake to be found: a put that answers before anything is written."""

    def __init__(self, inner: BlobStore) -> None:
        self._inner = inner
        self._late: list[tuple[str, bytes]] = []

    async def put(self, digest: str, *pieces: Buffer) -> bool:
        self._late.append((digest, b"".join(pieces)))
        return True

    async def flush(self) -> None:
        """Write what was put."""
        for digest, frame in self._late:
            await self._inner.put(digest, frame)
        self._late.clear()

    def __getattr__(self, attribute: str) -> object:
        return getattr(self._inner, attribute)


async def test_a_manifest_committed_before_its_blobs_is_found_out(memory_folder: Path) -> None:
    late: list[LateBlobs] = []

    def wrap(blobs: BlobStore) -> BlobStore:
        late.append(LateBlobs(blobs))
        return cast(BlobStore, late[0])

    run = await record(memory_folder, rounds=1, wrap=wrap, after=lambda: late[0].flush())
    problem, _ = first_problem(run, memory_folder / "scratch", Replay(run.operations).crashes())
    assert problem is not None
    assert "of a committed manifest is missing or torn" in problem
