"""Tests of the tests: the suite's comparisons fail when a single bit of a restored state is wrong."""

from dataclasses import replace

import pytest
import torch

from forkpoint.server.engine.base import Capture
from forkpoint.server.engine.capture import flip_a_sign
from forkpoint.server.engine.errors import NonFiniteLogitsError
from forkpoint.server.engine.sequences import LiveSequence
from tests.support.engines import capture_digest, open_tile, state_digest
from tests.support.lab import Lab, Model


def with_flipped_bit(captured: Capture, number: int) -> Capture:
    """The capture with the sign of its part `number`'s value of largest magnitude flipped."""
    parts = list(captured.parts)
    spec, data = parts[number]
    changed = flip_a_sign(spec, data)
    assert changed != data
    parts[number] = (spec, changed)
    return replace(captured, parts=tuple(parts))


def test_one_wrong_bit_in_any_part_makes_the_continuation_differ(model: Model) -> None:
    lab = model.lab(slots=2)
    captured = lab.engine.capture(lab.run(lab.create(), 96))
    for number, (spec, _) in enumerate(captured.parts):
        restored = lab.restore(with_flipped_bit(captured, number))
        with pytest.raises(AssertionError, match="rows of sequence"):
            lab.run(restored, *[1] * 24)
        # The damage lasts: the state stays wrong, so a digest at the end finds it too.
        stream, consumed = model.stream(), lab.engine.consumed(restored)
        quiet = stream.digest(consumed, min(2, consumed - 96))
        assert state_digest(lab.engine, restored) != quiet, spec.name
        lab.free(restored)


def test_a_sabotaged_conv_tail_makes_the_state_differ(model: Model) -> None:
    honest, sabotaged = model.lab(), model.lab(sabotage="conv-tail")
    captured = honest.engine.capture(honest.run(honest.create(), 50))
    restored = sabotaged.restore(captured)
    after = sabotaged.engine.capture(restored)
    wrong = [(ours, b) for (ours, b), (_, a) in zip(after.parts, captured.parts, strict=True) if a != b]
    assert [spec.name for spec, _ in wrong] == ["kda.000.conv.0"]
    with pytest.raises(AssertionError, match="rows of sequence"):
        sabotaged.run(restored, 2)
    assert capture_digest(after) != capture_digest(captured)


def slot_tensors_that_matter(lab: Lab, live: LiveSequence) -> list[tuple[str, torch.Tensor]]:
    """Views of the values of each live tensor of a session in the middle of a tile."""
    tensors, slot = lab.engine.tensors, live.slot
    return [
        ("S", tensors.S[1, slot]),
        *((name, view[1][-1:]) for name, view in open_tile(lab.engine, live.handle).items()),
        ("conv_ring", tensors.conv_ring[1, slot, (live.consumed - 1) % 4]),
        ("conv_grid", tensors.conv_grid[1, slot]),
        ("norm_rows", tensors.norm_rows[slot, (live.consumed - 1) % 2]),
        ("pages", tensors.pages[live.pages[-1], :, (live.consumed - 1) % 64]),
    ]


def test_a_changed_value_in_any_tensor_of_a_session_changes_its_digest(model: Model) -> None:
    """Whatever a slot holds is compared: nothing of a session's state is outside the digest."""
    lab = model.lab()
    sequence = lab.run(lab.create(), 90)
    live = lab.engine._sequences[sequence]
    names = set(lab.engine.tensors.layout.slot_tensors) | {"pages"}
    before = state_digest(lab.engine, sequence)
    for name, view in slot_tensors_that_matter(lab, live):
        names.discard(name)
        place = (0,) * view.dim()
        one_byte = view[place].reshape(1).view(torch.uint8)[:1]  # a bit: one more is no change to a huge value
        one_byte ^= 1
        assert state_digest(lab.engine, sequence) != before, name
        one_byte ^= 1
    assert names == set()
    assert state_digest(lab.engine, sequence) == before


def test_a_restored_state_one_token_ahead_of_its_position_meets_poison(model: Model) -> None:
    """Public engines fed the token at a checkpoint's border twice; here its tile's rows were never written."""
    lab = model.lab()
    sequence = lab.run(lab.create(), 64)
    restored = lab.restore(lab.engine.capture(sequence))
    lab.engine._sequences[restored].consumed = 63
    with pytest.raises(NonFiniteLogitsError):
        lab.run(restored, 1)
