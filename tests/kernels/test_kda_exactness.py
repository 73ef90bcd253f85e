"""tile_kda to the bit: cut, packed, prefilled or decoded, a sequence gives the same bytes of o, S and open rows."""

import random

import pytest
import torch

from forkpoint.kernels.kda import tile
from forkpoint.kernels.kda.naive import tile_kda
from tests.support.kernels import (
    GATES,
    POISON_GATE,
    KdaInputs,
    KdaPool,
    feed,
    feed_alone,
    kda_inputs,
    kda_pool,
    negative_zeros,
    same_bytes,
)

SHAPES = {"K > V": (2, 32, 16), "K < V": (3, 16, 24), "full size": (2, 128, 128)}


def open_rows(pool: KdaPool, slot: int, consumed: int) -> list[torch.Tensor]:
    """The rows of the slot's open tile that hold a token."""
    return [part[slot, : consumed % 16] for part in pool.parts()[1:]]


def assert_same_state(a: KdaPool, a_slot: int, b: KdaPool, b_slot: int, consumed: int) -> None:
    assert same_bytes(a.S[a_slot], b.S[b_slot])
    for left, right in zip(open_rows(a, a_slot, consumed), open_rows(b, b_slot, consumed), strict=True):
        assert same_bytes(left, right)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_decoding_equals_prefill_and_any_cut(shape: str, gate: str, rng: random.Random) -> None:
    inputs = kda_inputs(61, *SHAPES[shape], GATES[gate])
    whole, pool = feed_alone(inputs, [61])
    assert bool(torch.isfinite(whole).all()) and bool(torch.isfinite(pool.S[1]).all())
    cuts = [[1] * 61, [16, 16, 16, 13], [15, 1, 1, 15, 29], [32, 29], [33, 28], [0, 7, 0, 54, 0]]
    for _ in range(6):
        borders = sorted(rng.sample(range(1, 61), rng.randrange(1, 9)))
        cuts.append([b - a for a, b in zip([0, *borders], [*borders, 61], strict=True)])
    for cut in cuts:
        o, other = feed_alone(inputs, cut)
        assert same_bytes(o, whole), cut
        assert_same_state(other, 1, pool, 1, 61)


@pytest.mark.parametrize("gate", GATES)
def test_every_pair_of_start_and_end_residue_packed_in_few_calls(gate: str) -> None:
    """256 sequences: first up to start residue a, then to end residue b two tiles on, then 20 tokens more."""
    everyone = [(a, b) for a in range(16) for b in range(16)]
    sequences = [kda_inputs(68, 2, 16, 24, GATES[gate]) for _ in everyone]
    pool = kda_pool(256, 2, 16, 24)
    for slot, inputs in enumerate(sequences):
        pool.S[slot] = inputs.initial_state
    order = list(range(256))
    random.Random(7).shuffle(order)
    outputs: dict[int, list[torch.Tensor]] = {n: [] for n in order}
    for step in range(3):
        borders = {n: ((0, a), (a, 32 + b), (32 + b, 52 + b))[step] for n, (a, b) in enumerate(everyone)}
        pieces = [(n, sequences[n], borders[n][0], borders[n][1]) for n in order]
        for n, o in zip(order, feed(pool, pieces), strict=True):
            outputs[n].append(o)
    for n, (_, b) in enumerate(everyone):
        whole, alone = feed_alone(sequences[n], [52 + b])
        assert same_bytes(torch.cat(outputs[n]), whole), everyone[n]
        assert_same_state(pool, n, alone, 1, 52 + b)


@pytest.mark.parametrize("gate", GATES)
def test_prefill_and_decode_share_a_batch(gate: str) -> None:
    """Sequences at other positions, with other lengths, in shuffled slots: each as if it were alone."""
    lengths = [(0, 1), (5, 6), (15, 16), (16, 17), (3, 70), (0, 64), (31, 33), (9, 9), (47, 80), (63, 64)]
    sequences = [kda_inputs(96, 2, 32, 16, GATES[gate]) for _ in lengths]
    slots = [7, 2, 11, 0, 5, 9, 1, 4, 8, 3]
    pool = kda_pool(12, 2, 32, 16)
    for slot, inputs in zip(slots, sequences, strict=True):
        pool.S[slot] = inputs.initial_state
    trio = list(zip(slots, sequences, lengths, strict=True))
    feed(pool, [(slot, inputs, 0, start) for slot, inputs, (start, _) in trio])
    middle = feed(pool, [(slot, inputs, start, end) for slot, inputs, (start, end) in trio])
    last = feed(pool, [(slot, inputs, end, end + 16) for slot, inputs, (_, end) in trio])
    for number, (slot, inputs, (start, end)) in enumerate(trio):
        whole, alone = feed_alone(inputs, [end + 16])
        assert same_bytes(torch.cat((middle[number], last[number])), whole[start:])
        assert_same_state(pool, slot, alone, 1, end + 16)


