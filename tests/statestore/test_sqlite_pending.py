"""Generated tokens before they are in the log: whatever looks at them, or comes between, sees one log."""

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import apsw
import pytest

from forkpoint.errors import LogCorruptError
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, ForkSessions, StepCommit, StepStatus
from forkpoint.statestore.check import Severity, check
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.records import FinishReason, Kind, SessionState
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from forkpoint.statestore.sqlite.pending import MOVE_TOKENS
from tests.support.store import MARKER, PARAMS, ManualClock, name, new, owned

PROMPT = tuple(range(21))


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory, when there is such a place: these tests are about meaning, not about disks."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[SqliteCatalog]:
    catalog = SqliteCatalog(tmp_path / "catalog.db", ManualClock())
    await catalog.open(MARKER)
    yield catalog
    await catalog.close()


async def generating(catalog: Catalog, session: str) -> None:
    """A session at epoch 1 with a prompt and an open generation `g`."""
    await owned(catalog, session)
    await catalog.begin_generation(BeginGeneration(name(session), 1, "g", PARAMS, PROMPT))


async def step(catalog: Catalog, session: str, start: int, epoch: int = 1, count: int = 1) -> None:
    """Commit tokens whose ids tell their positions, every third without a log-probability."""
    tokens = tuple(range(1000 + start, 1000 + start + count))
    logprobs = tuple(None if position % 3 == 0 else -float(position) for position in range(start, start + count))
    (outcome,) = await catalog.commit_step([StepCommit(name(session), epoch, start, tokens, "g", logprobs)])
    assert outcome.status is StepStatus.COMMITTED
    assert outcome.head == start + count


def expected(stop: int) -> tuple[int, ...]:
    return (PROMPT + tuple(range(1000 + len(PROMPT), 1000 + stop)))[:stop]


def count_of(folder: Path, table: str) -> int:
    db = apsw.Connection(str(folder / "catalog.db"))
    try:
        return int(next(db.execute(f"SELECT count(*) FROM {table}"))[0])
    finally:
        db.close()


async def test_a_step_writes_one_short_row_and_the_log_grows_by_long_records(
    catalog: SqliteCatalog, tmp_path: Path
) -> None:
    await generating(catalog, "s")
    for position in range(21, 221):
        await step(catalog, "s", position)
        row = await catalog.get_session(name("s"))
        assert row.head == position + 1
    assert count_of(tmp_path, "pending") == 1
    assert count_of(tmp_path, "log") <= 1 + 200 // MOVE_TOKENS
    log = await catalog.read_log(name("s"), 0, 1000)
    assert log.token_ids == expected(221)
    assert log.kinds == (Kind.PROMPT,) * 21 + (Kind.GENERATED,) * 200
    assert log.logprobs[21:] == tuple(None if p % 3 == 0 else -float(p) for p in range(21, 221))


async def test_sessions_that_run_in_step_do_not_move_in_the_same_step(catalog: SqliteCatalog, tmp_path: Path) -> None:
    names = [f"s{number}" for number in range(8)]
    for session in names:
        await generating(catalog, session)
    moved, before = [], count_of(tmp_path, "log")
    for position in range(21, 21 + 4 * MOVE_TOKENS):
        await catalog.commit_step([StepCommit(name(session), 1, position, (7,), "g") for session in names])
        now = count_of(tmp_path, "log")
        moved.append(now - before)
        before = now
    assert sum(moved) >= 2 * len(names)
    assert max(moved) == 1


@pytest.mark.parametrize("held", [1, 15, MOVE_TOKENS])
async def test_any_stretch_of_the_log_can_be_read_across_the_border(catalog: SqliteCatalog, held: int) -> None:
    await generating(catalog, "s")
    for position in range(21, 21 + held):
        await step(catalog, "s", position)
    stop = 21 + held
    for start in range(stop + 1):
        for limit in (1, 5, 100):
            part = await catalog.read_log(name("s"), start, limit)
            assert part.token_ids == expected(stop)[start : start + limit]


async def test_forks_at_every_position_see_their_part_and_nothing_later(catalog: SqliteCatalog) -> None:
    await generating(catalog, "s")
    for position in range(21, 50):
        await step(catalog, "s", position)
    for position in range(1, 51):
        child = f"c{position}"
        await catalog.fork(ForkSessions(name("s"), position, (new(child),)))
        if position % 7 == 0:
            head = (await catalog.get_session(name("s"))).head
            await step(catalog, "s", head)
        assert (await catalog.read_log(name(child), 0, 1000)).token_ids == expected(position)
    assert [finding async for finding in check(catalog, MemoryBlobs())] == []


