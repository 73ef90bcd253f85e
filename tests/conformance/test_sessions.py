"""Sessions: names, owners, epochs, deletion."""

import pytest

from forkpoint.errors import (
    AlreadyExistsError,
    EtagMismatchError,
    NotFoundError,
    PreconditionError,
    StaleEpochError,
)
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, ForkSessions, StepCommit, StepStatus
from forkpoint.statestore.chain import root_hash
from forkpoint.statestore.records import CheckpointPolicy, CheckpointRow, FinishReason, SessionState, WorkflowRow
from tests.support.store import MARKER, PARAMS, POLICY, name, new, owned, request


async def test_a_new_session_is_empty_unowned_and_at_epoch_zero(catalog: Catalog) -> None:
    await catalog.create_workflow(WorkflowRow("w"))
    row, replayed = await catalog.create_session(new("s", transient=True, expire_us=77, standbys=2))
    assert not replayed
    assert row == await catalog.get_session(name("s"))
    assert (row.head, row.epoch, row.owner, row.state, row.parent) == (0, 0, "", SessionState.ACTIVE, None)
    assert row.head_hash == root_hash(MARKER)
    assert (row.seed, row.policy, row.labels, row.transient, row.expire_us) == (-5, POLICY, {"k": "v"}, True, 77)
    assert (row.exact, row.numerics_ids, row.revision, row.fork_position) == (True, (), 1, 0)
    assert (row.standbys, row.migration, row.migration_target, row.takeovers, row.takeover_head) == (2, "", "", 0, 0)


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1, 0])
async def test_every_signed_64_bit_seed_survives(catalog: Catalog, seed: int) -> None:
    await catalog.create_workflow(WorkflowRow("w"))
    await catalog.create_session(new("s", seed=seed))
    assert (await catalog.get_session(name("s"))).seed == seed


async def test_a_session_needs_its_workflow_and_a_free_name(catalog: Catalog) -> None:
    with pytest.raises(NotFoundError):
        await catalog.create_session(new("s"))
    await owned(catalog, "s")
    with pytest.raises(AlreadyExistsError):
        await catalog.create_session(new("s"))
    await catalog.delete_session(name("s"), 1)
    with pytest.raises(AlreadyExistsError):
        await catalog.create_session(new("s"))


async def test_sessions_are_listed_in_pages_across_workflows(catalog: Catalog) -> None:
    for workflow in ("v", "w"):
        await catalog.create_workflow(WorkflowRow(workflow))
        for session in ("b", "a", "c"):
            await catalog.create_session(new(session, workflow))
    await catalog.delete_session(name("b", "v"), 1)
    pages, after = [], None
    while page := await catalog.list_sessions(None, after, 2):
        pages += [str(row.name) for row in page]
        after = page[-1].name
    assert pages == [f"workflows/{w}/sessions/{s}" for w, s in ("va", "vc", "wa", "wb", "wc")]
    assert [row.name.session for row in await catalog.list_sessions("v", None, 9)] == ["a", "c"]
    assert [row.name.session for row in await catalog.list_sessions("v", None, 9, show_deleted=True)] == list("abc")
    assert [row.name.session for row in await catalog.list_sessions("w", name("a"), 9)] == ["b", "c"]


async def test_sessions_that_generate_come_most_recently_updated_first_whoever_owns_them(catalog: Catalog) -> None:
    assert await catalog.list_open_generations() == []
    for session in ("idle", "a", "b", "c", "finished", "deleted"):
        await owned(catalog, session)
        if session != "idle":
            await catalog.begin_generation(BeginGeneration(name(session), 1, "g", PARAMS, (1,)))
    await catalog.commit_step([StepCommit(name("finished"), 1, 1, (2,), "g", finish=FinishReason.STOP)])
    await catalog.delete_session(name("deleted"), 1)
    await catalog.release(name("c"), 1, SessionState.ACTIVE)
    await catalog.release(name("b"), 1, SessionState.QUARANTINED, "why")
    await catalog.commit_step([StepCommit(name("a"), 1, 1, (2,), "g")])
    rows = await catalog.list_open_generations()
    assert rows == [await catalog.get_session(name(session)) for session in ("a", "b", "c")]
    assert [(row.owner, row.state) for row in rows] == [
        ("node-a", SessionState.ACTIVE),
        ("", SessionState.QUARANTINED),
        ("", SessionState.ACTIVE),
    ]


