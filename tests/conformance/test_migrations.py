"""Migrations: an owner's word, the cut-over that takes it at its word, and everything that ends it."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from forkpoint.errors import (
    ForkpointError,
    InvalidFieldError,
    NotFoundError,
    PositionConflictError,
    StaleEpochError,
)
from forkpoint.ids import SessionName
from forkpoint.move_errors import MigrationEndedError, MigrationUnderwayError
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, ForkSessions, StepCommit, StepStatus
from forkpoint.statestore.records import FinishReason, SessionRow, SessionState
from tests.conformance.conftest import OpenCatalog
from tests.support.store import PARAMS, name, new, owned

MOVE = "move-1"


async def leaving(catalog: Catalog, session: str = "s") -> SessionRow:
    """A session of node-a at epoch 1 with tokens, on its way to node-b."""
    await owned(catalog, session)
    await catalog.append(AppendTokens(name(session), 1, tuple(range(20))))
    return await catalog.begin_migration(name(session), 1, MOVE, "node-b")


async def cut(catalog: Catalog, row: SessionRow, owner: str = "node-b", migration: str = MOVE) -> SessionRow:
    """Cut over what `row` tells."""
    return await catalog.cut_over(row.name, row.epoch, migration, owner, row.head, row.head_hash)


async def test_a_migration_shows_in_the_row_and_changes_nothing_else_that_an_update_could_meet(
    catalog: Catalog,
) -> None:
    row = await leaving(catalog)
    assert (row.migration, row.migration_target, row.owner, row.epoch) == (MOVE, "node-b", "node-a", 1)
    assert (row.revision, row.head, row.state) == (1, 20, SessionState.ACTIVE)
    assert row == await catalog.get_session(name("s"))
    assert row in await catalog.list_sessions("w", None, 10)


async def test_the_same_word_again_changes_nothing(catalog: Catalog) -> None:
    row = await leaving(catalog)
    assert await catalog.begin_migration(name("s"), 1, MOVE, "node-b") == row


@pytest.mark.parametrize(("migration", "target"), [("move-2", "node-b"), (MOVE, "node-c"), ("move-2", "node-c")])
async def test_there_is_one_migration_at_a_time(catalog: Catalog, migration: str, target: str) -> None:
    row = await leaving(catalog)
    with pytest.raises(MigrationUnderwayError) as raised:
        await catalog.begin_migration(name("s"), 1, migration, target)
    assert (raised.value.migration, raised.value.target) == (MOVE, "node-b")
    assert await catalog.get_session(name("s")) == row


async def test_a_migration_needs_an_id_and_a_target(catalog: Catalog) -> None:
    await owned(catalog, "s")
    for migration, target in (("", "node-b"), (MOVE, "")):
        with pytest.raises(InvalidFieldError):
            await catalog.begin_migration(name("s"), 1, migration, target)
    row = await catalog.get_session(name("s"))
    with pytest.raises(MigrationEndedError):
        await cut(catalog, row, owner="", migration="")
    assert await catalog.end_migration(name("s"), 1, "") == row


async def test_only_the_owner_gives_its_word_and_takes_it_back(catalog: Catalog) -> None:
    row = await leaving(catalog)
    for epoch in (0, 2):
        with pytest.raises(StaleEpochError):
            await catalog.begin_migration(name("s"), epoch, MOVE, "node-b")
        with pytest.raises(StaleEpochError) as raised:
            await catalog.end_migration(name("s"), epoch, MOVE)
        assert raised.value.current_epoch == 1
    assert await catalog.get_session(name("s")) == row


async def test_who_released_a_session_can_not_say_that_it_may_go(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await catalog.release(name("s"), 1, SessionState.PAUSED)
    with pytest.raises(StaleEpochError):
        await catalog.begin_migration(name("s"), 1, MOVE, "node-b")


async def test_a_cut_over_gives_the_session_to_the_target_under_a_new_epoch(catalog: Catalog) -> None:
    row = await leaving(catalog)
    moved = await cut(catalog, row)
    assert (moved.owner, moved.epoch, moved.state) == ("node-b", 2, SessionState.ACTIVE)
    assert (moved.migration, moved.migration_target, moved.takeovers) == ("", "", 0)
    assert (moved.head, moved.head_hash, moved.branch, moved.revision) == (20, row.head_hash, row.branch, 1)
    assert await catalog.get_session(name("s")) == moved
    with pytest.raises(StaleEpochError):
        await catalog.append(AppendTokens(name("s"), 1, (1,)))
    assert (await catalog.append(AppendTokens(name("s"), 2, (1,)))).head == 21


async def test_an_open_generation_goes_along_with_what_its_last_steps_wrote(
    catalog: Catalog, another: OpenCatalog
) -> None:
    target = await another()
    await leaving(catalog)
    await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS))
    for position in range(20, 27):
        await catalog.commit_step([StepCommit(name("s"), 1, position, (position,), "g", (-0.5,))])
    row = await target.get_session(name("s"))
    moved = await cut(target, row)
    assert (moved.epoch, moved.head, moved.head_hash) == (2, 27, row.head_hash)
    (late,) = await catalog.commit_step([StepCommit(name("s"), 1, 27, (99,), "g")])
    assert (late.status, late.head, late.epoch) == (StepStatus.STALE_EPOCH, 27, 2)
    (step,) = await target.commit_step([StepCommit(name("s"), 2, 27, (27,), "g", (-0.5,), FinishReason.STOP)])
    assert (step.status, step.head) == (StepStatus.COMMITTED, 28)
    assert (await catalog.read_log(name("s"), 18, 99)).token_ids == (18, 19, *range(20, 28))
    assert (await catalog.get_generation(name("s"), "g")).end == 28


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"epoch": 0}, StaleEpochError),
        ({"epoch": 2}, StaleEpochError),
        ({"migration": "move-2"}, MigrationEndedError),
        ({"incarnation": "node-c"}, MigrationEndedError),
        ({"head": 19}, PositionConflictError),
        ({"head": 21}, PositionConflictError),
        ({"head_hash": bytes(32)}, PositionConflictError),
        ({"epoch": 0, "migration": "move-2", "head": 19}, StaleEpochError),
        ({"migration": "move-2", "head": 19}, MigrationEndedError),
    ],
    ids=str,
)
async def test_a_cut_over_that_is_wrong_in_anything_changes_nothing(
    catalog: Catalog, change: dict[str, object], error: type[ForkpointError]
) -> None:
    row = await leaving(catalog)
    right: dict[str, object] = {
        "name": row.name,
        "epoch": 1,
        "migration": MOVE,
        "incarnation": "node-b",
        "head": row.head,
        "head_hash": row.head_hash,
    }
    with pytest.raises(error) as raised:
        await catalog.cut_over(**{**right, **change})  # type: ignore[arg-type]
    if isinstance(raised.value, PositionConflictError):
        assert (raised.value.head, raised.value.head_hash) == (20, row.head_hash.hex())
    assert await catalog.get_session(name("s")) == row
    assert (await cut(catalog, row)).owner == "node-b", "the right one is as good as before"


async def test_without_a_word_there_is_no_cut_over(catalog: Catalog) -> None:
    row = await owned(catalog, "s")
    with pytest.raises(MigrationEndedError):
        await cut(catalog, row)
    assert await catalog.get_session(name("s")) == row


async def test_a_cut_over_made_again_is_stale_and_the_row_tells_that_it_was_made(catalog: Catalog) -> None:
    row = await leaving(catalog)
    moved = await cut(catalog, row)
    with pytest.raises(StaleEpochError) as raised:
        await cut(catalog, row)
    assert (raised.value.epoch, raised.value.current_epoch) == (1, 2)
    assert await catalog.get_session(name("s")) == moved


async def test_a_late_cut_over_fails_once_the_owner_took_back_its_word(catalog: Catalog) -> None:
    row = await leaving(catalog)
    back = await catalog.end_migration(name("s"), 1, MOVE)
    assert (back.migration, back.migration_target, back.owner, back.epoch) == ("", "", "node-a", 1)
    assert await catalog.end_migration(name("s"), 1, MOVE) == back
    with pytest.raises(MigrationEndedError):
        await cut(catalog, row)
    assert await catalog.get_session(name("s")) == back
    assert (await catalog.append(AppendTokens(name("s"), 1, (1,)))).head == 21


async def test_the_word_of_one_migration_is_not_taken_back_by_another(catalog: Catalog) -> None:
    row = await leaving(catalog)
    assert await catalog.end_migration(name("s"), 1, "move-0") == row
    assert (await cut(catalog, row)).owner == "node-b"
    with pytest.raises(StaleEpochError):
        await catalog.end_migration(name("s"), 1, MOVE)


async def test_a_log_that_grew_is_not_cut_over_at_its_old_head(catalog: Catalog) -> None:
    row = await leaving(catalog)
    await catalog.append(AppendTokens(name("s"), 1, (1,)))
    grown = await catalog.get_session(name("s"))
    with pytest.raises(PositionConflictError) as raised:
        await cut(catalog, row)
    assert (raised.value.head, raised.value.head_hash) == (21, grown.head_hash.hex())
    assert (await cut(catalog, grown)).epoch == 2


async def rewound(catalog: Catalog) -> None:
    await catalog.rewind(name("s"), 1, 20)


async def rewound_and_written_again(catalog: Catalog) -> None:
    await catalog.rewind(name("s"), 1, 4)
    await catalog.append(AppendTokens(name("s"), 1, tuple(range(4, 20))))


async def deleted_and_back(catalog: Catalog) -> None:
    await catalog.delete_session(name("s"), 1)
    await catalog.undelete_session(name("s"))


async def released(catalog: Catalog) -> None:
    await catalog.release(name("s"), 1, SessionState.ACTIVE)


async def taken(catalog: Catalog) -> None:
    await catalog.acquire(name("s"), "node-c", 1)


async def taken_by_its_target(catalog: Catalog) -> None:
    await catalog.acquire(name("s"), "node-b", 1)


async def isolated_and_let_go(catalog: Catalog) -> None:
    await catalog.release(name("s"), 1, SessionState.QUARANTINED, "why")
    await catalog.release_quarantine(name("s"))


ENDS: list[Callable[[Catalog], Awaitable[None]]] = [
    rewound,
    rewound_and_written_again,
    deleted_and_back,
    released,
    taken,
    taken_by_its_target,
    isolated_and_let_go,
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_what_takes_the_session_elsewhere_ends_its_migration_for_good(
    catalog: Catalog, end: Callable[[Catalog], Awaitable[None]]
) -> None:
    """Though the log may be, token for token, the one that the follower has."""
    row = await leaving(catalog)
    await end(catalog)
    after = await catalog.get_session(name("s"))
    assert (after.migration, after.migration_target) == ("", "")
    for epoch in (row.epoch, after.epoch):
        with pytest.raises((StaleEpochError, MigrationEndedError)):
            await catalog.cut_over(name("s"), epoch, MOVE, "node-b", row.head, row.head_hash)
    assert await catalog.get_session(name("s")) == after


async def test_a_fork_leaves_its_parents_migration_alone_and_has_none(catalog: Catalog) -> None:
    row = await leaving(catalog)
    (child,) = (await catalog.fork(ForkSessions(name("s"), 10, (new("c"),)))).children
    assert (child.migration, child.migration_target, child.owner) == ("", "", "")
    assert (await catalog.get_session(name("s"))).migration == MOVE
    moved = await cut(catalog, row)
    assert (moved.owner, moved.head) == ("node-b", 20)
    assert (await catalog.read_log(name("c"), 0, 99)).token_ids == tuple(range(10))


async def test_migrations_of_unknown_and_deleted_sessions_are_not_found(catalog: Catalog) -> None:
    await leaving(catalog)
    await catalog.delete_session(name("s"), 1)
    calls: list[Callable[[SessionName], Awaitable[SessionRow]]] = [
        lambda n: catalog.begin_migration(n, 1, MOVE, "node-b"),
        lambda n: catalog.end_migration(n, 1, MOVE),
        lambda n: catalog.cut_over(n, 1, MOVE, "node-b", 0, bytes(32)),
    ]
    for session in ("s", "x"):
        for call in calls:
            with pytest.raises(NotFoundError):
                await call(name(session))


# --- two at the same time ------------------------------------------------------------------------------------------


async def outcome(call: Awaitable[SessionRow]) -> SessionRow | ForkpointError:
    try:
        return await call
    except ForkpointError as error:
        return error


@pytest.mark.parametrize("cut_first", [True, False])
async def test_of_a_cut_over_and_the_word_taken_back_exactly_one_wins(
    catalog: Catalog, another: OpenCatalog, cut_first: bool
) -> None:
    target = await another()
    for number in range(8):
        row = await leaving(catalog, f"s{number}")
        calls = [outcome(cut(target, row)), outcome(catalog.end_migration(row.name, 1, MOVE))]
        results = await asyncio.gather(*(calls if cut_first else calls[::-1]))
        cut_result, end_result = results if cut_first else results[::-1]
        after = await catalog.get_session(row.name)
        assert after.migration == ""
        if after.owner == "node-b":
            assert (after.epoch, cut_result) == (2, after)
            assert isinstance(end_result, StaleEpochError)
        else:
            assert (after.owner, after.epoch, end_result) == ("node-a", 1, after)
            assert isinstance(cut_result, MigrationEndedError)


@pytest.mark.parametrize("cut_first", [True, False])
async def test_of_a_cut_over_and_a_step_exactly_one_wins(
    catalog: Catalog, another: OpenCatalog, cut_first: bool
) -> None:
    """No token is ever committed behind the head that was cut over."""
    target = await another()
    for number in range(8):
        await leaving(catalog, f"s{number}")
        session = name(f"s{number}")
        await catalog.begin_generation(BeginGeneration(session, 1, "g", PARAMS))
        (first,) = await catalog.commit_step([StepCommit(session, 1, 20, (7,), "g")])
        assert first.status is StepStatus.COMMITTED
        row = await target.get_session(session)
        step = catalog.commit_step([StepCommit(session, 1, 21, (8,), "g")])
        if cut_first:
            cut_result, (committed,) = await asyncio.gather(outcome(cut(target, row)), step)
        else:
            (committed,), cut_result = await asyncio.gather(step, outcome(cut(target, row)))
        after = await catalog.get_session(session)
        if committed.status is StepStatus.COMMITTED:
            assert isinstance(cut_result, PositionConflictError)
            assert (after.owner, after.epoch, after.head) == ("node-a", 1, 22)
        else:
            assert committed.status is StepStatus.STALE_EPOCH
            assert cut_result == after
            assert (after.owner, after.epoch, after.head) == ("node-b", 2, 21)


# --- how often owners were lost ------------------------------------------------------------------------------------


def lost(row: SessionRow) -> tuple[int, int]:
    return row.takeovers, row.takeover_head


async def generating(catalog: Catalog, session: str = "s") -> SessionName:
    """A session of node-a at epoch 1 and head 2 with an open generation."""
    row = await owned(catalog, session)
    assert lost(row) == (0, 0), "who comes first takes it from nobody"
    await catalog.begin_generation(BeginGeneration(row.name, 1, "g", PARAMS, (1, 2)))
    return row.name


async def test_owners_that_lose_a_session_in_a_row_are_counted(catalog: Catalog) -> None:
    session = await generating(catalog)
    for epoch in (1, 2, 3):
        row = await catalog.acquire(session, f"node-{epoch}", epoch)
        assert lost(row) == (epoch, 2)
        assert row == await catalog.get_session(session)


async def test_a_log_that_grew_since_starts_the_count_anew(catalog: Catalog) -> None:
    session = await generating(catalog)
    for epoch in (1, 2):
        await catalog.acquire(session, f"node-{epoch}", epoch)
    await catalog.commit_step([StepCommit(session, 3, 2, (3,), "g")])
    assert lost(await catalog.acquire(session, "node-d", 3)) == (1, 3)


async def test_a_session_that_had_nothing_to_do_did_not_cost_its_owner(catalog: Catalog) -> None:
    """However many owners of an idle session die: a standby may have taken it each time."""
    session = await generating(catalog)
    await catalog.acquire(session, "node-b", 1)
    await catalog.commit_step([StepCommit(session, 2, 2, (), "g", finish=FinishReason.CANCELLED)])
    for epoch in (2, 3, 4, 5):
        assert lost(await catalog.acquire(session, f"node-{epoch}", epoch)) == (1, 2)
    await catalog.begin_generation(BeginGeneration(session, 6, "h", PARAMS))
    assert lost(await catalog.acquire(session, "node-c", 6)) == (2, 2)


async def test_who_takes_its_own_session_again_has_not_lost_it(catalog: Catalog) -> None:
    session = await generating(catalog)
    await catalog.acquire(session, "node-b", 1)
    assert lost(await catalog.acquire(session, "node-b", 2)) == (1, 2)


async def test_a_release_and_a_cut_over_end_the_count(catalog: Catalog) -> None:
    for session in ("s", "t"):
        await catalog.acquire(await generating(catalog, session), "node-b", 1)
    assert (await catalog.release(name("s"), 2, SessionState.ACTIVE)).takeovers == 0
    assert (await catalog.acquire(name("s"), "node-c", 2)).takeovers == 0
    row = await catalog.begin_migration(name("t"), 2, MOVE, "node-c")
    assert row.takeovers == 1
    assert (await cut(catalog, row, "node-c")).takeovers == 0