def test_what_a_call_does_not_own_stays_as_it_was() -> None:
    inputs = kda_inputs(40, 2, 16, 24, None)
    pool = kda_pool(5, 2, 16, 24)
    pool.S[3] = inputs.initial_state
    before = pool.clone()
    feed(pool, [(3, inputs, 0, 20)])
    others = [0, 1, 2, 4]
    for now, then in zip(pool.parts(), before.parts(), strict=True):
        assert same_bytes(now[others], then[others])
    assert bool((pool.rows.g[3, 4:] == POISON_GATE).all())
    assert bool(pool.rows.k[3, 4:].isnan().all())
    assert bool(torch.isfinite(pool.rows.k[3, :4]).all())
    feed(pool, [(3, inputs, 20, 25)])
    assert bool(pool.rows.k[3, 9:].isnan().all())


def test_s_moves_on_only_when_a_tile_closes() -> None:
    inputs = kda_inputs(33, 2, 16, 24, -5.0)
    pool = kda_pool(1, 2, 16, 24)
    pool.S[0] = inputs.initial_state
    feed(pool, [(0, inputs, 0, 15)])
    assert same_bytes(pool.S[0], inputs.initial_state)
    feed(pool, [(0, inputs, 15, 16)])
    closed = pool.S[0].clone()
    assert not torch.equal(closed, inputs.initial_state)
    feed(pool, [(0, inputs, 16, 31)])
    assert same_bytes(pool.S[0], closed)


def test_a_step_inside_a_tile_can_be_taken_again() -> None:
    """A discarded decode step needs no undo: its row is written over."""
    inputs = kda_inputs(30, 2, 16, 24, None)
    other = kda_inputs(30, 2, 16, 24, None)
    pool = kda_pool(1, 2, 16, 24)
    pool.S[0] = inputs.initial_state
    feed(pool, [(0, inputs, 0, 20)])
    feed(pool, [(0, other, 20, 23)])
    again = feed(pool, [(0, inputs, 20, 30)])[0]
    whole, alone = feed_alone(inputs, [30])
    assert same_bytes(again, whole[20:])
    assert_same_state(pool, 0, alone, 1, 30)


def test_stale_rows_of_a_closed_tile_are_never_read() -> None:
    inputs = kda_inputs(48, 2, 16, 24, None)
    whole, _ = feed_alone(inputs, [48])
    pool = kda_pool(1, 2, 16, 24)
    pool.S[0] = inputs.initial_state
    feed(pool, [(0, inputs, 0, 15)])
    feed(pool, [(0, inputs, 15, 32)])
    for part in (pool.rows.k, pool.rows.v, pool.rows.beta):
        part.fill_(float("nan"))
    pool.rows.g.fill_(POISON_GATE)
    assert same_bytes(feed(pool, [(0, inputs, 32, 48)])[0], whole[32:])


def test_a_batch_without_rows_does_nothing() -> None:
    inputs = kda_inputs(16, 2, 16, 24, None)
    pool = kda_pool(2, 2, 16, 24)
    before = pool.clone()
    assert feed(pool, [(0, inputs, 3, 3), (1, inputs, 0, 0)])[0].shape == (0, 2, 24)
    for now, then in zip(pool.parts(), before.parts(), strict=True):
        assert same_bytes(now, then)


def test_zeros_of_o_and_s_are_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal numbers must be equal bytes, since digests of parts are compared: even if a BLAS made negative zeros."""
    monkeypatch.setattr(tile, "bmm_fixed", negative_zeros)
    rows = kda_inputs(32, 1, 16, 16, None)
    zero = KdaInputs(rows.q, rows.k, -torch.zeros_like(rows.v), rows.g, rows.beta, -torch.zeros(1, 16, 16), None)
    o, pool = feed_alone(zero, [32])
    assert same_bytes(o, torch.zeros_like(o)) and same_bytes(pool.S[1], torch.zeros(1, 16, 16))


def test_pools_may_be_views_of_one_layer_and_rows_may_be_strided() -> None:
    inputs = kda_inputs(21, 2, 16, 24, None)
    whole, alone = feed_alone(inputs, [21])
    stacked = torch.full((2, 2, 3, 24, 16), float("nan"))
    pool = kda_pool(2, 2, 16, 24)
    S = stacked[:, :, 1:].permute(1, 0, 2, 3, 4)[1].transpose(0, 1)[:2].transpose(0, 1)
    assert S.shape == (2, 2, 24, 16) and not S.is_contiguous()
    S[1] = inputs.initial_state
    wide = torch.cat((inputs.q, inputs.k), dim=2)
    o = tile_kda(wide[..., :16], wide[..., 16:], inputs.v, inputs.g, inputs.beta, S, pool.rows, [1], [0, 21], [0], None)
    assert same_bytes(o, whole) and same_bytes(S[1], alone.S[1])


def test_a_batch_that_makes_no_sense_is_refused() -> None:
    inputs = kda_inputs(4, 1, 16, 16, None)
    pool = kda_pool(1, 1, 16, 16)
    rows = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    with pytest.raises(ValueError, match="1 sequences, 2 slots, 1 starts"):
        tile_kda(*rows, pool.S, pool.rows, [0, 0], [0, 4], [0], None)
    with pytest.raises(ValueError, match="two sequences share a slot"):
        tile_kda(*rows, pool.S, pool.rows, [0, 0], [0, 2, 4], [0, 0], None)
