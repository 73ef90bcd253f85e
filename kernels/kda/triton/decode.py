"""Decode: one new row a sequence. Its factors join the open tile's, and the tile's algebra is formed again from them.

S is written only when the tile closes. step_kernel once a head, then read_kernel a block of values: the second one
keeps few registers, so that many reads of S are in flight.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from forkpoint.kernels.kda.triton.rows import conv_silu, load_taps, row_factors, sigmoid
from forkpoint.kernels.kda.triton.tile_ops import (
    arrived,
    close_tile,
    fold,
    read_state,
    tile_matrices,
    unreferenced,
)


@triton.jit
def conv_inputs(x, ring, slot, position, channel, channels):
    """Conv inputs [128] three, two and one tokens ago, and the new row's."""
    at = ring + slot * 4 * channels + channel
    exists = channel >= 0
    third = tl.load(at + ((position - 3) & 3) * channels, mask=(position >= 3) & exists, other=0.0)
    second = tl.load(at + ((position - 2) & 3) * channels, mask=(position >= 2) & exists, other=0.0)
    last = tl.load(at + ((position - 1) & 3) * channels, mask=(position >= 1) & exists, other=0.0)
    return third, second, last, tl.load(x + channel)


@triton.jit
def step_conv(inputs, taps):
    """silu(conv) [128] fp32 of the new row."""
    third, second, last, now = inputs
    return conv_silu(third.to(tl.float32), second.to(tl.float32), last.to(tl.float32), now.to(tl.float32), taps)


@triton.jit
def keep_inputs(inputs, ring, grid, slot, position, channel, channels):
    """The new row's inputs join the conv's tails.

    The place of the ring that it takes is not one of the three that are read, and no other program has these channels.
    """
    _, second, last, now = inputs
    tl.store(ring + (slot * 4 + (position & 3)) * channels + channel, now)
    if (position & 15) == 15:
        to = grid + slot * 3 * channels + channel
        tl.store(to, second)
        tl.store(to + channels, last)
        tl.store(to + 2 * channels, now)


@triton.jit
def unreference_step(left_open, keys_out, query_out, query, reference, row_of, H: tl.constexpr):
    """k+ of the open tile's rows and q+ in place of the query; row_of = (slot, row of the batch, head, place)."""
    slot, n, head, newest = row_of
    key = tl.arange(0, 128)
    for first in tl.static_range(0, 16, 4):
        some = (first + tl.arange(0, 4))[:, None]
        mask = (some <= newest) & (key >= 0)[None, :]
        left = tl.load(left_open + ((slot * 16 + some) * H + head) * 128 + key[None, :], mask=mask, other=0.0)
        plus = unreferenced(left, reference[None, :], some)
        tl.store(keys_out + ((n * 16 + some) * H + head) * 128 + key[None, :], plus, mask=mask)
    tl.debug_barrier()
    tl.store(query_out + (n * H + head) * 128 + key, unreferenced(query, reference, newest))


