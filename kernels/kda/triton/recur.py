"""Recur kernel: the serial pass over a sequence's tiles, one program a block of values, head and sequence.

S [BV, 128] is carried in fp32 registers with values on the M side of every product, so that the pool's rows are loaded
as they lie and no accumulator is transposed.
"""

import triton
import triton.language as tl

from forkpoint.kernels.kda.triton.tile_ops import fold, read_state


@triton.jit
def load_tile(v_new, v_open, kq_in, inverse_in, outputs_in, at, sequence, place_of, H: tl.constexpr):
    """k+ and q+, v, T Diag(beta) and M of a tile; where its rows of o lie, and which of them are new.

    sequence = (slot, first row, start, end); place_of = (tile * H + head, head, value [BV, 1], first position).
    """
    slot, first_row, start, end = sequence
    index, head, value, origin = place_of
    place, key = tl.arange(0, 16), tl.arange(0, 128)
    kq_at = kq_in + index * 4096 + place[None, :] * 128 + key[:, None]
    keys, queries = tl.load(kq_at), tl.load(kq_at + 2048)
    square = index * 256 + place[:, None] * 16 + place[None, :]
    inverse, outputs = tl.load(inverse_in + square), tl.load(outputs_in + square)
    position = origin + place
    old, new = (position < start)[None, :], ((position >= start) & (position < end))[None, :]
    row = ((first_row + position - start) * H + head)[None, :] * 128 + value
    v_at = tl.where(old, v_open + ((slot * 16 + place) * H + head)[None, :] * 128 + value, v_new + row)
    v = tl.load(v_at, mask=old | new, other=0.0).to(tl.float32)
    return keys, queries, v, inverse, outputs, row, new


@triton.jit
def recur_kernel(
    tiles, sequences, v_new, kq_in, rest_in, inverse_in, outputs_in, decay_in, S, checkpoints, o, v_open,
    H: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (128 / BV, H, N). Writes o [R, H, 128] of the new rows, and S [slots, H, 128, 128] if a tile closed.

    tiles [tiles, 2] int32: sequence, and the row of checkpoints [*, H, 128, 128] fp32 that takes S after the tile, or
    -1; sequences [N, 5] int32: slot, first row, start, end, first tile. Nothing is done for slots below 0.
    """
    value = tl.program_id(0) * BV + tl.arange(0, BV)[:, None]
    head, n = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    slot = tl.load(sequences + n * 5).to(tl.int64)
    first_row = tl.load(sequences + n * 5 + 1).to(tl.int64)
    start, end = tl.load(sequences + n * 5 + 2), tl.load(sequences + n * 5 + 3)
    first_tile = tl.load(sequences + n * 5 + 4)
    place, key = tl.arange(0, 16), tl.arange(0, 128)
    if (slot >= 0) & (end > start):
        origin = start // 16 * 16
        closing, count = end // 16 - start // 16, tl.cdiv(end, 16) - start // 16
        sequence = (slot, first_row, start, end)
        tile_place = value * 128 + key[None, :]
        pool = S + (slot * H + head) * 16384 + tile_place
        state = tl.load(pool).to(tl.float32)
        for t in tl.range(0, count, num_stages=STAGES):
            at = (first_tile + t) * H + head
            here = (at, head, value, origin + t * 16)
            keys, queries, v, inverse, outputs, row, new = load_tile(
                v_new, v_open, kq_in, inverse_in, outputs_in, at, sequence, here, H
            )
            rest = tl.load(rest_in + at * 2048 + place[:, None] * 128 + key[None, :])
            decay = tl.load(decay_in + at * 128 + key)
            u, out = read_state(state, keys, queries, v, inverse, outputs)
            tl.store(o + row, out.to(o.dtype.element_ty), mask=new)
            state = fold(state, u, rest, decay, S.dtype.element_ty)
            save = tl.load(tiles + (first_tile + t) * 2 + 1).to(tl.int64)
            if save >= 0:
                tl.store(checkpoints + (save * H + head) * 16384 + tile_place, state)
            # A tile that stays open folds rubbish into a state that nothing reads any more.
            if t == closing - 1:
                tl.store(pool, state.to(S.dtype.element_ty))
