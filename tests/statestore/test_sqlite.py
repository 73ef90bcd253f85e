"""What only the SQLite catalog promises: versions, failures of the disk, damaged rows, the event loop."""

import asyncio
import fcntl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import apsw
import pytest

from forkpoint.errors import (
    ConfigError,
    LogCorruptError,
    LogTailMissingError,
    StateIncompatibleError,
    StoreFullError,
    StoreUnavailableError,
)
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, ForkSessions, StepCommit
from forkpoint.statestore.check import check
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.sqlite import connection
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from forkpoint.statestore.sqlite.connection import check_sqlite_version
from tests.support.faults import FaultyVFS
from tests.support.store import MARKER, PARAMS, name, new, owned


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[SqliteCatalog]:
    opened = SqliteCatalog(tmp_path / "catalog.db")
    await opened.open(MARKER)
    yield opened
    await opened.close()


@pytest.fixture
async def vfs() -> AsyncIterator[FaultyVFS]:
    faulty = FaultyVFS()
    yield faulty
    faulty.unregister()


@pytest.fixture
async def faulty(tmp_path: Path, vfs: FaultyVFS) -> AsyncIterator[SqliteCatalog]:
    opened = SqliteCatalog(tmp_path / "catalog.db", vfs=vfs.vfs_name)
    await opened.open(MARKER)
    yield opened
    vfs.write_error = vfs.sync_error = None
    await opened.close()


@pytest.mark.parametrize("version", ["3.51.3", "3.51.10", "3.52.0", "3.54.1", "4.0.0", "3.50.7", "3.44.6", "3.50.12"])
def test_a_sqlite_without_the_wal_bug_is_accepted(version: str) -> None:
    check_sqlite_version(version)


@pytest.mark.parametrize("version", ["3.40.1", "3.44.5", "3.45.0", "3.49.2", "3.50.6", "3.51.0", "3.51.2", "3.7.0"])
def test_a_sqlite_with_the_wal_bug_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=version):
        check_sqlite_version(version)


async def test_a_full_disk_changes_nothing_and_passes_once_there_is_room(faulty: SqliteCatalog, vfs: FaultyVFS) -> None:
    await owned(faulty, "s")
    await faulty.append(AppendTokens(name("s"), 1, (1, 2)))
    before = await faulty.get_session(name("s"))
    vfs.write_error = apsw.FullError("no room")
    with pytest.raises(StoreFullError):
        await faulty.append(AppendTokens(name("s"), 1, tuple(range(5000))))
    assert (await faulty.get_session(name("s")), faulty.broken) == (before, None)
    vfs.write_error = None
    assert (await faulty.append(AppendTokens(name("s"), 1, (3,)))).head == 3
    assert (await faulty.read_log(name("s"), 0, 9)).token_ids == (1, 2, 3)


async def test_after_a_failed_fsync_the_store_is_served_no_more_until_opened_again(
    faulty: SqliteCatalog, vfs: FaultyVFS, tmp_path: Path
) -> None:
    await owned(faulty, "s")
    await faulty.append(AppendTokens(name("s"), 1, (1, 2)))
    vfs.sync_error = apsw.IOError("fsync failed")
    with pytest.raises(StoreUnavailableError):
        await faulty.append(AppendTokens(name("s"), 1, (3,)))
    vfs.sync_error = None
    syncs, cause = vfs.syncs, faulty.broken
    with pytest.raises(StoreUnavailableError, match="open it again"):
        await faulty.append(AppendTokens(name("s"), 1, (3,)))
    with pytest.raises(StoreUnavailableError):
        await faulty.get_session(name("s"))
    await faulty.close()
    assert vfs.syncs == syncs and cause is not None, "a failed fsync must not be tried again"
    again = SqliteCatalog(tmp_path / "catalog.db")
    await again.open(MARKER)
    assert (await again.get_session(name("s"))).head in (2, 3)
    assert [finding async for finding in check(again, MemoryBlobs())] == []
    await again.close()


async def test_missing_folders_are_made_and_impossible_ones_are_unavailable(tmp_path: Path) -> None:
    catalog = SqliteCatalog(tmp_path / "a" / "b" / "catalog.db")
    await catalog.open(MARKER)
    await catalog.close()
    for path in (tmp_path / "a" / "b").glob("catalog.db*"):
        assert path.stat().st_mode & 0o077 == 0, path.name
    (tmp_path / "file").write_text("not a folder")
    catalog = SqliteCatalog(tmp_path / "file" / "catalog.db")
    with pytest.raises(StoreUnavailableError):
        await catalog.open(MARKER)
    await catalog.close()


