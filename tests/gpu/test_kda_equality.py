"""KDA on a GPU: decode, prefill and every mix of them have one prefill's bits, whatever the block shapes."""

import random
from dataclasses import replace
from typing import Final

import pytest
import torch

from tests.support.gpu import require_gpu

require_gpu()

from benchmarks.kda_cases import variants
from forkpoint.kernels.kda.triton.launch import PINNED, pinned
from tests.support.kda_batches import SWITCHED, make_batch, same_slots, whole_prefill
from tests.support.kernels import GATES, same_bytes
from tests.support.triton_kda import feed_decode, feed_prefill

HEADS, STEPS = 4, 200
STARTS: Final = [0, 1, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 63, 64, 65, 100, 200]
FORMS: Final = {
    **dict(variants()),
    "switched": SWITCHED,
    "two warps a row": replace(PINNED, step_warps=2, step_keys=64),
    "as for a pool of bf16": pinned(torch.bfloat16),
}
GATE = pytest.mark.parametrize("gate", GATES)


@GATE
@pytest.mark.parametrize("form", FORMS)
def test_200_tokens_decoded_at_mixed_positions_are_one_prefill(device: torch.device, gate: str, form: str) -> None:
    shapes, ends = FORMS[form], [start + STEPS for start in STARTS]
    batch = make_batch(len(STARTS), max(ends), HEADS, GATES[gate], device)
    whole, expected = whole_prefill(batch, ends, device)
    state = batch.state(device)
    out = [[o] for o in feed_prefill(state, batch.pieces(0, STARTS), shapes=shapes)]
    for step in range(STEPS):
        for rows, o in zip(out, batch.step(state, [start + step for start in STARTS], shapes), strict=True):
            rows.append(o)
    for rows, o in zip(out, expected, strict=True):
        assert same_bytes(torch.cat(rows), o)
    same_slots(whole, state, batch, ends)


@GATE
def test_appends_of_every_residue_alternate_with_decode(device: torch.device, gate: str) -> None:
    """256 sequences: an append from residue i to residue j, a decoded row before and after it, and a last append."""
    pairs = [(i, j) for i in range(16) for j in range(16)]
    starts = [16 + i for i, _ in pairs]
    longer = [16 * ((i + j) % 3 == 0) for i, j in pairs]
    ends = [s + 1 + (j - s - 1) % 16 + more for s, (_, j), more in zip(starts, pairs, longer, strict=True)]
    batch = make_batch(len(pairs), 16 + 16 + 32 + 8, HEADS, GATES[gate], device)
    lasts = [end + 6 for end in ends]
    whole, expected = whole_prefill(batch, lasts, device)
    state = batch.state(device)
    out = [
        feed_prefill(state, batch.pieces(0, [start - 1 for start in starts]), shapes=PINNED),
        batch.step(state, [start - 1 for start in starts]),
        feed_prefill(state, batch.pieces(starts, ends), shapes=PINNED),
        batch.step(state, ends, SWITCHED),
        batch.step(state, [end + 1 for end in ends], SWITCHED),
        feed_prefill(state, batch.pieces([end + 2 for end in ends], lasts), shapes=PINNED),
    ]
    assert {(start % 16, end % 16) for start, end in zip(starts, ends, strict=True)} == set(pairs)
    for n, o in enumerate(expected):
        assert same_bytes(torch.cat([rows[n] for rows in out]), o), pairs[n]
    same_slots(whole, state, batch, lasts)


