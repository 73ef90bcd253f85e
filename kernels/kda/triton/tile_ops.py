"""What prefill and decode share of a tile, so that both round the same numbers in the same places.

Only elementwise operations, MMAs of 16-row tiles, and integer sums: a row or column of an MMA does not depend on its
neighbours, so it makes no difference which rows of a tile exist yet, as long as absent ones are zero. Matrices come
transposed (columns are tokens) wherever the serial pass multiplies from the right by them: an accumulator is never
transposed, which some Triton versions compile wrongly on Hopper.

K = V = 128, 16 rows. Operands of products are bf16 (fp16 inside the inverse), accumulators and S fp32.
"""

import triton
import triton.language as tl

GATE_BITS = tl.constexpr(22)
GATE_UNIT = tl.constexpr(2.0**-22)
HALF = tl.constexpr(8)
FIRST_SHIFT = tl.constexpr(96)
SECOND_SHIFT = tl.constexpr(72)


@triton.jit
def unit_upper_inverse(n, row, column):
    """(I - n)^-1 of strictly upper n [16, 16], fp32.

    Blocks of 2 are inverted by hand, then neighbours are merged three times: with t the inverse of the diagonal blocks
    and f the blocks beside them, t + t f t. Powers of n, which grow to thousands where keys repeat, never appear.
    """
    inverse = tl.where(row == column, 1.0, 0.0) + tl.where((row >> 1) == (column >> 1), n, 0.0)
    for level in tl.static_range(1, 4):
        beside = ((row >> (level + 1)) == (column >> (level + 1))) & ((row >> level) != (column >> level))
        rounded = inverse.to(tl.float16)
        left = tl.dot(rounded, tl.where(beside, n, 0.0).to(tl.float16)).to(tl.float16)
        inverse = tl.dot(left, rounded, inverse)
    return inverse


@triton.jit
def late_keys(right, reference, row):
    """Right factors [16, keys] of rows 0-7 moved to the reference of rows 8-15, by an exact power of two.

    In two steps, since its exponent goes down to -192; what falls below fp32 on the way is 2^-54 of its row.
    """
    exponent = (reference + (FIRST_SHIFT - SECOND_SHIFT))[None, :]
    first = exponent >> 1
    moved = right.to(tl.float32) * tl.exp2(first.to(tl.float32)) * tl.exp2((exponent - first).to(tl.float32))
    return tl.where(row < HALF, moved.to(tl.bfloat16), right)


@triton.jit
def tile_matrices(
    rows, exists, asks, beta, reference_at, late_exists, TWO_REFERENCES: tl.constexpr, KEYS: tl.constexpr
):
    """T Diag(beta) and M [16, 16], transposed, bf16.

    rows = (left, query, right): pointers [16] to each token's bf16 [128] (rows.py: row_factors); exists, asks [16]:
    which tokens are there, and which have a query; beta [16], 0 where none is; reference_at: r int32 [128], read if
    late_exists, which says whether row 8 does. KEYS at a time: fewer take fewer registers and longer.
    """
    left_at, query_at, right_at = rows
    place = tl.arange(0, 16)
    row, column = place[:, None], place[None, :]
    lower, outputs = tl.zeros((16, 16), tl.float32), tl.zeros((16, 16), tl.float32)
    late_lower, late_outputs = tl.zeros((16, 16), tl.float32), tl.zeros((16, 16), tl.float32)
    for first in tl.static_range(0, 128, KEYS):
        part = first + tl.arange(0, KEYS)
        any_key = part >= 0
        right = tl.load(right_at[:, None] + part[None, :], mask=exists[:, None] & any_key[None, :], other=0.0)
        left = tl.load(left_at[None, :] + part[:, None], mask=exists[None, :] & any_key[:, None], other=0.0)
        query = tl.load(query_at[None, :] + part[:, None], mask=asks[None, :] & any_key[:, None], other=0.0)
        lower, outputs = tl.dot(right, left, lower), tl.dot(right, query, outputs)
        if TWO_REFERENCES:
            reference = tl.load(reference_at + part, mask=late_exists & any_key, other=0)
            late = late_keys(right, reference, row)
            late_lower, late_outputs = tl.dot(late, left, late_lower), tl.dot(late, query, late_outputs)
        if KEYS < 128:
            # Or the loads of all parts would go first, with all their registers.
            tl.debug_barrier()
    if TWO_REFERENCES:
        lower = tl.where(column < HALF, lower, late_lower)
        outputs = tl.where(column < HALF, outputs, late_outputs)
    outputs = tl.where(row <= column, outputs, 0.0).to(tl.bfloat16)
    inverse = unit_upper_inverse(tl.where(row < column, -(lower * beta[None, :]), 0.0), row, column)
    return (inverse * beta[:, None]).to(tl.bfloat16), outputs


