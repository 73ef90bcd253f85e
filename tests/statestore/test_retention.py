"""Which checkpoints stay: the last few, the ladder, fork points, what was asked for, and what a session needs."""

from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forkpoint.limits import CHECKPOINTS_KEPT_DEFAULT, LADDER_STEP_TOKENS_DEFAULT
from forkpoint.statestore.records import CheckpointRow
from forkpoint.statestore.retention import Drop, Keep, RetentionPolicy, SessionFacts, judge
from tests.support.store import name

POLICY = RetentionPolicy(3, 64)
NO_LADDER = RetentionPolicy(2, 0)


def row(grid: int, automatic: bool = True, expire_us: int | None = None, numerics_id: str = "n") -> CheckpointRow:
    checkpoint = f"c{grid}" if automatic else f"u{grid}"
    return CheckpointRow(
        name("s"), checkpoint, grid, grid, grid.to_bytes(32, "little"), numerics_id, automatic, grid, expire_us
    )


def facts(
    rows: list[CheckpointRow], head: int, keep_last: int = 0, deleted: bool = False, gone: bool = False
) -> SessionFacts:
    return SessionFacts(head, keep_last, gone, deleted, frozenset(row.checkpoint for row in rows))


def reasons(
    rows: list[CheckpointRow],
    known: SessionFacts,
    policy: RetentionPolicy = NO_LADDER,
    now_us: int = 0,
    needed: Mapping[str, Keep] | None = None,
) -> dict[str, Keep | Drop]:
    return {v.row.checkpoint: v.reason for v in judge(known, rows, needed or {}, policy, now_us)}


def kept_grids(grids: list[int], head: int, policy: RetentionPolicy) -> list[int]:
    rows = [row(grid) for grid in grids]
    return [v.row.grid_position for v in judge(facts(rows, head), rows, {}, policy, 0) if v.stays]


def test_the_last_few_stay_and_older_ones_go() -> None:
    rows = [row(grid) for grid in (16, 32, 48, 64)]
    assert reasons(rows, facts(rows, 70)) == {
        "c16": Drop.THINNED,
        "c32": Drop.THINNED,
        "c48": Keep.LAST,
        "c64": Keep.LAST,
    }


def test_a_session_may_keep_more_than_the_default() -> None:
    rows = [row(grid) for grid in (16, 32, 48, 64)]
    assert set(reasons(rows, facts(rows, 70, keep_last=4)).values()) == {Keep.LAST}


def test_checkpoints_of_one_state_count_once() -> None:
    twice = CheckpointRow(name("s"), "again", 70, 64, (64).to_bytes(32, "little"), "n", True, 999)
    rows = [row(32), row(48), row(64), twice]
    found = reasons(rows, facts(rows, 70))
    assert (found["again"], found["c64"], found["c48"], found["c32"]) == (
        Keep.LAST,
        Drop.THINNED,
        Keep.LAST,
        Drop.THINNED,
    )


def test_what_a_caller_asked_for_stays_until_it_expires() -> None:
    rows = [row(16, automatic=False), row(32, automatic=False, expire_us=100), row(48), row(64), row(80)]
    known = facts(rows, 90)
    before, after = reasons(rows, known, now_us=99), reasons(rows, known, now_us=100)
    assert (before["u16"], before["u32"]) == (Keep.REQUESTED, Keep.REQUESTED)
    assert (after["u16"], after["u32"]) == (Keep.REQUESTED, Drop.EXPIRED)
    assert before["c64"] is Keep.LAST


def test_an_automatic_checkpoint_may_expire_too() -> None:
    rows = [row(64, expire_us=100)]
    assert reasons(rows, facts(rows, 90), now_us=100) == {"c64": Drop.EXPIRED}


def test_what_a_session_needs_stays_whatever_else_holds() -> None:
    rows = [row(16), row(32, expire_us=1), row(48), row(64), row(80, automatic=False, expire_us=1)]
    needed = {"c16": Keep.ANCESTOR, "c32": Keep.ANCESTOR, "u80": Keep.ANCESTOR}
    found = reasons(rows, facts([], 90, gone=True, deleted=True), now_us=5, needed=needed)
    assert [found[key] for key in needed] == [Keep.ANCESTOR] * 3
    assert {found["c48"], found["c64"]} == {Drop.SESSION_GONE}


