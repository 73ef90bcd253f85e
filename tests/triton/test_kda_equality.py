"""Triton KDA: the same bits for prefill and decode, for every cut, batch and form."""

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.kernels import GATES, same_bytes


def open_rows_equal(a: Any, b: Any, slot: int, rows: int) -> bool:
    """Whether the first `rows` rows of a slot's open tile agree, and G and r after them."""
    for name, x in vars(a.opened).items():
        y = getattr(b.opened, name)
        if name in ("total", "reference"):
            counts = rows > (8 if name == "reference" else 0)
            if counts and not same_bytes(x[slot], y[slot]):
                return False
        elif not same_bytes(x[slot, :rows], y[slot, :rows]):
            return False
    return True


@pytest.mark.parametrize("gate,interpreted", [("softplus", 34), ("bounded", 27)])
def test_decode_equals_one_prefill_bit_for_bit(
    kda: ModuleType, device: torch.device, gate: str, interpreted: int
) -> None:
    tokens = 200 if device.type == "cuda" else interpreted
    layer = kda.layer_inputs(tokens, 1, GATES[gate], device)
    whole, steps = kda.poisoned_state(2, 1, device), kda.poisoned_state(2, 1, device)
    for state in (whole, steps):
        kda.start_slot(state, 1, layer)
    (expected,) = kda.feed_prefill(whole, [(1, layer, 0, tokens)])
    o = torch.cat([kda.feed_decode(steps, [(1, layer, position)]) for position in range(tokens)])
    assert torch.isfinite(expected.float()).all()
    assert same_bytes(o, expected)
    assert same_bytes(whole.S, steps.S)
    assert same_bytes(whole.conv_ring, steps.conv_ring) and same_bytes(whole.conv_grid, steps.conv_grid)
    assert open_rows_equal(whole, steps, 1, tokens % 16)


CUTS = [("bounded", (16, 24)), ("softplus", (5, 35)), ("bounded", (15, 1, 24)), ("softplus", (17, 1, 1, 21))]


@pytest.mark.parametrize("gate,cuts", CUTS)
def test_a_prefill_may_be_cut_anywhere(kda: ModuleType, device: torch.device, gate: str, cuts: tuple[int, ...]) -> None:
    layer = kda.layer_inputs(40, 1, GATES[gate], device)
    whole, pieces = kda.poisoned_state(1, 1, device), kda.poisoned_state(1, 1, device)
    for state in (whole, pieces):
        kda.start_slot(state, 0, layer)
    (expected,) = kda.feed_prefill(whole, [(0, layer, 0, 40)])
    position, out = 0, []
    for length in cuts:
        out += kda.feed_prefill(pieces, [(0, layer, position, position + length)])
        position += length
    assert same_bytes(torch.cat(out), expected)
    assert same_bytes(whole.S, pieces.S) and open_rows_equal(whole, pieces, 0, 8)
    assert same_bytes(whole.conv_ring, pieces.conv_ring) and same_bytes(whole.conv_grid, pieces.conv_grid)


def test_a_packed_batch_gives_each_sequence_what_it_gets_alone(kda: ModuleType, device: torch.device) -> None:
    first = kda.layer_inputs(20, 2, None, device)
    others = [kda.layer_inputs(20, 2, None, device, first.weights) for _ in range(3)]
    layers = [first, *others]
    # slot, inputs, start, end: a long one, a row in mid tile, nothing, a null slot, a piece over a tile's end
    spans = [(5, 0, 0, 20), (1, 1, 7, 8), (4, 2, 3, 3), (-1, 2, 0, 18), (0, 3, 13, 17)]
    batch, alone = kda.poisoned_state(7, 2, device), kda.poisoned_state(7, 2, device)
    for state in (batch, alone):
        for slot, index, start, _ in spans:
            if slot >= 0:
                kda.start_slot(state, slot, layers[index])
                if start:
                    kda.feed_prefill(state, [(slot, layers[index], 0, start)])
    before = [tensor.clone() for tensor in kda.tensors_of(batch)]
    together = kda.feed_prefill(batch, [(slot, layers[i], start, end) for slot, i, start, end in spans])
    for (slot, index, start, end), o in zip(spans, together, strict=True):
        if slot < 0:
            assert same_bytes(o, torch.zeros_like(o))
        elif end > start:
            assert same_bytes(o, kda.feed_prefill(alone, [(slot, layers[index], start, end)])[0])
    for a, b, old in zip(kda.tensors_of(batch), kda.tensors_of(alone), before, strict=True):
        assert same_bytes(a, b)
        for slot in (2, 3, 4, 6):  # neighbours, and the sequence without a row
            assert same_bytes(a[slot], old[slot])


def test_decode_of_mixed_positions_equals_each_alone(kda: ModuleType, device: torch.device) -> None:
    steps = 60 if device.type == "cuda" else 2
    first = kda.layer_inputs(100, 1, None, device)
    layers = [first, *(kda.layer_inputs(100, 1, None, device, first.weights) for _ in range(4))]
    places = [(6, 0), (0, 14), (3, 15), (2, 23), (5, 32)]
    batch, alone = kda.poisoned_state(8, 1, device), kda.poisoned_state(8, 1, device)
    for state in (batch, alone):
        for layer, (slot, position) in zip(layers, places, strict=True):
            kda.start_slot(state, slot, layer)
            if position:
                kda.feed_prefill(state, [(slot, layer, 0, position)])
    for step in range(steps):
        now = [(slot, layer, position + step) for layer, (slot, position) in zip(layers, places, strict=True)]
        padded = [*now[:2], (-1, first, 3), *now[2:]]
        o = kda.feed_decode(batch, padded)
        assert same_bytes(o[2], torch.zeros_like(o[2]))
        for row, token in zip((0, 1, 3, 4, 5), now, strict=True):
            assert same_bytes(o[row], kda.feed_decode(alone, [token])[0])
    assert all(same_bytes(a, b) for a, b in zip(kda.tensors_of(batch), kda.tensors_of(alone), strict=True))


