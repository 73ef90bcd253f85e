"""Where sessions go: pure functions, over any nodes."""

from collections import Counter
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as some

from forkpoint.ids import SessionName
from forkpoint.server.session.placement import HYSTERESIS, Candidate, NodeState, PlacementAsk, choose, cost, rank
from forkpoint.statestore.records import NodeStatus

NAME = SessionName("w", "s")
FEW = settings(max_examples=60, deadline=None)


def node(
    number: int, sessions: int = 0, state: NodeState = NodeState.SERVING, numerics: str = "x", slots: int = 16
) -> Candidate:
    status = NodeStatus(
        slots_total=slots, slots_free=max(0, slots - sessions), pages_total=64, pages_free=64, sessions=sessions
    )
    return Candidate(f"i{number}", numerics, state, status)


@some.composite
def nodes(draw: some.DrawFn) -> list[Candidate]:
    """Up to six nodes in any condition."""
    found = []
    for number in range(draw(some.integers(0, 6))):
        total = draw(some.integers(0, 32))
        pages = draw(some.integers(0, 64))
        status = NodeStatus(
            slots_total=total,
            slots_free=draw(some.integers(0, total)),
            pages_total=pages,
            pages_free=draw(some.integers(0, pages)),
            sessions=draw(some.integers(0, 50)),
            waiting=draw(some.integers(0, 20)),
        )
        state, numerics = draw(some.sampled_from(NodeState)), draw(some.sampled_from("xy"))
        found.append(Candidate(f"i{number}", numerics, state, status, draw(some.integers(0, 5))))
    return found


incarnations = some.sampled_from([f"i{number}" for number in range(6)])
asks = some.builds(
    PlacementAsk,
    name=some.builds(SessionName, some.just("w"), some.text("abcdef", min_size=1, max_size=8)),
    numerics_id=some.sampled_from(["", "x", "y"]),
    here=some.one_of(some.just(""), incarnations),
    near=some.frozensets(incarnations, max_size=2),
    excluded=some.frozensets(incarnations, max_size=2),
    workflow=some.dictionaries(incarnations, some.integers(0, 9)),
    pages=some.integers(0, 80),
)


@FEW
@given(nodes(), asks)
def test_who_is_chosen_serves_computes_the_same_bits_and_has_room_for_it(
    found: list[Candidate], ask: PlacementAsk
) -> None:
    chosen = choose(found, ask)
    fit = [
        candidate
        for candidate in found
        if candidate.state is NodeState.SERVING
        and ask.numerics_id in ("", candidate.numerics_id)
        and candidate.incarnation not in ask.excluded
        and (candidate.status.pages_total == 0 or ask.pages <= candidate.status.pages_total)
    ]
    assert (chosen is None) == (not fit)
    if chosen is not None:
        taker = next(candidate for candidate in fit if candidate.incarnation == chosen)
        best = min(cost(candidate, ask) for candidate in fit)
        assert cost(taker, ask) <= best + (HYSTERESIS if chosen == ask.here else 0)


@FEW
@given(nodes(), asks, some.randoms())
def test_the_order_in_which_nodes_are_listed_decides_nothing(
    found: list[Candidate], ask: PlacementAsk, rng: Random
) -> None:
    shuffled = list(found)
    rng.shuffle(shuffled)
    assert choose(shuffled, ask) == choose(found, ask)
    assert rank(ask.name, shuffled, ask.numerics_id) == rank(ask.name, found, ask.numerics_id)


@FEW
@given(nodes(), asks)
def test_every_serving_node_has_one_place_in_the_ranking(found: list[Candidate], ask: PlacementAsk) -> None:
    serving = {candidate.incarnation for candidate in found if candidate.state is NodeState.SERVING}
    equal = {c.incarnation for c in found if c.incarnation in serving and c.numerics_id == ask.numerics_id}
    turns = rank(ask.name, found, ask.numerics_id)
    assert len(turns) == len(set(turns))
    assert set(turns) == (equal or serving)


@FEW
@given(nodes(), asks)
def test_a_node_that_goes_leaves_the_others_in_their_order(found: list[Candidate], ask: PlacementAsk) -> None:
    turns = rank(ask.name, found, ask.numerics_id)
    if len(turns) < 2:
        return
    left = [candidate for candidate in found if candidate.incarnation != turns[0]]
    assert rank(ask.name, left, ask.numerics_id) == turns[1:], "only what the first one had moves, to the second"


def test_the_least_loaded_node_is_chosen_counting_those_that_wait_and_those_just_sent() -> None:
    assert choose([node(1, 9), node(2, 3), node(3, 7)], PlacementAsk(NAME)) == "i2"
    waiting = replace(node(2, 3), status=replace(node(2, 3).status, waiting=9))
    assert choose([node(1, 9), waiting, node(3, 7)], PlacementAsk(NAME)) == "i3"
    assert choose([node(1, 9), node(3, 7), replace(node(2, 3), placed=5)], PlacementAsk(NAME)) == "i3"
    small, large = node(1, 4, slots=4), node(2, 8, slots=64)
    assert choose([small, large], PlacementAsk(NAME)) == "i2", "a share of its slots, not a number"


def test_pages_count_as_much_as_slots() -> None:
    full = replace(node(1, 0), status=replace(node(1, 0).status, pages_free=2))
    assert choose([full, node(2, 8)], PlacementAsk(NAME)) == "i2"


def test_a_session_stays_where_it_was_asked_for_unless_another_node_is_clearly_better() -> None:
    near, far = node(1, 6), node(2, 3)
    assert choose([near, far], PlacementAsk(NAME, here="i1")) == "i1"
    assert choose([node(1, 12), far], PlacementAsk(NAME, here="i1")) == "i2"
    assert choose([near, far], PlacementAsk(NAME)) == "i2"


def test_a_session_goes_where_its_prefix_is_unless_that_node_is_much_fuller() -> None:
    ask = PlacementAsk(NAME, here="i1", near=frozenset({"i2"}))
    assert choose([node(1, 2), node(2, 3)], ask) == "i2"
    assert choose([node(1, 0), node(2, 14)], ask) == "i1"


def test_a_workflow_spreads_over_equal_nodes() -> None:
    ask = PlacementAsk(NAME, workflow={"i1": 4, "i2": 1})
    assert choose([node(1, 5), node(2, 5)], ask) == "i2"


def test_many_sessions_of_one_dead_node_come_to_the_others_in_proportion_to_their_free_slots() -> None:
    survivors = [node(1, 1), node(2, 8), node(3, 15)]
    first = Counter(rank(SessionName("w", f"s{number}"), survivors)[0] for number in range(4000))
    weights = {"i1": 16, "i2": 9, "i3": 2}
    for incarnation, weight in weights.items():
        expected = 4000 * weight / sum(weights.values())
        assert abs(first[incarnation] - expected) < 5 * expected**0.5


def test_any_node_takes_over_what_no_node_of_its_numerics_is_left_for() -> None:
    survivors = [node(1, numerics="y"), node(2, numerics="y")]
    assert set(rank(NAME, survivors, "x")) == {"i1", "i2"}
    assert rank(NAME, [*survivors, node(3, numerics="x")], "x") == ("i3",)
    assert choose(survivors, PlacementAsk(NAME, "x")) is None, "a live session is not moved to other bits"