async def test_an_update_changes_what_is_given_and_counts_a_revision(catalog: Catalog) -> None:
    await owned(catalog, "s")
    row = await catalog.update_session(name("s"), 1, labels={"x": "y"})
    assert (row.labels, row.policy, row.revision) == ({"x": "y"}, POLICY, 2)
    row = await catalog.update_session(name("s"), None, policy=CheckpointPolicy(0, True), expire_us=9)
    assert (row.labels, row.policy, row.expire_us, row.revision) == ({"x": "y"}, CheckpointPolicy(0, True), 9, 3)
    row = await catalog.update_session(name("s"), 3, standbys=1)
    assert (row.labels, row.policy, row.standbys, row.revision) == ({"x": "y"}, CheckpointPolicy(0, True), 1, 4)
    row = await catalog.update_session(name("s"), 4, standbys=0)
    assert (row.expire_us, row.standbys) == (9, 0)
    with pytest.raises(EtagMismatchError):
        await catalog.update_session(name("s"), 2, labels={})
    await catalog.append(AppendTokens(name("s"), 1, (1,)))
    assert (await catalog.get_session(name("s"))).revision == 5


async def test_each_owner_gets_a_higher_epoch(catalog: Catalog) -> None:
    await owned(catalog, "s")
    row = await catalog.acquire(name("s"), "node-b", 1)
    assert (row.owner, row.epoch, row.state) == ("node-b", 2, SessionState.ACTIVE)
    with pytest.raises(StaleEpochError) as raised:
        await catalog.acquire(name("s"), "node-c", 1)
    assert raised.value.current_epoch == 2


async def test_a_release_keeps_the_epoch_and_says_why(catalog: Catalog) -> None:
    await owned(catalog, "s")
    row = await catalog.release(name("s"), 1, SessionState.QUARANTINED, "three failures")
    assert (row.owner, row.epoch, row.state, row.state_reason) == ("", 1, SessionState.QUARANTINED, "three failures")
    row = await catalog.acquire(name("s"), "node-b", 1)
    assert (row.state, row.state_reason) == (SessionState.ACTIVE, "")


async def test_a_quarantine_is_lifted_by_a_word_and_then_anybody_may_take_the_session(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await catalog.acquire(name("s"), "node-b", 1)
    before = await catalog.release(name("s"), 2, SessionState.QUARANTINED, "three failures")
    row = await catalog.release_quarantine(name("s"))
    assert (row.state, row.state_reason, row.owner, row.epoch, row.takeovers) == (SessionState.ACTIVE, "", "", 2, 0)
    assert (row.head, row.revision) == (before.head, before.revision)
    assert row == await catalog.get_session(name("s"))
    assert (await catalog.acquire(name("s"), "node-c", 2)).epoch == 3


@pytest.mark.parametrize("state", [SessionState.ACTIVE, SessionState.PAUSED, None])
async def test_what_is_not_quarantined_is_not_released_from_it(catalog: Catalog, state: SessionState | None) -> None:
    await owned(catalog, "s")
    if state is not None:
        await catalog.release(name("s"), 1, state, "why")
    before = await catalog.get_session(name("s"))
    with pytest.raises(PreconditionError):
        await catalog.release_quarantine(name("s"))
    assert await catalog.get_session(name("s")) == before


async def test_a_stale_owner_can_change_nothing(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await catalog.append(AppendTokens(name("s"), 1, (1,)))
    await catalog.acquire(name("s"), "node-b", 1)
    before = await catalog.get_session(name("s"))
    for call in (
        lambda: catalog.append(AppendTokens(name("s"), 1, (2,))),
        lambda: catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS)),
        lambda: catalog.rewind(name("s"), 1, 0),
        lambda: catalog.release(name("s"), 1, SessionState.PAUSED),
        lambda: catalog.note_numerics(name("s"), 1, ("n",), False),
    ):
        with pytest.raises(StaleEpochError):
            await call()
    assert await catalog.get_session(name("s")) == before