def test_block_shapes_do_not_change_a_bit(kda: ModuleType, device: torch.device) -> None:
    """In the interpreter this shows that programs share no work wrongly; on a GPU, that MMA shapes sum alike."""
    small = replace(
        kda.SHAPES,
        prepare_warps=2,
        prepare_keys=128,
        step_keys=64,
        recur_values=64,
        recur_warps=4,
        read_values=64,
        read_warps=4,
    )
    smaller = replace(kda.SHAPES, step_warps=2, recur_values=32, recur_stages=2, read_values=32)
    layer = kda.layer_inputs(36, 1, None, device)
    answers = []
    for shapes in (kda.SHAPES, small, smaller):
        state = kda.poisoned_state(2, 1, device)
        kda.start_slot(state, 1, layer)
        (head,) = kda.feed_prefill(state, [(1, layer, 0, 31)], shapes=shapes)
        tail = [kda.feed_decode(state, [(1, layer, position)], shapes) for position in range(31, 33)]
        answers.append((torch.cat((head, *tail)), *kda.tensors_of(state)))
    for other in answers[1:]:
        assert all(same_bytes(a, b) for a, b in zip(answers[0], other, strict=True))


def test_a_pool_of_bf16_keeps_decode_equal_to_prefill(kda: ModuleType, device: torch.device) -> None:
    layer = kda.layer_inputs(35, 1, -5.0, device)
    states = [kda.poisoned_state(1, 1, device, torch.bfloat16) for _ in range(2)]
    for state in states:
        kda.start_slot(state, 0, layer)
    (expected,) = kda.feed_prefill(states[0], [(0, layer, 0, 35)])
    (head,) = kda.feed_prefill(states[1], [(0, layer, 0, 29)])
    tail = [kda.feed_decode(states[1], [(0, layer, position)]) for position in range(29, 35)]
    assert same_bytes(torch.cat((head, *tail)), expected)
    assert same_bytes(states[0].S, states[1].S)


def test_checkpoints_are_the_states_at_their_grid_points(kda: ModuleType, device: torch.device) -> None:
    layer = kda.layer_inputs(70, 1, None, device)
    state, short = kda.poisoned_state(1, 1, device), kda.poisoned_state(1, 1, device)
    pool = torch.full((5, 1, 128, 128), math.nan, device=device)
    kda.start_slot(state, 0, layer)
    (head,) = kda.feed_prefill(state, [(0, layer, 0, 9)])
    (tail,) = kda.feed_prefill(state, [(0, layer, 9, 70)], pool, {(0, 16): 3, (0, 48): 0, (0, 64): 4})
    kda.start_slot(short, 0, layer)
    (expected,) = kda.feed_prefill(short, [(0, layer, 0, 16)])
    assert same_bytes(short.S[0], pool[3])
    assert same_bytes(expected, torch.cat((head, tail))[:16])
    kda.feed_prefill(short, [(0, layer, 16, 48)])
    assert same_bytes(short.S[0], pool[0])
    assert same_bytes(state.S[0], pool[4])
    assert pool[1:3].isnan().all()


def test_a_million_tokens_on_the_bits_are_those_of_the_beginning(kda: ModuleType, device: torch.device) -> None:
    """A sequence moved by a multiple of the tile, with its rows and tails, computes the same."""
    layer = kda.layer_inputs(40, 1, None, device)
    near = kda.poisoned_state(1, 1, device)
    kda.start_slot(near, 0, layer)
    kda.feed_prefill(near, [(0, layer, 0, 21)])
    far = kda.clone_state(near)
    far_start = 62_500 * 16 + 5
    (expected,) = kda.feed_prefill(near, [(0, layer, 21, 40)])
    o = kda.feed_moved(far, 0, layer, 21, 40, far_start)
    assert same_bytes(o, expected)
    assert all(same_bytes(a, b) for a, b in zip(kda.tensors_of(near), kda.tensors_of(far), strict=True))


@pytest.mark.parametrize("gate", GATES)
def test_gates_at_their_extremes_stay_finite_and_equal(kda: ModuleType, device: torch.device, gate: str) -> None:
    tokens = 33
    layer = kda.layer_inputs(tokens, 1, GATES[gate], device)
    layer.z[:, :32] = 1e4  # everything at the floor
    layer.z[:, 32:64] = -1e4  # no decay
    layer.z[:, 64:96] = torch.where(torch.rand(tokens, 32, device=device) < 0.5, 1e4, -1e4).bfloat16()
    whole, pieces = kda.poisoned_state(1, 1, device), kda.poisoned_state(1, 1, device)
    for state in (whole, pieces):
        kda.start_slot(state, 0, layer)
    (expected,) = kda.feed_prefill(whole, [(0, layer, 0, tokens)])
    (head,) = kda.feed_prefill(pieces, [(0, layer, 0, 26)])
    tail = [kda.feed_decode(pieces, [(0, layer, position)]) for position in range(26, tokens)]
    assert torch.isfinite(expected.float()).all() and torch.isfinite(whole.S).all()
    assert same_bytes(torch.cat((head, *tail)), expected)
    assert same_bytes(whole.S, pieces.S)