async def test_a_new_owner_goes_on_where_the_old_one_was_and_the_old_one_adds_nothing(catalog: SqliteCatalog) -> None:
    await generating(catalog, "s")
    for position in range(21, 30):
        await step(catalog, "s", position)
    await catalog.acquire(name("s"), "node-b", 1)
    late = StepCommit(name("s"), 1, 30, (5,), "g")
    assert [outcome.status for outcome in await catalog.commit_step([late])] == [StepStatus.STALE_EPOCH]
    for position in range(30, 40):
        await step(catalog, "s", position, epoch=2)
    row = await catalog.release(name("s"), 2, SessionState.ACTIVE)
    assert row.head == 40
    assert (await catalog.read_log(name("s"), 0, 100)).token_ids == expected(40)


async def test_what_a_generation_left_stays_when_its_session_is_deleted(catalog: SqliteCatalog, tmp_path: Path) -> None:
    await generating(catalog, "s")
    for position in range(21, 30):
        await step(catalog, "s", position)
    assert (await catalog.delete_session(name("s"), 5)).head == 30
    assert count_of(tmp_path, "pending") == 0
    await catalog.undelete_session(name("s"))
    assert (await catalog.read_log(name("s"), 0, 100)).token_ids == expected(30)
    assert (await catalog.get_generation(name("s"), "g")).end == 30


async def test_two_commits_of_one_session_in_a_step_follow_each_other(catalog: SqliteCatalog) -> None:
    await generating(catalog, "s")
    first, second = (StepCommit(name("s"), 1, start, (start,), "g") for start in (21, 22))
    last = StepCommit(name("s"), 1, 23, (), "g", (), FinishReason.STOP)
    outcomes = await catalog.commit_step([first, second, second, last])
    assert [(outcome.status, outcome.head) for outcome in outcomes] == [
        (StepStatus.COMMITTED, 22),
        (StepStatus.COMMITTED, 23),
        (StepStatus.CONFLICT, 23),
        (StepStatus.COMMITTED, 23),
    ]
    assert (await catalog.get_generation(name("s"), "g")).end == 23
    assert (await catalog.read_log(name("s"), 21, 9)).token_ids == (21, 22)


async def test_another_process_sees_what_is_pending(catalog: SqliteCatalog, tmp_path: Path) -> None:
    other = SqliteCatalog(tmp_path / "catalog.db", ManualClock())
    await other.open(MARKER)
    await generating(catalog, "s")
    for position in range(21, 90):
        await step((catalog, other)[position % 2], "s", position)
    for reader in (catalog, other):
        assert (await reader.read_log(name("s"), 0, 100)).token_ids == expected(90)
        assert [row.head for row in await reader.list_open_generations()] == [90]
    await other.close()


@pytest.mark.parametrize("seed", range(4))
async def test_steps_of_any_length_equal_those_of_a_catalog_without_the_detour(
    catalog: SqliteCatalog, seed: int
) -> None:
    rng, plain = random.Random(seed), MemoryCatalog(ManualClock())
    await plain.open(MARKER)
    names = [f"s{number}" for number in range(3)]
    for session in names:
        for one in (catalog, plain):
            await generating(one, session)
    heads = dict.fromkeys(names, 21)
    for _ in range(120):
        commits = []
        for session in rng.sample(names, rng.randint(1, 3)):
            count = rng.choice((1, 1, 1, 2, 3, MOVE_TOKENS - 1, MOVE_TOKENS, 5000))
            tokens = tuple(rng.randrange(2**32) for _ in range(count))
            logprobs = rng.choice(((), (-0.5,) * count))
            commits.append(StepCommit(name(session), 1, heads[session], tokens, "g", logprobs))
            heads[session] += count
        assert await catalog.commit_step(commits) == await plain.commit_step(commits)
    for session in names:
        everything = [await one.read_log(name(session), 0, heads[session]) for one in (catalog, plain)]
        assert everything[0] == everything[1]
        ends = [StepCommit(name(session), 1, heads[session], (), "g", (), FinishReason.LENGTH)]
        assert await catalog.commit_step(ends) == await plain.commit_step(ends)
        more = AppendTokens(name(session), 1, (4, 5, 6))
        assert await catalog.append(more) == await plain.append(more)