@triton.jit
def unreferenced(factor, reference, place):
    """x 2^G bf16 from left factors of two references; the arguments broadcast. Below 2^-53 it may become 0."""
    scale = tl.exp2(tl.where(place < HALF, -FIRST_SHIFT, reference - SECOND_SHIFT).to(tl.float32))
    return (factor.to(tl.float32) * scale).to(tl.bfloat16)


@triton.jit
def close_tile(right, right_stride, rest, decay_out, total, reference, TWO_REFERENCES: tl.constexpr):
    """Stores k 2^(G_15 - G) bf16 [16, 128] and 2^G_15 fp32 [128] of a tile that closes; total = G_15 [128] int32.

    right: [16] rows of 128 that lie right_stride apart; `rest` may be the same memory.
    """
    key = tl.arange(0, 128)
    decay = tl.exp2(total.to(tl.float32) * GATE_UNIT)
    for first in tl.static_range(0, 16, 4):
        place = first + tl.arange(0, 4)
        row = place[:, None]
        if TWO_REFERENCES:
            late = (total - (reference << GATE_BITS)).to(tl.float32) * GATE_UNIT + SECOND_SHIFT
            early = total.to(tl.float32) * GATE_UNIT + FIRST_SHIFT
            scale = tl.exp2(tl.where(row < HALF, early[None, :], late[None, :]))
        else:
            scale = decay[None, :]
        scaled = tl.load(right + row * right_stride + key[None, :]).to(tl.float32) * scale
        tl.store(rest + row * 128 + key[None, :], scaled.to(tl.bfloat16))
    tl.store(decay_out + key, decay)


@triton.jit
def pair_row(place):
    """Row of k+ of a token in [32, 128] of k+ and q+; its q+ lies one below.

    Of a product's 16 columns a thread holds 2c, 2c + 1, 2c + 8, 2c + 9 (c = 0..3). This order gives it k+ and q+ of
    these four tokens out of 32 columns, so that `split_pairs` moves nothing between threads.
    """
    return 16 * (place >> 3) + 8 * (place & 1) + 2 * ((place >> 1) & 3)


@triton.jit
def pair_token(row):
    """The token of a row of k+ and q+, see pair_row."""
    return 8 * (row >> 4) + 2 * ((row >> 1) & 3) + ((row >> 3) & 1)


@triton.jit
def split_pairs(both, BV: tl.constexpr):
    """[BV, 32] of k+ and q+ columns into two [BV, 16] in the order of tokens."""
    both = tl.permute(tl.reshape(both, (BV, 2, 2, 4, 2)), (0, 1, 3, 2, 4))
    return tl.split(tl.reshape(both, (BV, 16, 2)))


@triton.jit
def read_state(state, kq, v, inverse, outputs, BV: tl.constexpr):
    """U [BV, 16] bf16 and O [BV, 16] fp32 from S [BV, 128] fp32: kq [128, 32] k+ and q+ in the order of pair_row,
    transposed; v [BV, 16] fp32; T Diag(beta) and M [16, 16] transposed."""
    read, out = split_pairs(tl.dot(state.to(tl.bfloat16), kq), BV)
    residual = (v - read).to(tl.bfloat16)
    u = tl.dot(residual, inverse).to(tl.bfloat16)
    return u, tl.dot(u, outputs, out)


@triton.jit
def fold(state, u, rest, decay, POOL: tl.constexpr):
    """S after the tile, rounded to the pool's dtype as a store would round it, in fp32."""
    return tl.dot(u, rest, state * decay[None, :]).to(POOL).to(tl.float32)