async def test_calls_that_wait_together_share_an_fsync(faulty: SqliteCatalog, vfs: FaultyVFS) -> None:
    sessions = [f"s{index}" for index in range(40)]
    for session in sessions:
        await owned(faulty, session)
    before = vfs.syncs
    outcomes = await asyncio.gather(*(faulty.append(AppendTokens(name(session), 1, (7,))) for session in sessions))
    assert [outcome.head for outcome in outcomes] == [1] * 40
    assert vfs.syncs - before <= 20


async def test_a_call_that_fails_in_company_is_undone_alone(catalog: SqliteCatalog) -> None:
    for session in ("a", "b"):
        await owned(catalog, session)
    busy = BeginGeneration(name("a"), 1, "g", PARAMS, (1, 2))
    results = await asyncio.gather(
        *(catalog.append(AppendTokens(name("b"), 1, (index,))) for index in range(5)),
        catalog.begin_generation(busy),
        catalog.begin_generation(busy),
        catalog.append(AppendTokens(name("b"), 1, (-1,))),
        catalog.create_session(new("b")),
        catalog.fork(ForkSessions(name("b"), None, (new("c"), new("a")))),
        catalog.append(AppendTokens(name("b"), 1, (9,))),
        return_exceptions=True,
    )
    kinds = [type(result).__name__ for result in results]
    assert kinds[:6] == ["AppendOutcome"] * 5 + ["BeginOutcome"]
    assert kinds[6:] == [
        "SessionBusyError",
        "OverflowError",
        "AlreadyExistsError",
        "AlreadyExistsError",
        "AppendOutcome",
    ]
    assert (await catalog.read_log(name("b"), 0, 99)).token_ids == (0, 1, 2, 3, 4, 9)
    assert [row.name.session for row in await catalog.list_sessions("w", None, 9)] == ["a", "b"]
    assert [finding async for finding in check(catalog, MemoryBlobs())] == []


async def test_a_failing_disk_fails_all_calls_of_a_group(faulty: SqliteCatalog, vfs: FaultyVFS) -> None:
    for session in ("a", "b", "c"):
        await owned(faulty, session)
    vfs.write_error = apsw.FullError("no room")
    calls = [faulty.append(AppendTokens(name(session), 1, tuple(range(3000)))) for session in ("a", "b", "c")]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [StoreFullError] * 3
    vfs.write_error = None
    assert [row.head for row in await faulty.list_sessions("w", None, 9)] == [0, 0, 0]


async def test_a_file_of_another_application_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    db = apsw.Connection(str(path))
    db.execute("CREATE TABLE theirs (x); INSERT INTO theirs VALUES (1)")
    db.close()
    catalog = SqliteCatalog(path)
    with pytest.raises(StateIncompatibleError, match="another application"):
        await catalog.open(MARKER)
    await catalog.close()
    db = apsw.Connection(str(path))
    assert [row[0] for row in db.execute("SELECT name FROM sqlite_schema")] == ["theirs"]
    db.close()


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"SQLite format 3\x00" + bytes(4080)])
async def test_a_file_that_is_no_database_is_unavailable(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "catalog.db").write_bytes(content)
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    with pytest.raises(StoreUnavailableError):
        await catalog.open(MARKER)
    await catalog.close()


async def test_the_event_loop_goes_on_while_another_process_holds_the_store(
    catalog: SqliteCatalog, tmp_path: Path
) -> None:
    await owned(catalog, "s")
    other = apsw.Connection(str(tmp_path / "catalog.db"))
    other.execute("BEGIN IMMEDIATE")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(catalog.append(AppendTokens(name("s"), 1, (1,))))
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert not task.done()
        other.execute("COMMIT")
    assert task.result().head == 1
    other.close()


async def test_a_store_that_stays_locked_is_unavailable(
    catalog: SqliteCatalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BUSY_MS", 50)
    impatient = SqliteCatalog(tmp_path / "catalog.db")
    await impatient.open(MARKER)
    await owned(impatient, "s")
    other = apsw.Connection(str(tmp_path / "catalog.db"))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailableError, match="Busy"):
        await impatient.append(AppendTokens(name("s"), 1, (1,)))
    other.execute("COMMIT")
    other.close()
    assert (await impatient.append(AppendTokens(name("s"), 1, (1,)))).head == 1
    await impatient.close()


