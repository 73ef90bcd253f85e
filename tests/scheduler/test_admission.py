"""plan_admission: who gets a slot, and who makes room."""

from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.server.scheduler.admission import NodeRoom, Waiting, plan_admission
from forkpoint.server.scheduler.policy import Idle, pages_for

waitings = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 400), st.booleans()), max_size=8).map(
    lambda rows: [Waiting(n, w, position, n, foreground) for n, (w, position, foreground) in enumerate(rows)]
)
idles = st.lists(st.integers(0, 200), max_size=5).map(lambda rows: [Idle(100 + n, c, n) for n, c in enumerate(rows)])
rooms = st.builds(
    lambda slots, slots_used, pages, pages_used: NodeRoom(
        slots, max(0, slots - slots_used), pages, max(0, pages - pages_used)
    ),
    st.integers(1, 5),
    st.integers(0, 5),
    st.integers(1, 9),
    st.integers(0, 9),
)


@given(waitings, idles, rooms)
@settings(max_examples=300, deadline=None)
def test_admissions_fit_the_free_memory_and_parking_names_idle_sessions_only(
    waiting: list[Waiting[int]], idle: list[Idle[int]], room: NodeRoom
) -> None:
    plan = plan_admission(waiting, idle, room)
    needs = {w.key: pages_for(w.position + 1) for w in waiting}
    assert len(plan.admit) <= room.slots_free
    assert sum(needs[key] for key in plan.admit) <= room.pages_free
    assert set(plan.park) <= {i.key for i in idle}
    assert set(plan.never) == {key for key, pages in needs.items() if pages > room.pages_total}
    assert not set(plan.admit) & set(plan.never)


@given(waitings, idles, rooms)
@settings(max_examples=200, deadline=None)
def test_nobody_is_parked_when_all_who_wait_are_admitted(
    waiting: list[Waiting[int]], idle: list[Idle[int]], room: NodeRoom
) -> None:
    plan = plan_admission(waiting, idle, room)
    if len(plan.admit) + len(plan.never) == len(waiting):
        assert plan.park == ()


def test_a_large_session_is_not_overtaken_by_small_ones() -> None:
    waiting = [Waiting("large", "a", 320, 0), Waiting("small", "b", 10, 1)]
    plan = plan_admission(waiting, [], NodeRoom(8, 8, 10, 2))
    assert plan.admit == () and plan.never == ()


def test_workflows_take_turns() -> None:
    waiting = [Waiting(f"a{n}", "a", 1, n) for n in range(3)] + [Waiting("b0", "b", 1, 3)]
    assert plan_admission(waiting, [], NodeRoom(8, 2, 99, 99)).admit == ("a0", "b0")


def test_a_session_that_somebody_waits_for_goes_before_the_background() -> None:
    waiting = [Waiting("background", "a", 1, 0, foreground=False), Waiting("foreground", "b", 1, 1)]
    assert plan_admission(waiting, [], NodeRoom(8, 1, 99, 99)).admit == ("foreground",)


def test_the_longest_unused_idle_sessions_make_room_and_no_more_than_needed() -> None:
    idle = [Idle("recent", 640, 5), Idle("old", 64, 1), Idle("older", 64, 0)]
    plan = plan_admission([Waiting("w", "a", 100, 0)], idle, NodeRoom(3, 0, 12, 0))
    assert plan.park == ("older", "old")


def test_room_for_one_token_more_than_the_session_holds_is_asked_for() -> None:
    assert plan_admission([Waiting("w", "a", 64, 0)], [], NodeRoom(1, 1, 2, 1)).admit == ()
    assert plan_admission([Waiting("w", "a", 64, 0)], [], NodeRoom(1, 1, 2, 2)).admit == ("w",)
    assert plan_admission([Waiting("w", "a", 64, 0)], [], NodeRoom(1, 1, 1, 1)).never == ("w",)
