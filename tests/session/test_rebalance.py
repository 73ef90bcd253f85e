"""Which sessions would move so that nodes have about as much to do as one another."""

import random

import pytest

from forkpoint.ids import SessionName
from forkpoint.server.session.rebalance import Move, NodeLoad, plan_moves


def load(incarnation: str, running: int, slots: int = 4) -> NodeLoad:
    """A node on which so many sessions run."""
    return NodeLoad(incarnation, slots, tuple(SessionName("w", f"{incarnation}{n}") for n in range(running)))


def after(nodes: list[NodeLoad], moves: list[Move]) -> dict[str, int]:
    """How many sessions run where then."""
    counts = {node.incarnation: len(node.running) for node in nodes}
    for move in moves:
        counts[move.source] -= 1
        counts[move.target] += 1
    return counts


def test_nodes_of_one_size_end_at_most_one_session_apart(rng: random.Random) -> None:
    for _ in range(200):
        nodes = [load(f"n{at}", rng.randrange(20)) for at in range(rng.randrange(1, 6))]
        counts = after(nodes, plan_moves(nodes)).values()
        assert max(counts) - min(counts) <= 1


def test_a_larger_node_is_given_its_share() -> None:
    nodes = [load("large", 0, slots=12), load("small", 12, slots=4)]
    assert after(nodes, plan_moves(nodes)) == {"large": 9, "small": 3}


def test_no_session_moves_twice_and_every_move_helps(rng: random.Random) -> None:
    for _ in range(200):
        nodes = [load(f"n{at}", rng.randrange(12), rng.randrange(1, 9)) for at in range(rng.randrange(2, 6))]
        slots = {node.incarnation: node.slots_total for node in nodes}
        moves = plan_moves(nodes)
        assert len({move.name for move in moves}) == len(moves)
        for at, move in enumerate(moves):
            before, then = after(nodes, moves[:at]), after(nodes, moves[: at + 1])
            assert then[move.target] / slots[move.target] < before[move.source] / slots[move.source]


@pytest.mark.parametrize("running", [[], [5], [3, 3, 3], [2, 3, 2]])
def test_nothing_moves_where_nothing_would_get_better(running: list[int]) -> None:
    assert plan_moves([load(f"n{at}", count) for at, count in enumerate(running)]) == []


def test_no_more_sessions_move_than_asked_for_and_those_at_the_front_first() -> None:
    moves = plan_moves([load("a", 8), load("b", 0)], moves_max=2)
    assert [(str(move.name.session), move.source, move.target) for move in moves] == [
        ("a0", "a", "b"),
        ("a1", "a", "b"),
    ]


def test_a_node_without_room_of_its_own_counts_as_one_slot() -> None:
    nodes = [load("a", 2, slots=0), load("b", 0, slots=2)]
    assert after(nodes, plan_moves(nodes)) == {"a": 1, "b": 1}