async def test_only_the_holder_of_the_lock_moves_the_wal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CHECKPOINT_PAGES", 20)
    path = tmp_path / "catalog.db"
    catalog = SqliteCatalog(path)
    await catalog.open(MARKER)
    await owned(catalog, "s")

    async def grow() -> tuple[int, int]:
        before = path.stat().st_size
        for _ in range(30):
            await catalog.append(AppendTokens(name("s"), 1, tuple(range(3000))))
        return before, path.stat().st_size

    with Path(f"{path}-checkpoint").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        before, after = await grow()
        assert after == before
    before, after = await grow()
    assert after > before
    await catalog.close()


async def test_several_processes_share_a_file_and_lose_nothing(tmp_path: Path) -> None:
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    await catalog.open(MARKER)
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from forkpoint.statestore.calls import AppendTokens\n"
        "from forkpoint.statestore.sqlite import connection\n"
        "from forkpoint.statestore.sqlite.catalog import SqliteCatalog\n"
        "from tests.support.store import MARKER, name\n"
        "connection.CHECKPOINT_PAGES = 25\n"
        "async def main():\n"
        "    catalog = SqliteCatalog(Path(sys.argv[1]))\n"
        "    await catalog.open(MARKER)\n"
        "    for turn in range(40):\n"
        "        await catalog.append(AppendTokens(name(sys.argv[2]), 1, (turn,) * 20, expected_position=20 * turn))\n"
        "    await catalog.close()\n"
        "asyncio.run(main())\n"
    )
    sessions = ("p0", "p1", "p2")
    for session in sessions:
        await owned(catalog, session)
    root = Path(__file__).resolve().parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "catalog.db"), session],
            env={"PYTHONPATH": f"{root / 'src'}:{root}"},
        )
        for session in sessions
    ]
    assert [await asyncio.to_thread(process.wait, 60) for process in processes] == [0, 0, 0]
    for session in sessions:
        tokens = (await catalog.read_log(name(session), 0, 10_000)).token_ids
        assert tokens == tuple(turn for turn in range(40) for _ in range(20))
    assert [finding async for finding in check(catalog, MemoryBlobs())] == []
    await catalog.close()


# --- damaged rows --------------------------------------------------------------------------------------------------
async def damaged(tmp_path: Path, sql: str, *values: object) -> SqliteCatalog:
    """A store with a session of 24 records of 3 tokens, after some SQL done to it behind its back."""
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    await catalog.open(MARKER)
    await owned(catalog, "s")
    for start in range(0, 72, 3):
        await catalog.append(AppendTokens(name("s"), 1, (start, start + 1, start + 2)))
    await catalog.close()
    db = apsw.Connection(str(tmp_path / "catalog.db"))
    db.execute(sql, values)
    db.close()
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    await catalog.open(MARKER)
    return catalog


@pytest.mark.parametrize(
    ("sql", "first_bad"),
    [
        ("DELETE FROM log WHERE start = 30", 30),
        ("DELETE FROM log WHERE start = 0", 0),
        ("DELETE FROM log WHERE start = 69", 69),
        ("UPDATE log SET record = (SELECT record FROM log WHERE start = 33) WHERE start = 30", 30),
        ("UPDATE log SET record = zeroblob(length(record)) WHERE start = 30", 30),
        ("UPDATE log SET record = substr(record, 1, length(record) - 1) WHERE start = 30", 30),
        ("UPDATE sessions SET head = 69, tail = substr(tail, 1, 20)", 69),
        ("UPDATE sessions SET grid_hash = zeroblob(32)", 64),
        ("INSERT INTO log SELECT branch, 72, record FROM log WHERE start = 69", 72),
    ],
)
async def test_a_damaged_log_says_from_where(tmp_path: Path, sql: str, first_bad: int) -> None:
    catalog = await damaged(tmp_path, sql)
    with pytest.raises(LogCorruptError) as raised:
        await catalog.read_log(name("s"), 0, 1000)
    assert raised.value.first_bad_position == first_bad
    assert raised.value.last_good_position == first_bad
    kinds = {finding.kind async for finding in check(catalog, MemoryBlobs())}
    assert "DAMAGED_LOG" in kinds
    if 0 < first_bad < 64:
        good = await catalog.read_log(name("s"), 0, first_bad)
        assert good.token_ids == tuple(range(first_bad))
    await catalog.close()


