"""Recorded runs of a script on a store, and the search for a crash that loses something."""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.check import Severity, check
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from tests.crash.collecting import Collecting
from tests.crash.disk import Crash, Operation
from tests.crash.recording import Recording, RecordingOps, RecordingVFS
from tests.crash.recover import Recoverer, Snapshot, snapshot
from tests.crash.script import Workload
from tests.support.store import MARKER, ManualClock


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
    collecting: int = 0,
    spoil: Callable[[Collecting], None] = lambda script: None,
) -> Run:
    """Run the script on a recorded store: `rounds` of a small fleet, then `collecting` rounds of garbage collection,
    which `spoil` may make a mistake in."""
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

        def acknowledge() -> None:
            recording.note(Operation("ack", None))
            snapshots.append(snapshot(root / "catalog.db"))

        checkpoints = CheckpointStore(catalog, wrap(blobs))
        script = Collecting(catalog, checkpoints, blobs, collecting, acknowledge)
        spoil(script)
        for action in (*Workload(catalog, checkpoints, rounds).actions(), *script.actions()):
            await action()
            recording.note(Operation("ack", None))
            if after is not None:
                await after()
            snapshots.append(snapshot(root / "catalog.db"))
            findings = [finding async for finding in check(catalog, blobs)]
            errors = [finding for finding in findings if finding.severity is Severity.ERROR]
            assert not errors, f"{errors[0].kind}: {errors[0]}"
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