def test_a_fork_point_stays_unless_it_expired() -> None:
    rows = [row(16), row(32, expire_us=1), row(48), row(64)]
    found = reasons(rows, facts(rows, 70), now_us=5, needed={"c16": Keep.FORK_POINT, "c32": Keep.FORK_POINT})
    assert (found["c16"], found["c32"]) == (Keep.FORK_POINT, Drop.EXPIRED)


def test_off_the_chain_only_what_was_asked_for_stays() -> None:
    rows = [row(16), row(32), row(48, automatic=False), row(64)]
    found = reasons(rows, facts(rows[:1], 20))
    assert list(found.values()) == [Keep.LAST, Drop.OFF_CHAIN, Keep.REQUESTED, Drop.OFF_CHAIN]


def test_a_deleted_session_keeps_what_it_comes_back_with() -> None:
    rows = [row(16), row(32), row(48, automatic=False)]
    deleted, gone = facts([], 60, deleted=True), facts([], 60, deleted=True, gone=True)
    assert list(reasons(rows, deleted, needed={"c32": Keep.ANCESTOR}).values()) == [
        Drop.SESSION_GONE,
        Keep.ANCESTOR,
        Keep.REQUESTED,
    ]
    assert set(reasons(rows, gone).values()) == {Drop.SESSION_GONE}


def test_the_ladder_thins_out_with_the_distance() -> None:
    grids = list(range(16, 4096, 16))
    kept = kept_grids(grids, 4096, POLICY)
    assert kept[-3:] == [4048, 4064, 4080]
    gaps = [later - earlier for earlier, later in pairwise(kept)]
    assert gaps[0] >= 1024
    assert kept[:3] == [16, 2048, 3072]
    assert len(kept) < 16


def test_the_ladder_may_be_switched_off() -> None:
    assert kept_grids(list(range(16, 4096, 16)), 4096, NO_LADDER) == [4064, 4080]


@settings(max_examples=150, deadline=None)
@given(
    every=st.sampled_from([16, 32, 48, 160]),
    step=st.sampled_from([16, 64, 144]),
    keep=st.integers(2, 5),
    looks=st.lists(st.integers(1, 40), min_size=1, max_size=40),
)
@example(every=48, step=144, keep=5, looks=[33, 1])
def test_thinning_again_and_again_keeps_what_thinning_once_would(
    every: int, step: int, keep: int, looks: list[int]
) -> None:
    policy = RetentionPolicy(keep, step)
    head, made, kept = 0, list[int](), list[int]()
    for count in looks:
        new = [head + every * (index + 1) for index in range(count)]
        head = new[-1]
        made += new
        kept = kept_grids(kept + new, head, policy)
        assert kept == kept_grids(made, head, policy)


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(1, 400),
    every=st.sampled_from([16, 48, 160]),
    step=st.sampled_from([16, 64, 144]),
    at=st.floats(0, 1),
)
def test_a_replay_to_any_position_is_about_as_long_as_it_lies_behind(
    count: int, every: int, step: int, at: float
) -> None:
    head = every * count
    kept = kept_grids([every * (index + 1) for index in range(count)], head, RetentionPolicy(2, step))
    position = int(at * head)
    from_grid = max((grid for grid in kept if grid <= position), default=0)
    assert position - from_grid <= 2 * max(step, head - position) + every


@settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 3000), step=st.sampled_from([16, 64, 144]), keep=st.integers(2, 9))
def test_what_is_kept_grows_with_the_logarithm_of_the_length(count: int, step: int, keep: int) -> None:
    head = 16 * count
    kept = kept_grids([16 * (index + 1) for index in range(count)], head, RetentionPolicy(keep, step))
    assert len(kept) <= keep + 4 + 2 * max(1, (head // step).bit_length())
    assert kept[-1] == head


@pytest.mark.parametrize("bad", [(1, 64), (1001, 64), (3, -16), (3, 17), (3, 1 << 21)])
def test_a_policy_out_of_bounds_is_refused(bad: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"keep_last|ladder_step_tokens"):
        RetentionPolicy(*bad)


def test_the_defaults_are_a_policy() -> None:
    RetentionPolicy(CHECKPOINTS_KEPT_DEFAULT, LADDER_STEP_TOKENS_DEFAULT)
