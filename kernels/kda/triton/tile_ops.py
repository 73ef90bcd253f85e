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
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def arrived(x):
    """x, loaded earlier. A tensor that goes to shared memory is waited for right behind its load, before the next load
    is sent; behind this, which costs no instruction, it is waited for here."""
    if not INTERPRETED:
        pack: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=pack)
    return x


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
    rows, exists, asks, beta, reference_at, late_exists, TWO_REFERENCES: tl.constexpr, KEYS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """T Diag(beta) and M [16, 16], transposed, bf16.

    rows = (left, query, right): pointers [16] to each token's bf16 [128] (rows.py: row_factors); exists, asks [16]:
    which tokens are there, and which have a query; beta [16], 0 where none is; reference_at: r int32 [128], read if
    late_exists, which says whether row 8 does. KEYS at a time: fewer take fewer registers and longer. TOGETHER: their
    loads are in flight at once, which takes more shared memory.
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
        if TOGETHER:
            right, left, query = arrived(right), arrived(left), arrived(query)
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
    key, place = tl.arange(0, 128), tl.arange(0, 16)
    row = place[:, None]
    decay = tl.exp2(total.to(tl.float32) * GATE_UNIT)
    factor = tl.load(right + row * right_stride + key[None, :])
    if TWO_REFERENCES:
        late = (total - (reference << GATE_BITS)).to(tl.float32) * GATE_UNIT + SECOND_SHIFT
        early = total.to(tl.float32) * GATE_UNIT + FIRST_SHIFT
        scale = tl.exp2(tl.where(row < HALF, early[None, :], late[None, :]))
    else:
        scale = decay[None, :]
    tl.store(rest + row * 128 + key[None, :], (factor.to(tl.float32) * scale).to(tl.bfloat16))
    tl.store(decay_out + key, decay)


@triton.jit
def read_state(state, keys, queries, v, inverse, outputs):
    """U [BV, 16] bf16 and O [BV, 16] fp32 from S [BV, 128] fp32: keys and queries [128, 16] are k+ and q+, transposed;
    v [BV, 16] fp32; T Diag(beta) and M [16, 16] transposed.

    k+ and q+ apart: where one product has both, and its sums are then taken apart, the assembler makes every step of it
    wait for the one before.
    """
    low = state.to(tl.bfloat16)
    residual = (v - tl.dot(low, keys)).to(tl.bfloat16)
    u = tl.dot(residual, inverse).to(tl.bfloat16)
    return u, tl.dot(u, outputs, tl.dot(low, queries))


@triton.jit
def fold(state, u, rest, decay, POOL: tl.constexpr):
    """S after the tile, rounded to the pool's dtype as a store would round it, in fp32."""
    return tl.dot(u, rest, state * decay[None, :]).to(POOL).to(tl.float32)