# --- damage --------------------------------------------------------------------------------------------------------
async def test_every_flipped_bit_of_a_pending_record_is_found_by_readers_and_by_the_next_step(
    catalog: SqliteCatalog, tmp_path: Path
) -> None:
    await generating(catalog, "s")
    for position in range(21, 24):
        await step(catalog, "s", position)
    db = apsw.Connection(str(tmp_path / "catalog.db"))
    (good,) = next(db.execute("SELECT record FROM pending"))
    for bit in range(0, 8 * len(good), 5):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        db.execute("UPDATE pending SET record = ?", (bytes(bad),))
        with pytest.raises(LogCorruptError):
            await catalog.read_log(name("s"), 21, 10)
        with pytest.raises(LogCorruptError):
            await catalog.commit_step([StepCommit(name("s"), 1, 24, (9,), "g")])
    db.execute("UPDATE pending SET record = ?", (good,))
    db.close()
    await step(catalog, "s", 24)
    assert (await catalog.read_log(name("s"), 0, 100)).token_ids == expected(25)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE pending SET start = start + 1",
        "UPDATE pending SET epoch = epoch + 1",
        "UPDATE pending SET branch = 77",
        "UPDATE pending SET generation = 'ghost'",
        "UPDATE pending SET session = 'ghost'",
        "UPDATE pending SET head = start, tail = substr(tail, 1, 20)",
    ],
)
async def test_check_finds_pending_tokens_that_do_not_belong(catalog: SqliteCatalog, tmp_path: Path, sql: str) -> None:
    await generating(catalog, "s")
    await step(catalog, "s", 21)
    assert [finding async for finding in check(catalog, MemoryBlobs())] == []
    db = apsw.Connection(str(tmp_path / "catalog.db"))
    db.execute(sql)
    db.close()
    assert "PENDING_TOKENS" in {finding.kind async for finding in check(catalog, MemoryBlobs())}


# --- what is remembered from step to step --------------------------------------------------------------------------
async def test_a_step_that_failed_is_not_remembered(catalog: SqliteCatalog, tmp_path: Path) -> None:
    for session in ("good", "bad"):
        await generating(catalog, session)
        await step(catalog, session, 21)
    db = apsw.Connection(str(tmp_path / "catalog.db"))
    branch = (await catalog.get_session(name("bad"))).branch
    db.execute("INSERT INTO log (branch, start, record) VALUES (?, 40, x'00')", (int(branch),))
    for head in range(22, 28, 2):
        good = StepCommit(name("good"), 1, head, (1000 + head,), "g")
        commits = [good, StepCommit(name("bad"), 1, 22, (5,) * 40, "g")]
        with pytest.raises(LogCorruptError):
            await catalog.commit_step(commits)
        await step(catalog, "good", head)
        commits[0] = replace(good, start=head + 1, token_ids=(1000 + head + 1,))
        other = catalog.get_session(name("good"))
        with pytest.raises(LogCorruptError):
            await asyncio.gather(catalog.commit_step(commits), catalog.commit_step([]), other)
        await step(catalog, "good", head + 1)
    db.execute("DELETE FROM log WHERE start = 40")
    db.close()
    for position in range(28, 100):
        await step(catalog, "good", position)
    assert (await catalog.read_log(name("good"), 0, 200)).token_ids == expected(100)


async def test_whatever_else_writes_between_two_steps_counts(catalog: SqliteCatalog, tmp_path: Path) -> None:
    other = SqliteCatalog(tmp_path / "catalog.db", ManualClock())
    await other.open(MARKER)
    await generating(catalog, "s")
    head, epoch, rng = 21, 1, random.Random(7)
    for number in range(60):
        await step(catalog, "s", head, epoch)
        head += 1
        writer = rng.choice((catalog, other))
        what = rng.randrange(4)
        if what == 0:
            await step(writer, "s", head, epoch)
            head += 1
        elif what == 1:
            epoch = (await writer.acquire(name("s"), "node-b", epoch)).epoch
            late = StepCommit(name("s"), epoch - 1, head, (1,), "g")
            assert (await catalog.commit_step([late]))[0].status is StepStatus.STALE_EPOCH
        elif what == 2:
            await writer.fork(ForkSessions(name("s"), None, (new(f"c{number}"),)))
    assert (await other.read_log(name("s"), 0, 1000)).token_ids == expected(head)
    errors = [finding async for finding in check(catalog, MemoryBlobs()) if finding.severity is Severity.ERROR]
    assert errors == []
    await other.close()
