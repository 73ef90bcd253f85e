"""The state does not depend on how a prompt was cut into steps, nor on whether tokens were prefilled or decoded."""

import random
from collections.abc import Sequence

import pytest

from forkpoint.server.scheduler.policy import chunk_end
from tests.support.engines import capture_digest
from tests.support.lab import Lab, Model

GRID_LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513, 575, 576, 577, 1023, 1024, 1025]
"""Tile, page and split borders, each plus and minus one."""


def test_decoding_token_by_token_equals_one_pass(model: Model) -> None:
    lab = model.lab()
    sequence = lab.create()
    for position in range(1, 131):
        lab.step((sequence, 1))
        if position % 7 == 0 or position in GRID_LENGTHS:
            lab.check_state(sequence)


def test_decoding_token_by_token_equals_one_pass_at_the_published_head_size(wide_model: Model) -> None:
    lab = wide_model.lab()
    sequence = lab.run(lab.create(), *[1] * 66)
    lab.check_state(sequence)


def test_decoding_across_a_split_border_equals_one_pass(model: Model) -> None:
    lab = model.lab()
    sequence = lab.run(lab.create(), 505, *[1] * 20)
    lab.check_state(sequence)
    lab.run(sequence, 490, *[1] * 20)
    lab.check_state(sequence)


@pytest.mark.parametrize("length", GRID_LENGTHS)
def test_one_token_more_or_less_in_a_cut_changes_nothing_at_any_border(model: Model, length: int) -> None:
    lab = model.lab()
    whole = lab.run(lab.create(), length)
    last_alone = lab.run(lab.create(), *([length - 1] if length > 1 else []), 1)
    first_alone = lab.run(lab.create(), 1, *([length - 1] if length > 1 else []))
    lab.check_state(whole, last_alone, first_alone)


def test_a_prompt_cut_in_two_anywhere_equals_one_pass(model: Model) -> None:
    length = 83
    lab = model.lab(slots=length, pages=2 * length)
    sequences = {cut: lab.create() for cut in range(1, length)}
    lab.step(*((sequence, cut) for cut, sequence in sequences.items()))
    lab.check_state(*sequences.values())
    lab.step(*((sequence, length - cut) for cut, sequence in sequences.items()))
    lab.check_state(*sequences.values())


def test_a_long_prompt_cut_at_random_equals_one_pass(model: Model, rng: random.Random) -> None:
    for most in (40, 200, 700):
        lab = model.lab()
        sequence = lab.create()
        while (left := 1060 - lab.engine.consumed(sequence)) > 0:
            lab.step((sequence, min(left, rng.randint(1, most if rng.random() < 0.9 else 3))))
        lab.check_state(sequence)


@pytest.mark.parametrize(("interval", "budget"), [(48, 100), (512, 512), (16, 33), (0, 512)])
def test_chunks_as_the_scheduler_cuts_them_equal_one_pass(model: Model, interval: int, budget: int) -> None:
    lab = model.lab()
    sequence = lab.create()
    while (start := lab.engine.consumed(sequence)) < 570:
        end = chunk_end(start, 570, budget, interval)
        lab.step((sequence, end - start))
        if interval and end % interval == 0:
            assert capture_digest(lab.engine.capture(sequence)) == model.stream().capture_digest(end)
    lab.check_state(sequence)


def append_and_decode_in_turns(lab: Lab, residues: Sequence[int]) -> None:
    """For all pairs (a, b) of residues of a tile, packed: an append that starts at a and ends at b within it or over
    one border, decoded tokens up to a again, an append from a to b over two borders or three, a decoded token."""
    pairs = {lab.create(): (a, b) for a in residues for b in residues}
    lab.step(*((sequence, 16 + a) for sequence, (a, _) in pairs.items()))
    lab.step(*((sequence, (b - a) % 16 or 16) for sequence, (a, b) in pairs.items()))
    lab.check_state(*pairs)
    while decoding := [sequence for sequence, (a, _) in pairs.items() if lab.engine.consumed(sequence) < 32 + a]:
        lab.step(*((sequence, 1) for sequence in decoding))
    lab.check_state(*list(pairs)[::17])
    lab.step(*((sequence, 32 + (b - a) % 16) for sequence, (a, b) in pairs.items()))
    assert all(lab.engine.consumed(sequence) % 16 == b for sequence, (_, b) in pairs.items())
    lab.check_state(*pairs)
    lab.step(*((sequence, 1) for sequence in pairs))
    lab.check_state(*pairs)


def test_appending_and_decoding_in_turns_over_all_residue_pairs_equals_one_pass(model: Model) -> None:
    append_and_decode_in_turns(model.lab(slots=256, pages=1024), range(16))


def test_residue_pairs_at_the_published_head_size_equal_one_pass(wide_model: Model) -> None:
    """Around a tile's border and its second reference; all pairs are tried at the small size."""
    append_and_decode_in_turns(wide_model.lab(slots=36, pages=144), (0, 1, 7, 8, 9, 15))
