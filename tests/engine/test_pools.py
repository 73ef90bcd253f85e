"""Pool: counts add up under any use, and misuse is refused."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.errors import NodeCapacityError
from forkpoint.server.engine.pools import Pool


@given(
    st.integers(0, 6), st.lists(st.tuples(st.sampled_from(["take", "share", "give"]), st.integers(0, 7)), max_size=60)
)
@settings(max_examples=200, deadline=None)
def test_free_plus_used_is_total_whatever_happens(size: int, actions: list[tuple[str, int]]) -> None:
    pool = Pool("pages", size)
    held: Counter[int] = Counter()
    for action, number in actions:
        if action == "take":
            if number > pool.free:
                with pytest.raises(NodeCapacityError):
                    pool.take(number)
            else:
                taken = pool.take(number)
                assert len(set(taken)) == number and not set(taken) & set(held)
                held.update(taken)
        elif held:
            piece = sorted(held)[number % len(held)]
            if action == "share":
                pool.share([piece])
                held[piece] += 1
            else:
                freed = pool.give_back([piece])
                held[piece] -= 1
                held += Counter()
                assert freed == ([] if piece in held else [piece])
        assert pool.check(held.elements()) == []
        assert pool.free == size - len(held)
        assert all(pool.holders(piece) == held[piece] for piece in range(size))


def test_a_refused_take_takes_nothing_and_says_how_much_is_free() -> None:
    pool = Pool("slots", 3)
    pool.take(2)
    with pytest.raises(NodeCapacityError) as raised:
        pool.take(2)
    assert (raised.value.what, raised.value.needed, raised.value.free) == ("slots", 2, 1)
    assert pool.free == 1


def test_a_double_free_is_refused_and_changes_nothing() -> None:
    pool = Pool("pages", 3)
    first, second = pool.take(2)
    pool.give_back([first])
    with pytest.raises(ValueError, match="more often than it is held"):
        pool.give_back([second, first])
    with pytest.raises(ValueError, match="more often than it is held"):
        pool.give_back([second, second])
    with pytest.raises(ValueError, match="more often than it is held"):
        pool.share([first])
    assert pool.check([second]) == []


@pytest.mark.parametrize("piece", [-1, 3, -3])
def test_an_id_outside_the_pool_is_refused(piece: int) -> None:
    pool = Pool("pages", 3)
    pool.take(3)
    with pytest.raises(ValueError, match="there is no"):
        pool.give_back([piece])
    with pytest.raises(ValueError, match="there is no"):
        pool.holders(piece)


def test_counts_of_a_pool_or_of_a_take_are_not_negative() -> None:
    with pytest.raises(ValueError, match="a pool of -1"):
        Pool("pages", -1)
    with pytest.raises(ValueError, match="take -1"):
        Pool("pages", 1).take(-1)


def test_check_names_a_leak_a_stranger_and_a_piece_freed_too_often() -> None:
    pool = Pool("pages", 4)
    taken = pool.take(2)
    assert pool.check([]) == [f"pages: {piece} counts 1 holders, 0 list it" for piece in sorted(taken)]
    assert pool.check([*taken, taken[0]]) == [f"pages: {taken[0]} counts 1 holders, 2 list it"]
    assert pool.check([*taken, -1]) == ["pages: -1 counts 0 holders, 1 list it"]
    pool._free.append(taken[0])
    assert any("free and held" in problem for problem in pool.check(taken))
    assert any("is not 4" in problem for problem in pool.check(taken))
    pool._free.append(taken[0])
    assert "pages: an id is free twice" in pool.check(taken)
