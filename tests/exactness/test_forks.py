"""A fork at any position continues as its parent would, and neither sees what the other does."""

import random

from tests.support.engines import capture_digest, state_digest
from tests.support.lab import Model


def test_a_fork_at_any_position_continues_like_its_parent(model: Model) -> None:
    length = 70
    lab = model.lab(slots=length + 2, pages=4 * length)
    parent = lab.create()
    children = [lab.fork(parent)]
    for _ in range(length):
        lab.step((parent, 1))
        children.append(lab.fork(parent))
    # Children lie at every position 0..70; they catch up with a chunk, one token, and decode in one batch.
    lab.step(*((child, 1) for child in children))
    lab.check_state(*children)
    lab.step(*((child, 19) for child in children))
    lab.step(*((child, 1) for child in children))
    lab.check_state(parent, *children)


def test_forks_while_others_decode_in_the_same_batch_do_not_disturb_them(model: Model) -> None:
    lab = model.lab(slots=40, pages=200)
    parent, other = lab.run(lab.create(), 40), lab.run(lab.create(model.stream(1)), 55)
    children: list[int] = []
    for _ in range(30):
        lab.step((other, 1), (parent, 1), *((child, 1) for child in children))
        children.append(lab.fork(parent))
    lab.check_state(parent, other, *children)


def test_a_childs_tokens_never_reach_its_parent_or_its_siblings(model: Model) -> None:
    """Children diverge in the middle of a page and of a tile; full pages stay shared."""
    lab = model.lab(slots=8, pages=64)
    for position in (63, 64, 65, 70, 80, 128):
        parent = lab.run(lab.create(), position)
        before = state_digest(lab.engine, parent)
        children = [lab.fork(parent, model.branch(position, 40, name)) for name in range(3)]
        lab.step(*((child, 20) for child in children))
        assert state_digest(lab.engine, parent) == before
        lab.step((parent, 20), *((child, 1) for child in children))
        lab.check_state(parent, *children)
        assert len({state_digest(lab.engine, child) for child in children}) == 3
        lab.free(parent, *children)


def test_a_fork_outlives_its_parent(model: Model) -> None:
    lab = model.lab(slots=2, pages=8)
    parent = lab.run(lab.create(), 150)
    child = lab.fork(parent)
    lab.free(parent)
    intruder = lab.run(lab.create(model.stream(1)), 100)
    lab.run(child, 1, 60)
    lab.check_state(child, intruder)


def test_a_fork_of_a_fork_of_a_restored_session_is_exact(model: Model) -> None:
    lab = model.lab()
    sequence = lab.run(lab.create(), 100)
    restored = lab.restore(lab.engine.capture(sequence))
    child = lab.fork(restored)
    assert not lab.engine.can_sample(child)
    lab.run(child, 5)
    grandchild = lab.fork(child, model.branch(101, 30))
    lab.step((grandchild, 29), (restored, 1), (child, 44))
    lab.check_state(sequence, restored, child, grandchild)


def test_a_random_tree_of_forks_is_exact(model: Model, rng: random.Random) -> None:
    lab = model.lab(slots=16, pages=160)
    live = [lab.run(lab.create(), 33)]
    for _ in range(120):
        action = rng.random()
        if action < 0.25 and len(live) < 16:
            live.append(lab.fork(rng.choice(live)))
        elif action < 0.4 and len(live) > 1:
            lab.free(live.pop(rng.randrange(len(live))))
        else:
            chosen = rng.sample(live, rng.randint(1, len(live)))
            lab.step(*((sequence, rng.choice([1, 1, 1, 7, 16])) for sequence in chosen))
    lab.check_state(*live)


def test_a_capture_of_a_fork_equals_a_capture_of_its_parent(model: Model) -> None:
    lab = model.lab()
    parent = lab.run(lab.create(), 77)
    child = lab.fork(parent)
    assert capture_digest(lab.engine.capture(parent)) == capture_digest(lab.engine.capture(child))
