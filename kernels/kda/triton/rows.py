"""One row of one head: short conv with SiLU, L2 norms, log2 gate, and the row's factors of its tile's products.

Prefill calls these row by row, decode once, in kernels of other shapes: so all is elementwise on [128] channels, and
the one sum of floats is a binary tree written out, which no layout of threads can reorder.
"""

import triton
import triton.language as tl

from forkpoint.kernels.kda.triton.tile_ops import FIRST_SHIFT, GATE_BITS, GATE_UNIT, HALF, SECOND_SHIFT

LOG2_E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
GATE_ONE = tl.constexpr(4194304.0)
GATE_FLOOR = tl.constexpr(-24.0)
NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def tree_sum(x):
    """Sum over [128] as [1]: neighbours first. A sum of two is the same in either order, so no layout moves a bit."""
    for _ in tl.static_range(7):
        x = tl.sum(tl.reshape(x, (x.shape[0] // 2, 2)), 1)
    return x


@triton.jit
def root_sigmoid(x):
    """sqrt(sigmoid(x)): 1 / sqrt(1 + 2^y) is two instructions of the special unit, a division is nine others."""
    return tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))


@triton.jit
def sigmoid(x):
    root = root_sigmoid(x)
    return root * root


@triton.jit
def log2_gate(z, bias, rate, lower_bound, BOUNDED: tl.constexpr):
    """int32 in units of 2^-22, <= 0; see kda_gate in naive.py. rate = exp(A_log)."""
    if BOUNDED:
        slope = rate * -LOG2_E
        root = tl.rsqrt(1.0 + tl.exp2(tl.fma(z, slope, bias * slope)))
        units = root * root * (lower_bound * (LOG2_E * GATE_ONE))
    else:
        z += bias
        # log1p(w) as log2(u) w / (u - 1), u = 1 + w: 1 + w alone would drop the digits of slow channels.
        w = tl.exp(-tl.abs(z))
        u = 1.0 + w
        tail = tl.where(u == 1.0, w, tl.log2(u) * LN2 * (w / tl.where(u == 1.0, 1.0, u - 1.0)))
        units = tl.maximum((tl.maximum(z, 0.0) + tail) * (rate * -LOG2_E), GATE_FLOOR) * GATE_ONE
    return tl.floor(units + 0.5).to(tl.int32)


@triton.jit
def binades(n):
    """n 2^-22 fp32 of int32 n. Above 2^24 units (4 binades) the conversion rounds n, to 2^-16 of a binade at most: 1e-5
    of a value that bf16 rounds to 4e-3, or of a state that has decayed below 2^-4."""
    return n.to(tl.float32) * GATE_UNIT


@triton.jit
def load_taps(weight, channel, channels):
    """The four taps of each of the channels, fp32."""
    at = weight + channel
    return (
        tl.load(at).to(tl.float32),
        tl.load(at + channels).to(tl.float32),
        tl.load(at + 2 * channels).to(tl.float32),
        tl.load(at + 3 * channels).to(tl.float32),
    )


@triton.jit
def conv_silu(third, second, last, now, taps):
    """silu(conv) [128] fp32 of inputs three, two, one and no tokens ago."""
    total = tl.fma(third, taps[0], tl.zeros_like(third))
    total = tl.fma(now, taps[3], tl.fma(last, taps[2], tl.fma(second, taps[1], total)))
    root = root_sigmoid(total)
    return total * root * root


@triton.jit
def row_factors(q, k, z, total, reference, place, gate, TWO_REFERENCES: tl.constexpr, BOUNDED: tl.constexpr):
    """left, query and right bf16 [128] (OpenFactors; query is q in k's place), G and r int32 after the row.

    q, k: convolved rows fp32 [128], z the raw gate; total, reference: G and r before it; `gate` = (dt_bias [128],
    exp(A_log), lower bound, scale of q).
    """
    bias, rate, lower_bound, scale = gate
    q = q * (tl.rsqrt(tree_sum(q * q) + NORM_EPS) * scale)
    k = k * tl.rsqrt(tree_sum(k * k) + NORM_EPS)
    total += log2_gate(z, bias, rate, lower_bound, BOUNDED)
    if TWO_REFERENCES:
        reference = tl.where(place == HALF, total >> GATE_BITS, reference)
        inside = tl.where(place < HALF, total, total - (reference << GATE_BITS))
        power = binades(inside) + tl.where(place < HALF, FIRST_SHIFT, SECOND_SHIFT).to(tl.float32)
    else:
        power = binades(total)
    grown, shrunk = tl.exp2(power), tl.exp2(-power)
    left, query, right = (k * grown).to(tl.bfloat16), (q * grown).to(tl.bfloat16), (k * shrunk).to(tl.bfloat16)
    return left, query, right, total, reference


@triton.jit
def keep_conv(x, ring, grid, slot, first_row, start, end, channel, x_stride, channels):
    """Both conv tails after a prefill: the grid tail first, for it may need inputs that the ring then forgets."""
    closed = end // 16 * 16
    for i in tl.static_range(3):
        p = closed - 3 + i
        moved = (closed > start) & (channel >= 0)
        fresh = tl.load(x + (first_row + p - start) * x_stride + channel, mask=moved & (p >= start), other=0.0)
        kept = tl.load(ring + (slot * 4 + (p & 3)) * channels + channel, mask=moved & (p < start) & (p >= 0), other=0.0)
        value = tl.where(p >= start, fresh, kept)
        tl.store(grid + (slot * 3 + i) * channels + channel, value, mask=moved)
    tl.debug_barrier()
    for i in tl.static_range(4):
        p = end - 4 + i
        fresh = tl.load(x + (first_row + p - start) * x_stride + channel, mask=(p >= start) & (channel >= 0), other=0.0)
        tl.store(ring + (slot * 4 + (p & 3)) * channels + channel, fresh, mask=(p >= start) & (channel >= 0))
