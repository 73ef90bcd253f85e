"""A real process, killed at every stage of a checkpoint: afterwards the old one or both are there, each whole."""

import os
import subprocess
import sys
from pathlib import Path

from forkpoint.errors import NotFoundError
from forkpoint.statestore.check import Severity, check
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from tests.crash.victims import SESSION, SPECS, TOKENS, save, state
from tests.support.store import MARKER

ROOT = Path(__file__).resolve().parents[2]


async def loaded(catalog: SqliteCatalog, store: CheckpointStore, grid: int) -> list[bytes] | None:
    """The parts of a checkpoint, each verified; None when there is no such checkpoint."""
    try:
        _, manifest = await catalog.get_checkpoint(SESSION, f"c{grid}")
    except NotFoundError:
        return None
    return [bytes(data) async for _, data in store.load(manifest, SPECS)]


async def looked_at(folder: Path) -> bool:
    """What a crash left: all sound. Whether the second checkpoint is there; it can be saved, again or at last."""
    catalog, blobs = SqliteCatalog(folder / "catalog.db"), FileBlobs(folder / "blobs")
    await catalog.open(MARKER)
    await blobs.open()
    store = CheckpointStore(catalog, blobs)
    try:
        assert (await catalog.read_log(SESSION, 0, 1000)).token_ids == TOKENS
        assert await loaded(catalog, store, 32) == [data for _, data in state(32)]
        second = await loaded(catalog, store, 64)
        assert second in (None, [data for _, data in state(64)])
        await save(catalog, store, SESSION, 64)
        assert await loaded(catalog, store, 64) == [data for _, data in state(64)]
        findings = [found async for found in check(catalog, blobs)]
        assert [found for found in findings if found.severity is Severity.ERROR] == []
        assert list((folder / "blobs" / "tmp").glob("*.*-*")) == [], "a dead process's temporaries were not swept"
    finally:
        await catalog.close()
        await blobs.close()
    return second is not None


async def test_a_process_killed_at_every_stage_of_a_checkpoint_leaves_the_old_one_or_both(memory_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.victims", str(memory_folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(("src", "."))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    stages = int(done.stdout)
    assert stages > 20, "the checkpoint had few stages"
    there = [await looked_at(memory_folder / f"stage-{stage}") for stage in range(1, stages + 1)]
    assert there[0] is False and there[-1] is True
    assert there == sorted(there), "once it was committed it stayed"
