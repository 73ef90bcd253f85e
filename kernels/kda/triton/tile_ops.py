"""What prefill and decode share of a tile, so that both round the same numbers in the same places.

Only elementwise operations, MMAs of 16-row tiles, and integer sums: a row or column of an MMA does not depend on its
neighbours, so it makes no difference which rows of a tile exist yet, as long as absent ones are zero. Matrices come
transposed (columns are tokens) wherever the serial pass multiplies from the right by them: an accumulator is never
transposed, which some Triton versions compile wrongly on Hopper.

K = V = 128, 16 rows. Operands of products are bf16 (fp16 inside the inverse), accumulators and S fp32. Functions that
round after an addition add +0.0, which makes every zero positive.
"""

import triton
import triton.language as tl

GATE_BITS = tl.constexpr(22)
GATE_UNIT = tl.constexpr(2.0**-22)
HALF = tl.constexpr(8)
ONE_SHIFT = tl.constexpr(2.0**62)
"""Half of the 124 binades that one reference may span."""
FIRST_SHIFT = tl.constexpr(96)
SECOND_SHIFT = tl.constexpr(72)


@triton.jit
def gate_power(n, shift):
    """2^(n 2^-22 + shift), n int32: the product is exact, so that fusing it with the sum would move no bit.

    Above 2^24 units (4 binades) the conversion rounds n, to 2^-16 of a binade at most: 1e-5 of a value that bf16
    rounds to 4e-3, or of a state that has decayed below 2^-4.
    """
    return tl.exp2(n.to(tl.float32) * GATE_UNIT + shift)


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
def one_reference(shrunk, ke, qe):
    """L^T and M^T [16, 16], unmasked, from k 2^-G, k 2^G, q 2^G; G spans at most 124 binades."""
    key = (shrunk * (1.0 / ONE_SHIFT)).to(tl.bfloat16)
    lower = tl.dot(key, tl.trans((ke * ONE_SHIFT).to(tl.bfloat16)))
    outputs = tl.dot(key, tl.trans((qe * ONE_SHIFT).to(tl.bfloat16)))
    return lower, outputs


@triton.jit
def two_references(k, q, total, row, column):
    """The same for gates down to -24 a token: rows 0-7 refer to -96, rows 8-15 to floor(G_8), each channel its own.

    Keys of rows 8-15 may be inf in the first reference; only columns 0-7 take it, and for those they are masked.
    """
    first = row < HALF
    reference = tl.sum(tl.where(row == HALF, total, 0), 0) >> GATE_BITS
    from_reference = total - (reference << GATE_BITS)[None, :]
    grown = gate_power(tl.where(first, total, from_reference), tl.where(first, FIRST_SHIFT, SECOND_SHIFT))
    left, right = tl.trans((k * grown).to(tl.bfloat16)), tl.trans((q * grown).to(tl.bfloat16))
    early = (k * gate_power(-total, -FIRST_SHIFT)).to(tl.bfloat16)
    late = (k * gate_power(-from_reference, -SECOND_SHIFT)).to(tl.bfloat16)
    by_column = column < HALF
    lower = tl.where(by_column, tl.dot(early, left), tl.dot(late, left))
    outputs = tl.where(by_column, tl.dot(early, right), tl.dot(late, right))
    return lower, outputs


@triton.jit
def grown_rows(k, q, total):
    """k 2^G and q 2^G [16, 128] fp32; k+ and q+ are these in bf16."""
    grown = gate_power(total, 0.0)
    return k * grown, q * grown


@triton.jit
def shrunk_keys(k, total, TWO_REFERENCES: tl.constexpr):
    """k 2^-G [16, 128] fp32, where one reference holds it; else k, which nothing reads."""
    return k if TWO_REFERENCES else k * gate_power(-total, 0.0)


@triton.jit
def tile_matrices(k, q, ke, qe, shrunk, total, beta, place, TWO_REFERENCES: tl.constexpr):
    """T Diag(beta) and M [16, 16], transposed, bf16.

    k, q, grown_rows and shrunk_keys [16, 128] fp32, total [16, 128] int32 inclusive sums of log2 gates, beta [16],
    place = arange(16); rows that do not exist are 0 (their gates too).
    """
    row, column = place[:, None], place[None, :]
    if TWO_REFERENCES:
        lower, outputs = two_references(k, q, total, row, column)
    else:
        lower, outputs = one_reference(shrunk, ke, qe)
    outputs = tl.where(row <= column, outputs, 0.0).to(tl.bfloat16)
    inverse = unit_upper_inverse(tl.where(row < column, -(lower * beta[None, :]), 0.0), row, column)
    return (inverse * beta[:, None]).to(tl.bfloat16), outputs


@triton.jit
def closing_factors(k, shrunk, total, last, TWO_REFERENCES: tl.constexpr):
    """k 2^(G_15 - G) [16, 128] bf16 and 2^G_15 [128] fp32 of a tile that closes; last = G_15 [128] int32."""
    decay = gate_power(last, 0.0)
    rest = k * gate_power(last[None, :] - total, 0.0) if TWO_REFERENCES else shrunk * decay[None, :]
    return rest.to(tl.bfloat16), decay


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
def join_pairs(kp, qp):
    """k+ and q+ [16, 128] into [32, 128] in the order of pair_row."""
    both = tl.permute(tl.reshape(tl.join(kp, qp), (2, 4, 2, 128, 2)), (0, 2, 1, 4, 3))
    return tl.reshape(both, (32, 128))


@triton.jit
def read_state(state, kq, v, inverse, outputs, BV: tl.constexpr):
    """U [BV, 16] bf16 and O [BV, 16] fp32 from S [BV, 128] fp32: kq [128, 32] as join_pairs has it, transposed; v
    [BV, 16] fp32; T Diag(beta) and M [16, 16] transposed."""
    read, out = split_pairs(tl.dot(state.to(tl.bfloat16), kq), BV)
    residual = (v - read + 0.0).to(tl.bfloat16)
    u = (tl.dot(residual, inverse) + 0.0).to(tl.bfloat16)
    return u, tl.dot(u, outputs, out) + 0.0


@triton.jit
def fold(state, u, rest, decay, POOL: tl.constexpr):
    """S after the tile, rounded to the pool's dtype as a store would round it, in fp32."""
    moved = tl.dot(u, rest, state * decay[None, :]) + 0.0
    return moved.to(POOL).to(tl.float32)