@triton.jit
def step_kernel(
    facts, x, z, b, weight, A_log, dt_bias, ring, grid, left_open, right_open, v_open, beta_open, total_open,
    reference_open, query_out, keys_out, inverse_out, outputs_out, rest_out, decay_out, x_stride, z_stride, b_stride,
    lower_bound, scale, H: tl.constexpr, BOUNDED: tl.constexpr, TWO_REFERENCES: tl.constexpr, KEYS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (H, N), one warp. facts [N, 2] int32: slot, position; x [N, 3 H 128], z [N, H 128], b [N, H].

    Puts the row into the slot's open tile and conv tails, and writes at n * H + head: q+ [128], T Diag(beta) transposed
    [16, 16], the newest row of M [16]; with two references k+ [16, 128], which else are the left factors; and of a tile
    that closes k 2^(G_15 - G) and 2^G_15. Slots below 0 do nothing.
    """
    head, n = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    key, place = tl.arange(0, 128), tl.arange(0, 16)
    channel, channels = head * 128 + key, H * 384
    gate = (tl.load(dt_bias + channel), tl.exp(tl.load(A_log + head)), lower_bound, scale)
    if EARLY:
        gdc_wait()
    slot = tl.load(facts + n * 2).to(tl.int64)
    position = tl.load(facts + n * 2 + 1)
    if EARLY:
        gdc_launch_dependents()
    if slot >= 0:
        newest = position & 15
        row, column = place[:, None], place[None, :]
        at, own = n * H + head, slot * H + head
        total = tl.load(total_open + own * 128 + key, mask=(newest > 0) & (key >= 0), other=0)
        reference = tl.load(reference_open + own * 128 + key, mask=(newest > 8) & (key >= 0), other=0)
        # All loads before the first store, which none may pass.
        line = x + n * x_stride
        q_in = conv_inputs(line, ring, slot, position, channel, channels)
        k_in = conv_inputs(line, ring, slot, position, H * 128 + channel, channels)
        v_in = conv_inputs(line, ring, slot, position, H * 256 + channel, channels)
        raw = tl.load(z + n * z_stride + channel).to(tl.float32)
        beta_at = beta_open + slot * 16 * H + head
        new_beta = sigmoid(tl.load(b + n * b_stride + head).to(tl.float32))
        beta = tl.load(beta_at + place * H, mask=place < newest, other=0.0)
        beta = tl.where(place == newest, new_beta, beta)
        q = step_conv(q_in, load_taps(weight, channel, channels))
        k = step_conv(k_in, load_taps(weight, H * 128 + channel, channels))
        v = step_conv(v_in, load_taps(weight, H * 256 + channel, channels))
        left_k, query, right_k, total, reference = row_factors(
            q, k, raw, total, reference, newest, gate, TWO_REFERENCES, BOUNDED
        )
        to = ((slot * 16 + newest) * H + head) * 128 + key
        tl.store(left_open + to, left_k)
        tl.store(right_open + to, right_k)
        tl.store(v_open + to, v.to(tl.bfloat16))
        tl.store(beta_at + newest * H, new_beta)
        tl.store(total_open + own * 128 + key, total)
        tl.store(reference_open + own * 128 + key, reference, mask=(newest == 8) & (key >= 0))
        tl.store(query_out + at * 128 + key, query)
        keep_inputs(q_in, ring, grid, slot, position, channel, channels)
        keep_inputs(k_in, ring, grid, slot, position, H * 128 + channel, channels)
        keep_inputs(v_in, ring, grid, slot, position, H * 256 + channel, channels)
        # From memory rather than registers: a row's layout is not a tile's, and to turn it there takes more of both.
        tl.debug_barrier()
        rows, late = (slot * 16 + place) * H + head, reference_open + own * 128
        factors = (left_open + rows * 128, query_out + at * 128 + place * 0, right_open + rows * 128)
        inverse, outputs = tile_matrices(
            factors, place <= newest, place == newest, beta, late, newest >= 8, TWO_REFERENCES, KEYS, False
        )
        tl.store(inverse_out + at * 256 + row * 16 + column, inverse)
        # One column out of the tile by a masked store: it moves no bit, a sum over zeros might.
        tl.store(outputs_out + at * 16 + row + column * 0, outputs, mask=(row >= 0) & (column == newest))
        if TWO_REFERENCES:
            unreference_step(left_open, keys_out, query_out, query, reference, (slot, n, head, newest), H)
        if newest == 15:
            first_row = right_open + (slot * 16 * H + head) * 128
            close_tile(first_row, H * 128, rest_out + at * 2048, decay_out + at * 128, total, reference, TWO_REFERENCES)


@triton.jit
def read_kernel(
    facts, query_in, keys_in, v_open, inverse_in, outputs_in, rest_in, decay_in, S, o, H: tl.constexpr,
    BV: tl.constexpr, OF_SLOTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (128 / BV, H, N), after step_kernel. o [N, H, 128]; zeros for slots below 0, which touch
    nothing else.

    keys_in: k+ [*, 16, H, 128], by slot with OF_SLOTS, else by row of the batch.
    """
    value = tl.program_id(0) * BV + tl.arange(0, BV)[:, None]
    head, n = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    slot = tl.load(facts + n * 2).to(tl.int64)
    newest = tl.load(facts + n * 2 + 1) & 15
    if slot >= 0:
        pool = S + (slot * H + head) * 16384 + value * 128 + tl.arange(0, 128)[None, :]
        state = tl.load(pool)
        if EARLY:
            gdc_wait()
            gdc_launch_dependents()
        place, key = tl.arange(0, 16), tl.arange(0, 128)
        at, row, column = n * H + head, place[:, None], place[None, :]
        answer = o + at * 128 + value + column * 0
        line = (slot if OF_SLOTS else n) * 16
        one_key, exists, asks = key[:, None] >= 0, column <= newest, column == newest
        keys_at = keys_in + ((line + place) * H + head)[None, :] * 128 + key[:, None]
        keys = tl.load(keys_at, mask=exists & one_key, other=0.0)
        queries = tl.load(query_in + at * 128 + key[:, None] + column * 0, mask=asks & one_key, other=0.0)
        inverse = tl.load(inverse_in + at * 256 + row * 16 + column)
        outputs = tl.load(outputs_in + at * 16 + row + column * 0, mask=(row >= 0) & asks, other=0.0)
        v_at = v_open + ((slot * 16 + place) * H + head)[None, :] * 128 + value
        v = arrived(tl.load(v_at, mask=exists & (value >= 0), other=0.0)).to(tl.float32)
        keys, queries, inverse, outputs = arrived(keys), arrived(queries), arrived(inverse), arrived(outputs)
        state = arrived(state).to(tl.float32)
        u, out = read_state(state, keys, queries, v, inverse, outputs)
        tl.store(answer, out.to(o.dtype.element_ty), mask=(value >= 0) & asks)
        if newest == 15:
            rest = tl.load(rest_in + at * 2048 + row * 128 + key[None, :])
            decay = tl.load(decay_in + at * 128 + key)
            # Read again, from cache mostly: kept, it would cost every step the registers of one step in sixteen.
            state = tl.load(pool).to(tl.float32)
            tl.store(pool, fold(state, u, rest, decay, S.dtype.element_ty).to(S.dtype.element_ty))
    else:
        tl.store(o + (n * H + head) * 128 + value, tl.zeros((BV, 1), tl.float32).to(o.dtype.element_ty))