@GATE
@pytest.mark.parametrize("seed", range(3))
def test_sequences_that_come_in_any_mix_have_the_bits_of_one_prefill(
    device: torch.device, gate: str, seed: int
) -> None:
    """Decoded rows beside prompts' chunks beside sequences without a row, in shuffled batches with null slots."""
    rng, count, tokens = random.Random(seed), 24, 230
    batch = make_batch(count, tokens, HEADS, GATES[gate], device)
    ends = [rng.randrange(1, tokens + 1) for _ in range(count)]
    whole, expected = whole_prefill(batch, ends, device)
    state, at = batch.state(device), [0] * count
    out: list[list[torch.Tensor]] = [[] for _ in range(count)]
    while any(position < end for position, end in zip(at, ends, strict=True)):
        live = [n for n in range(count) if at[n] < ends[n]]
        chosen = rng.sample(live, rng.randint(1, len(live)))
        if rng.random() < 0.4:
            steps = [(batch.slots[n], batch.layers[n], at[n]) for n in chosen]
            o = feed_decode(state, steps, rng.choice((PINNED, SWITCHED)))
            for n, row in zip(chosen, torch.split(o, 1), strict=True):
                out[n].append(row)
                at[n] += 1
            continue
        spans = [(n, at[n], min(ends[n], at[n] + rng.choice((0, 1, 1, 3, 16, 17, 60)))) for n in chosen]
        pieces = [(batch.slots[n], batch.layers[n], a, b) for n, a, b in spans]
        pieces.insert(rng.randint(0, len(pieces)), (-1, batch.layers[0], 0, rng.choice((0, 1, 20))))
        given = feed_prefill(state, pieces, shapes=PINNED)
        for n, first, last in spans:
            piece = next(i for i, (slot, *_) in enumerate(pieces) if slot == batch.slots[n])
            out[n].append(given[piece])
            at[n] += last - first
    for rows, o in zip(out, expected, strict=True):
        assert same_bytes(torch.cat(rows), o)
    same_slots(whole, state, batch, ends)


@GATE
def test_a_row_has_its_bits_in_a_batch_of_any_size(device: torch.device, gate: str) -> None:
    """96 heads, as in K3, in the shapes that dispatch picks."""
    batch = make_batch(70, 40, 96, GATES[gate], device)
    starts = [16 + n % 20 for n in range(70)]
    state, alone = batch.state(device), batch.state(device)
    for one in (state, alone):
        feed_prefill(one, batch.pieces(0, starts), shapes=PINNED)
    together = batch.step(state, starts, None)
    for n, start in enumerate(starts):
        rows = [(batch.slots[n], batch.layers[n], start)]
        assert same_bytes(feed_decode(alone, rows, None), together[n]), n
    same_slots(alone, state, batch, [start + 1 for start in starts])
    for size in (2, 3, 11, 40):
        again = batch.step(alone, [start + 1 for start in starts], None)
        firsts = [(batch.slots[n], batch.layers[n], starts[n] + 1) for n in range(size)]
        assert same_bytes(feed_decode(state, firsts, None), torch.cat(again[:size]))
        rest = [(batch.slots[n], batch.layers[n], starts[n] + 1) for n in range(size, 70)]
        assert same_bytes(feed_decode(state, rest, None), torch.cat(again[size:]))
        starts = [start + 1 for start in starts]


@GATE
def test_a_long_prompt_in_segments_has_the_bits_of_short_calls(device: torch.device, gate: str) -> None:
    """More tiles than one segment of the overlap holds, beside short sequences; twice, since a race shows seldom."""
    tokens = 16 * 128 * 2 + 37
    batch = make_batch(3, tokens, HEADS, GATES[gate], device)
    ends = [tokens, 5, 700]
    whole, expected = whole_prefill(batch, ends, device)
    for cut in (97, 1000):
        state = batch.state(device)
        out: list[list[torch.Tensor]] = [[] for _ in ends]
        for first in range(0, tokens, cut):
            pieces = batch.pieces([min(first, end) for end in ends], [min(first + cut, end) for end in ends])
            for rows, o in zip(out, feed_prefill(state, pieces, shapes=PINNED), strict=True):
                rows.append(o)
        for rows, o in zip(out, expected, strict=True):
            assert same_bytes(torch.cat(rows), o)
        same_slots(whole, state, batch, ends)


@GATE
def test_the_same_call_gives_the_same_bits_every_time(device: torch.device, gate: str) -> None:
    batch = make_batch(8, 600, HEADS, GATES[gate], device)
    ends = [600 - 7 * n for n in range(8)]
    whole, expected = whole_prefill(batch, ends, device)
    for _ in range(20):
        state, out = whole_prefill(batch, ends, device)
        assert all(same_bytes(a, b) for a, b in zip(out, expected, strict=True))
        assert same_bytes(state.S, whole.S)
