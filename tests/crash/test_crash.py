"""No acknowledged change is ever lost: crashes at every file operation of a scripted workload, in every shape."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore, Buffer
from forkpoint.statestore.records import ManifestKey
from tests.crash.collecting import Collecting
from tests.crash.disk import Replay
from tests.crash.recording import OpsWithoutContentSync, OpsWithoutFolderSync, Recording, RecordingOps
from tests.crash.runs import Run, first_problem, record, reopened


async def test_a_crash_at_any_operation_in_any_shape_keeps_everything_acknowledged(
    run: Run, memory_folder: Path
) -> None:
    moved = [operation for operation in run.operations[run.opened :] if operation.target == run.database]
    assert {operation.kind for operation in moved} >= {"write", "sync"}, "the WAL was never moved into the database"
    problem, tried = first_problem(run, memory_folder / "scratch", Replay(run.operations).crashes())
    assert problem is None
    assert tried > 10 * len(run.operations)


async def test_a_crash_of_a_short_script_keeps_everything_acknowledged(memory_folder: Path) -> None:
    """What `python -m tests.mutations` puts its mistakes under."""
    run = await record(memory_folder, rounds=1)
    problem, tried = first_problem(run, memory_folder / "scratch", Replay(run.operations).crashes())
    assert problem is None
    assert tried > 1000


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


async def test_blobs_that_are_deleted_while_a_manifest_names_them_are_found_out(memory_folder: Path) -> None:
    def keep_the_rows(script: Collecting) -> None:
        class Lying:
            """Says that a manifest was removed, and keeps it."""

            def __getattr__(self, method: str) -> object:
                return getattr(catalog, method)

            async def remove_manifest(self, key: ManifestKey) -> bool:
                return True

        catalog, script.catalog = script.catalog, cast(Catalog, Lying())

    with pytest.raises(AssertionError, match="BLOB_MISSING"):
        await record(memory_folder, rounds=0, collecting=1, spoil=keep_the_rows)


async def test_a_manifest_committed_before_its_blobs_is_found_out(memory_folder: Path) -> None:
    late: list[LateBlobs] = []

    def wrap(blobs: BlobStore) -> BlobStore:
        late.append(LateBlobs(blobs))
        return cast(BlobStore, late[0])

    run = await record(memory_folder, rounds=1, wrap=wrap, after=lambda: late[0].flush())
    problem, _ = first_problem(run, memory_folder / "scratch", Replay(run.operations).crashes())
    assert problem is not None
    assert "of a committed manifest is missing or torn" in problem
