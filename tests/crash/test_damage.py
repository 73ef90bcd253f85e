"""Every bit of a small store flipped, and every truncation: all of it is found out, none of it is served."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import apsw
import pytest

from forkpoint.errors import BlobDamagedError, LogCorruptError
from forkpoint.parts import PartSpec
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, StepCommit
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from tests.crash.victims import TOKENS, save
from tests.support.store import MARKER, PARAMS, name, owned

SESSION = name("s")
SMALL = PartSpec("kda.000.state.0", "uint8", (40,))
LOG = tuple(range(7, 7 + 18))
RECORDS = {"log": ("record", 2), "pending": ("record", 1)}
"""Table -> its column of bytes, and how many rows the small log has in it."""


def damaged(data: bytes) -> Iterator[bytes]:
    """Each bit flipped, then each truncation."""
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)
    for length in range(len(data)):
        yield data[:length]


@pytest.fixture
async def catalog(memory_folder: Path) -> AsyncIterator[SqliteCatalog]:
    """A log in two records, the end of it still pending."""
    catalog = SqliteCatalog(memory_folder / "catalog.db", synchronous="OFF")
    await catalog.open(MARKER)
    row = await owned(catalog, SESSION.session)
    await catalog.append(AppendTokens(SESSION, row.epoch, LOG[:9]))
    await catalog.begin_generation(BeginGeneration(SESSION, row.epoch, "g", PARAMS, LOG[9:16]))
    for token in LOG[16:]:
        head = (await catalog.get_session(SESSION)).head
        await catalog.commit_step([StepCommit(SESSION, row.epoch, head, (token,), "g", (-0.5,))])
    yield catalog
    await catalog.close()


async def test_no_damage_to_a_log_is_served(catalog: SqliteCatalog, memory_folder: Path) -> None:
    assert (await catalog.read_log(SESSION, 0, 100)).token_ids == LOG
    db = apsw.Connection(str(memory_folder / "catalog.db"))
    tried = 0
    try:
        for table, (column, rows) in RECORDS.items():
            found = list(db.execute(f"SELECT start, {column} FROM {table} ORDER BY start"))
            assert len(found) == rows, f"{table} has {len(found)} rows"
            for start, data in found:
                for wrong in damaged(data):
                    db.execute(f"UPDATE {table} SET {column} = ? WHERE start = ?", (wrong, start))
                    with pytest.raises(LogCorruptError):
                        await catalog.read_log(SESSION, 0, 100)
                    tried += 1
                db.execute(f"UPDATE {table} SET {column} = ? WHERE start = ?", (data, start))
    finally:
        db.close()
    assert tried > 1000
    assert (await catalog.read_log(SESSION, 0, 100)).token_ids == LOG


async def test_no_damage_to_a_blobs_file_is_served(memory_folder: Path) -> None:
    catalog = SqliteCatalog(memory_folder / "blobs.db", synchronous="OFF")
    await catalog.open(MARKER)
    blobs = FileBlobs(memory_folder / "blobs")
    await blobs.open()
    row = await owned(catalog, SESSION.session)
    await catalog.append(AppendTokens(SESSION, row.epoch, TOKENS))
    store = CheckpointStore(catalog, blobs)
    await save(catalog, store, SESSION, 32, [(SMALL, bytes(range(SMALL.nbytes)))])
    _, manifest = await catalog.get_checkpoint(SESSION, "c32")
    files = [path for path in (memory_folder / "blobs" / "blobs").rglob("*") if path.is_file()]
    (file,) = files
    whole = file.read_bytes()
    try:
        for wrong in damaged(whole):
            file.write_bytes(wrong)
            with pytest.raises(BlobDamagedError):
                _ = [part async for part in store.load(manifest, (SMALL,))]
        file.write_bytes(whole)
        assert len([part async for part in store.load(manifest, (SMALL,))]) == 1
    finally:
        await catalog.close()
        await blobs.close()
