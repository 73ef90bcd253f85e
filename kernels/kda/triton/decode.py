"""Decode: one new row a sequence. The open tile is formed again from its cached rows, with prefill's functions.

The row kernel has put the new row into the slot's open rows. Nothing of the tile's algebra is cached between steps: the
open rows are a quarter of S in bytes (k, v bf16, gates int32), and a step reads those that exist. S is written only
when the tile closes. Two forms with equal bits; a GPU has to say which is faster:

- split: factor_kernel once a head, then read_kernel a block of values. 2.4 KB a head on average pass between them, and
  the second one keeps few registers, so that many reads of S are in flight;
- fused: decode_kernel alone. Every block of values makes the factors again; they need all registers there are.
"""

import triton
import triton.language as tl

from forkpoint.kernels.kda.triton.tile_ops import (
    closing_factors,
    fold,
    grown_rows,
    join_pairs,
    pair_row,
    pair_token,
    read_state,
    shrunk_keys,
    tile_matrices,
)


@triton.jit
def open_tile(q_new, k_open, g_open, beta_open, slot, n, head, newest, H: tl.constexpr):
    """q, k, gates [16, 128] and beta [16] of the open tile; q has the newest row only, no query is asked twice."""
    place, key = tl.arange(0, 16), tl.arange(0, 128)
    exists = place <= newest
    cached = (slot * 16 + place) * H + head
    rows = cached[:, None] * 128 + key[None, :]
    k = tl.load(k_open + rows, mask=exists[:, None], other=0.0).to(tl.float32)
    g = tl.load(g_open + rows, mask=exists[:, None], other=0)
    beta = tl.load(beta_open + cached, mask=exists, other=0.0)
    query = tl.load(q_new + (n * H + head) * 128 + key).to(tl.float32)
    return tl.where((place == newest)[:, None], query[None, :], 0.0), k, g, beta


@triton.jit
def open_values(v_open, slot, head, newest, value, H: tl.constexpr):
    """v [BV, 16] fp32 of the open tile."""
    place = tl.arange(0, 16)
    at = ((slot * 16 + place) * H + head)[None, :] * 128 + value
    return tl.load(v_open + at, mask=(place <= newest)[None, :], other=0.0).to(tl.float32)


@triton.jit
def factor_kernel(
    facts,
    q_new,
    k_open,
    g_open,
    beta_open,
    kq_out,
    inverse_out,
    outputs_out,
    rest_out,
    decay_out,
    H: tl.constexpr,
    TWO_REFERENCES: tl.constexpr,
):
    """Grid (H, N), facts [N, 3] int32: slot, position, position. Writes at n * H + head: k+ and q+ [32, 128] (those
    that exist; pair_row), T Diag(beta) transposed [16, 16], the newest row of M [16], and, of a tile that closes, k
    2^(G_15 - G) and 2^G_15.
    """
    head, n = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(facts + n * 3).to(tl.int64)
    newest = tl.load(facts + n * 3 + 1) & 15
    if slot >= 0:
        place, key = tl.arange(0, 16), tl.arange(0, 128)[None, :]
        q, k, g, beta = open_tile(q_new, k_open, g_open, beta_open, slot, n, head, newest, H)
        total = tl.cumsum(g, 0)
        at, row, column = n * H + head, place[:, None], place[None, :]
        ke, qe = grown_rows(k, q, total)
        shrunk = shrunk_keys(k, total, TWO_REFERENCES)
        # Stores of one row or column out of a tile: a masked store moves no bit, a sum over zeros might.
        pairs = at * 4096 + pair_row(row) * 128 + key
        tl.store(kq_out + pairs, ke.to(tl.bfloat16), mask=(row <= newest) & (key >= 0))
        tl.store(kq_out + pairs + 128, qe.to(tl.bfloat16), mask=(row == newest) & (key >= 0))
        if newest == 15:
            rest, decay = closing_factors(k, shrunk, total, tl.sum(g, 0), TWO_REFERENCES)
            tl.store(rest_out + at * 2048 + row * 128 + key, rest)
            tl.store(decay_out + at * 128 + tl.arange(0, 128), decay)
        inverse, outputs = tile_matrices(k, q, ke, qe, shrunk, total, beta, place, TWO_REFERENCES)
        tl.store(inverse_out + at * 256 + row * 16 + column, inverse)
        tl.store(outputs_out + at * 16 + row + column * 0, outputs, mask=(row >= 0) & (column == newest))