@pytest.mark.parametrize("epoch", [0, 1])
async def test_nobody_writes_into_a_session_that_nobody_owns(catalog: Catalog, epoch: int) -> None:
    """Before its first owner, and under the epoch of one that released it: a checkpoint alone may come late."""
    await catalog.create_workflow(WorkflowRow("w"))
    await catalog.create_session(new("s"))
    if epoch:
        await catalog.acquire(name("s"), "node-a", 0)
        await catalog.append(AppendTokens(name("s"), 1, (1, 2)))
        await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS))
        await catalog.commit_step([StepCommit(name("s"), 1, 2, (3,), "g")])
        await catalog.release(name("s"), 1, SessionState.ACTIVE)
    before = await catalog.get_session(name("s"))
    for call in (
        lambda: catalog.append(AppendTokens(name("s"), epoch, (1,))),
        lambda: catalog.begin_generation(BeginGeneration(name("s"), epoch, "h", PARAMS, (1,))),
        lambda: catalog.rewind(name("s"), epoch, 0),
        lambda: catalog.release(name("s"), epoch, SessionState.ACTIVE),
        lambda: catalog.note_numerics(name("s"), epoch, ("n",), False),
        lambda: catalog.begin_migration(name("s"), epoch, "move-1", "node-b"),
    ):
        with pytest.raises(StaleEpochError) as raised:
            await call()
        assert raised.value.current_epoch == epoch
    (outcome,) = await catalog.commit_step([StepCommit(name("s"), epoch, before.head, (9,), "g")])
    assert (outcome.status, outcome.head, outcome.epoch) == (StepStatus.STALE_EPOCH, before.head, epoch)
    assert await catalog.end_migration(name("s"), epoch, "move-1") == before
    late = CheckpointRow(name("s"), "c", before.head, 0, root_hash(MARKER), "n", True, 0)
    assert (await catalog.put_checkpoint(late, b"m", epoch)).position == before.head
    assert await catalog.get_session(name("s")) == before


async def test_numerics_ids_are_kept_in_order_and_inherited(catalog: Catalog) -> None:
    await owned(catalog, "s")
    row = await catalog.note_numerics(name("s"), 1, ("cpu-2", "cpu-1"), False)
    assert (row.numerics_ids, row.exact) == (("cpu-2", "cpu-1"), False)
    child = (await catalog.fork(ForkSessions(name("s"), None, (new("c"),)))).children[0]
    assert (child.numerics_ids, child.exact) == (("cpu-2", "cpu-1"), False)


async def test_a_deleted_session_answers_only_as_a_tombstone(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await catalog.append(AppendTokens(name("s"), 1, (1, 2)))
    row = await catalog.delete_session(name("s"), 99)
    assert (row.state, row.owner, row.epoch, row.purge_us) == (SessionState.DELETED, "", 2, 99)
    assert row.delete_us is not None
    assert await catalog.get_session(name("s")) == row
    for call in (
        lambda: catalog.append(AppendTokens(name("s"), 2, (2,))),
        lambda: catalog.begin_generation(BeginGeneration(name("s"), 2, "g", PARAMS)),
        lambda: catalog.read_log(name("s"), 0, 1),
        lambda: catalog.rewind(name("s"), 2, 0),
        lambda: catalog.fork(ForkSessions(name("s"), 1, (new("c"),))),
        lambda: catalog.acquire(name("s"), "n", 2),
        lambda: catalog.release(name("s"), 2, SessionState.PAUSED),
        lambda: catalog.release_quarantine(name("s")),
        lambda: catalog.update_session(name("s"), None, labels={}),
        lambda: catalog.delete_session(name("s"), 1),
        lambda: catalog.open_generation(name("s")),
        lambda: catalog.get_generation(name("s"), "g"),
        lambda: catalog.list_generations(name("s")),
        lambda: catalog.list_checkpoints(name("s")),
        lambda: catalog.get_checkpoint(name("s"), "c"),
        lambda: catalog.note_numerics(name("s"), 2, (), True),
    ):
        with pytest.raises(NotFoundError):
            await call()
    row = await catalog.undelete_session(name("s"))
    assert (row.state, row.epoch, row.delete_us, row.purge_us) == (SessionState.PAUSED, 2, None, None)
    assert (await catalog.read_log(name("s"), 0, 9)).token_ids == (1, 2)
    with pytest.raises(PreconditionError):
        await catalog.undelete_session(name("s"))


async def test_deleting_cancels_the_open_generation_and_fences_its_step(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS, (1,)))
    await catalog.delete_session(name("s"), 1)
    (outcome,) = await catalog.commit_step([StepCommit(name("s"), 1, 1, (2,), "g")])
    assert (outcome.status, outcome.head, outcome.epoch) == (StepStatus.STALE_EPOCH, 1, 2)
    await catalog.undelete_session(name("s"))
    row = await catalog.get_generation(name("s"), "g")
    assert (row.finish, row.end) == (FinishReason.CANCELLED, 1)
    assert await catalog.open_generation(name("s")) is None


async def test_unknown_sessions_are_not_found(catalog: Catalog) -> None:
    for call in (
        lambda: catalog.get_session(name("x")),
        lambda: catalog.read_log(name("x"), 0, 1),
        lambda: catalog.acquire(name("x"), "n", 0),
        lambda: catalog.delete_session(name("x"), 1),
        lambda: catalog.undelete_session(name("x")),
        lambda: catalog.append(AppendTokens(name("x"), 0, (1,), request=request("r"))),
    ):
        with pytest.raises(NotFoundError):
            await call()