async def test_a_store_put_back_from_an_old_copy_is_found_out_by_what_its_client_knows(tmp_path: Path) -> None:
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    await catalog.open(MARKER)
    await owned(catalog, "s")
    await catalog.append(AppendTokens(name("s"), 1, tuple(range(20))))
    copies = {path: path.read_bytes() for path in (tmp_path / "catalog.db", tmp_path / "catalog.db-wal")}
    seen = await catalog.append(AppendTokens(name("s"), 1, tuple(range(5))))
    await catalog.close()
    for path, data in copies.items():
        path.write_bytes(data)
    (tmp_path / "catalog.db-shm").unlink()
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    await catalog.open(MARKER)
    assert (await catalog.get_session(name("s"))).head == 20
    late = AppendTokens(name("s"), 1, (9,), expected_position=seen.head, expected_head_hash=seen.head_hash)
    with pytest.raises(LogTailMissingError) as raised:
        await catalog.append(late)
    assert (raised.value.client_position, raised.value.head) == (25, 20)
    assert [finding async for finding in check(catalog, MemoryBlobs())] == []
    await catalog.close()


async def test_an_append_behind_a_head_that_went_back_is_refused(tmp_path: Path) -> None:
    catalog = await damaged(tmp_path, "UPDATE sessions SET head = 69, tail = substr(tail, 1, 20)")
    with pytest.raises(LogCorruptError):
        await catalog.append(AppendTokens(name("s"), 1, (1,)))
    await catalog.close()


async def test_a_step_commit_finds_a_damaged_head_too(tmp_path: Path) -> None:
    catalog = await damaged(
        tmp_path, "UPDATE sessions SET head = 69, tail = substr(tail, 1, 20), open_generation = 'g'"
    )
    with pytest.raises(LogCorruptError):
        await catalog.commit_step([StepCommit(name("s"), 1, 69, (1,), "g")])
    await catalog.close()


@pytest.mark.parametrize(
    ("sql", "kind"),
    [
        ("UPDATE branches SET parent = 99 WHERE branch = 2", "WRONG_PARENT"),
        ("UPDATE branches SET fork_position = 3 WHERE branch = 1", "WRONG_PARENT"),
        ("UPDATE sessions SET open_generation = 'ghost' WHERE session = 's'", "OPEN_GENERATION"),
        ("UPDATE sessions SET parent = 'ghost' WHERE session = 'c'", "WRONG_PARENT"),
        ("UPDATE sessions SET fork_position = 99 WHERE session = 'c'", "WRONG_PARENT"),
        ("INSERT INTO log SELECT 77, start, record FROM log LIMIT 1", "ORPHAN_LOG"),
        ("UPDATE sessions SET workflow = 'ghost' WHERE session = 'c'", "ORPHAN_SESSION"),
        (
            "INSERT INTO generations SELECT workflow, session, 'g', branch, '', 500, '{}', NULL, NULL, NULL"
            " FROM sessions WHERE session = 's'",
            "GENERATION_BEYOND_HEAD",
        ),
        (
            "INSERT INTO generations SELECT workflow, session, 'g', branch, '', 500, '{}', 'STOP', 3, NULL"
            " FROM sessions WHERE session = 'c'",
            "GENERATION_RANGE",
        ),
        (
            "INSERT INTO checkpoints SELECT workflow, session, 'c', branch, 3, 0, x'00', 'n', 0, 0, NULL"
            " FROM sessions WHERE session = 's'",
            "MANIFEST_MISSING",
        ),
    ],
)
async def test_check_finds_rows_that_contradict_each_other(
    catalog: SqliteCatalog, tmp_path: Path, sql: str, kind: str
) -> None:
    await owned(catalog, "s")
    await catalog.append(AppendTokens(name("s"), 1, tuple(range(40))))
    await catalog.fork(ForkSessions(name("s"), 20, (new("c"),)))
    assert [finding async for finding in check(catalog, MemoryBlobs())] == []
    db = apsw.Connection(str(tmp_path / "catalog.db"))
    db.execute(f"PRAGMA foreign_keys = OFF; {sql}")
    db.close()
    assert kind in {finding.kind async for finding in check(catalog, MemoryBlobs())}