@triton.jit
def read_kernel(
    facts,
    v_open,
    kq_in,
    inverse_in,
    outputs_in,
    rest_in,
    decay_in,
    S,
    o,
    H: tl.constexpr,
    BV: tl.constexpr,
):
    """Grid (128 / BV, H, N), after factor_kernel. o [N, H, 128]; zeros for slots below 0, which touch nothing else."""
    value = tl.program_id(0) * BV + tl.arange(0, BV)[:, None]
    head, n = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    slot = tl.load(facts + n * 3).to(tl.int64)
    newest = tl.load(facts + n * 3 + 1) & 15
    place, key = tl.arange(0, 16), tl.arange(0, 128)
    at, row, column = n * H + head, place[:, None], place[None, :]
    answer = o + at * 128 + value + column * 0
    if slot >= 0:
        pool = S + (slot * H + head) * 16384 + value * 128 + key[None, :]
        state = tl.load(pool).to(tl.float32)
        pair = tl.arange(0, 32)[None, :]
        token = pair_token(pair)
        exists = tl.where((pair & 1) == 0, token <= newest, token == newest) & (key[:, None] >= 0)
        kq = tl.load(kq_in + at * 4096 + pair * 128 + key[:, None], mask=exists, other=0.0)
        inverse = tl.load(inverse_in + at * 256 + row * 16 + column)
        outputs = tl.load(outputs_in + at * 16 + row + column * 0, mask=(row >= 0) & (column == newest), other=0.0)
        v = open_values(v_open, slot, head, newest, value, H)
        u, out = read_state(state, kq, v, inverse, outputs, BV)
        tl.store(answer, out.to(o.dtype.element_ty), mask=(value >= 0) & (column == newest))
        if newest == 15:
            rest = tl.load(rest_in + at * 2048 + row * 128 + key[None, :])
            decay = tl.load(decay_in + at * 128 + key)
            # Read again, from cache mostly: kept, it would cost every step the registers of one step in sixteen.
            state = tl.load(pool).to(tl.float32)
            tl.store(pool, fold(state, u, rest, decay, S.dtype.element_ty).to(S.dtype.element_ty))
    else:
        zero = tl.zeros((BV, 16), tl.float32).to(o.dtype.element_ty)
        tl.store(answer, zero, mask=(value >= 0) & (column == newest))


@triton.jit
def decode_kernel(
    facts,
    q_new,
    k_open,
    v_open,
    g_open,
    beta_open,
    S,
    o,
    H: tl.constexpr,
    BV: tl.constexpr,
    TWO_REFERENCES: tl.constexpr,
):
    """Grid (128 / BV, H, N). facts [N, 3] int32: slot (below 0: o is zeros, nothing else happens), position, position.

    q_new [N, H, 128]; open rows [slots, 16, H, ...]; S [slots, H, 128, 128]; o [N, H, 128]. A program writes its own
    values of S only, and reads nothing that another one writes.
    """
    value = tl.program_id(0) * BV + tl.arange(0, BV)[:, None]
    head, n = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    slot = tl.load(facts + n * 3).to(tl.int64)
    newest = tl.load(facts + n * 3 + 1) & 15
    place, key = tl.arange(0, 16), tl.arange(0, 128)
    answer = o + (n * H + head) * 128 + value + place[None, :] * 0
    is_newest = place == newest
    if slot >= 0:
        # First, so that it is in flight while the tile's factors are made.
        pool = S + (slot * H + head) * 16384 + value * 128 + key[None, :]
        state = tl.load(pool).to(tl.float32)
        v = open_values(v_open, slot, head, newest, value, H)
        q, k, g, beta = open_tile(q_new, k_open, g_open, beta_open, slot, n, head, newest, H)
        total = tl.cumsum(g, 0)
        ke, qe = grown_rows(k, q, total)
        shrunk = shrunk_keys(k, total, TWO_REFERENCES)
        inverse, outputs = tile_matrices(k, q, ke, qe, shrunk, total, beta, place, TWO_REFERENCES)
        kq = tl.trans(join_pairs(ke.to(tl.bfloat16), qe.to(tl.bfloat16)))
        u, out = read_state(state, kq, v, inverse, outputs, BV)
        tl.store(answer, out.to(o.dtype.element_ty), mask=(value >= 0) & is_newest[None, :])
        if newest == 15:
            rest, decay = closing_factors(k, shrunk, total, tl.sum(g, 0), TWO_REFERENCES)
            state = tl.load(pool).to(tl.float32)
            tl.store(pool, fold(state, u, rest, decay, S.dtype.element_ty).to(S.dtype.element_ty))
    else:
        zero = tl.zeros((BV, 16), tl.float32).to(o.dtype.element_ty)
        tl.store(answer, zero, mask=(value >= 0) & is_newest[None, :])
