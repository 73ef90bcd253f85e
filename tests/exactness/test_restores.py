"""A session checkpointed at any residue, evicted and restored continues as if it had never left."""

import random

import pytest

from tests.support.engines import capture_digest
from tests.support.lab import Model


def test_a_session_checkpointed_at_any_residue_evicted_and_restored_continues_exactly(model: Model) -> None:
    """Every residue, in the first tile and around a page: capture in a busy batch, free (which poisons), restore."""
    lab = model.lab(slots=4, pages=32)
    other = lab.run(lab.create(model.stream(1)), 5)
    for position in [*range(1, 19), *range(61, 82), 128]:
        sequence = lab.run(lab.create(), max(1, position - 1))
        if position > 1:
            lab.step((other, 1), (sequence, 1))
        captured = lab.engine.capture(sequence)
        grid = position // 16 * 16
        assert captured.grid_position == grid
        assert capture_digest(captured) == model.stream().capture_digest(position)
        assert capture_digest(captured) == model.stream().capture_digest(grid)
        lab.free(sequence)
        # Somebody else takes the slot and the pages that were freed last.
        intruder = lab.run(lab.create(model.stream(2)), 70)
        restored = lab.restore(captured)
        tail = position - grid
        lab.run(restored, *([tail] if tail else []), 1, 18)
        lab.check_state(restored, intruder)
        lab.free(restored, intruder)
    lab.check_state(other)


@pytest.mark.parametrize("grid", [0, 16, 64, 128, 512])
def test_replaying_a_tail_of_any_length_onto_a_checkpoint_is_exact(model: Model, grid: int) -> None:
    tails = (1, 2, 3, 4, 14, 15, 16, 17, 18, 63, 64, 65)
    lab = model.lab(slots=1 + len(tails), pages=12 * len(tails))
    captured = lab.engine.capture(lab.run(lab.create(), *([grid] if grid else [])))
    in_one = {lab.restore(captured): tail for tail in tails}
    for sequence, tail in in_one.items():
        lab.run(sequence, tail)
    lab.check_state(*in_one)
    lab.free(*in_one)
    one_by_one = {lab.restore(captured): grid + tail for tail in tails}
    while behind := [sequence for sequence, end in one_by_one.items() if lab.engine.consumed(sequence) < end]:
        lab.step(*((sequence, 1) for sequence in behind))
    lab.check_state(*one_by_one)


def test_an_untouched_restore_captures_the_bytes_it_was_given(model: Model) -> None:
    lab = model.lab()
    for length in (0, 16, 63, 64, 130):
        captured = lab.engine.capture(lab.run(lab.create(), *([length] if length else [])))
        restored = lab.restore(captured)
        assert lab.engine.capture(restored) == captured
        assert not lab.engine.can_sample(restored)
        lab.free(restored)
    assert lab.engine.check() == []


def test_a_session_without_tokens_is_saved_restored_and_used(model: Model) -> None:
    lab = model.lab()
    captured = lab.engine.capture(lab.create())
    assert captured.grid_position == 0
    restored = lab.restore(captured)
    lab.run(restored, 1, 40)
    lab.check_state(restored)


def test_another_process_restores_the_bytes_into_other_slots_and_pages(model: Model) -> None:
    """A cold engine with pools of other sizes; the parts arrive in any order."""
    source, target = model.lab(), model.lab(slots=3, pages=21)
    captured = source.engine.capture(source.run(source.create(), 200))
    decoy = target.run(target.create(model.stream(1)), 90)
    order = list(range(len(captured.parts)))
    random.Random(7).shuffle(order)
    restored = target.restore(captured, order=order)
    target.step((restored, 8), (decoy, 1))
    target.step((restored, 1), (decoy, 1))
    target.check_state(restored, decoy)


def test_a_capture_is_not_changed_by_what_the_session_does_next(model: Model) -> None:
    lab = model.lab()
    sequence = lab.run(lab.create(), 70)
    captured = lab.engine.capture(sequence)
    before = capture_digest(captured)
    lab.run(sequence, 100)
    lab.free(sequence)
    assert capture_digest(captured) == before


def test_checkpoints_taken_in_a_burst_equal_those_of_a_quiet_run(model: Model) -> None:
    """Three sessions decode while others prefill; every step captures somebody in the middle of it all."""
    lab = model.lab(slots=6, pages=80)
    decoding = [lab.run(lab.create(model.stream(n)), 30 + n) for n in range(3)]
    prefilling = [lab.create(model.stream(3 + n)) for n in range(2)]
    for step in range(30):
        lab.step(*((s, 1) for s in decoding), *((s, 17 + n) for n, s in enumerate(prefilling)))
        for sequence in (decoding[step % 3], prefilling[step % 2]):
            captured = lab.engine.capture(sequence)
            expected = lab.following[sequence].capture_digest(captured.grid_position)
            assert capture_digest(captured) == expected
    lab.check_state(*decoding, *prefilling)


def test_eviction_under_memory_pressure_is_exact(model: Model, rng: random.Random) -> None:
    """Two slots for six sessions: whoever is to run is restored and replayed, the other one is evicted."""
    lab = model.lab(slots=2, pages=40)
    streams = [model.stream(n) for n in range(6)]
    heads, saved = [0] * 6, [lab.engine.capture(lab.create())] * 6
    lab = model.lab(slots=2, pages=40)
    for _ in range(24):
        chosen = rng.sample(range(6), 2)
        running = {n: lab.restore(saved[n], streams[n]) for n in chosen}
        tails = [(s, heads[n] - saved[n].grid_position) for n, s in running.items()]
        if tails := [(s, count) for s, count in tails if count]:
            lab.step(*tails)
        for _ in range(rng.randint(1, 4)):
            lab.step(*((s, rng.choice([1, 1, 5, 20])) for s in running.values()))
        lab.check_state(*running.values())
        for n, sequence in running.items():
            heads[n], saved[n] = lab.engine.consumed(sequence), lab.engine.capture(sequence)
            lab.free(sequence)
    assert lab.engine.check() == [] and lab.engine.capacity().slots_free == 2


def test_anything_at_once_is_exact(model: Model, rng: random.Random) -> None:
    """Random steps, forks, captures, evictions and restores of several streams in one engine."""
    lab = model.lab(slots=8, pages=90)
    live = [lab.create(model.stream(n)) for n in range(3)]
    for _ in range(150):
        action = rng.random()
        if action < 0.1 and len(live) < 8:
            live.append(lab.fork(rng.choice(live)))
        elif action < 0.2 and len(live) < 8:
            source = rng.choice(live)
            live.append(lab.restore(lab.engine.capture(source), lab.following[source]))
        elif action < 0.33 and len(live) > 2:
            lab.free(live.pop(rng.randrange(len(live))))
        else:
            chosen = rng.sample(live, rng.randint(1, len(live)))
            lab.step(*((s, rng.choice([1, 1, 1, 2, 15, 16, 17])) for s in chosen))
    lab.check_state(*live)


def test_restores_at_the_published_head_size_are_exact(wide_model: Model) -> None:
    lab = wide_model.lab(slots=3)
    for position in range(62, 83):
        sequence = lab.run(lab.create(), position)
        captured = lab.engine.capture(sequence)
        lab.free(sequence)
        restored = lab.run(lab.restore(captured), *([position % 16] if position % 16 else []), 1, 17)
        lab.check_state(restored)
        lab.free(restored)
