"""Before the serial pass: values_kernel convolves v, prepare_kernel makes all of a tile that does not depend on S.

Both take one warp a tile and head. prepare_kernel makes the tile's rows one after the other, a running sum of gates and
the conv's last inputs in registers; then its products, from the rows just written, which are still in cache.
"""

import triton
import triton.language as tl

from forkpoint.kernels.kda.triton.rows import conv_silu, load_taps, row_factors, sigmoid
from forkpoint.kernels.kda.triton.tile_ops import close_tile, tile_matrices, unreferenced


@triton.jit
def load_row(x, z, row, x_stride, z_stride, channel, exists, H: tl.constexpr):
    """Inputs of q, k and of the gate of one row and head, [128] each."""
    at = x + row * x_stride + channel
    mask = exists & (channel >= 0)
    q = tl.load(at, mask=mask, other=0.0)
    k = tl.load(at + H * 128, mask=mask, other=0.0)
    return q, k, tl.load(z + row * z_stride + channel, mask=mask, other=0.0)


@triton.jit
def load_before(x, ring, row, slot, position, back, start, x_stride, channel, channels):
    """Conv inputs [128] fp32 `back` tokens before a position: from a row of this call, the ring, or 0."""
    p = position - back
    at = tl.where(p >= start, x + (row - back) * x_stride, ring + (slot * 4 + (p & 3)) * channels) + channel
    return tl.load(at, mask=(p >= 0) & (channel >= 0), other=0.0).to(tl.float32)


@triton.jit
def load_history(x, ring, row, slot, position, start, x_stride, channel, channels):
    """Conv inputs three, two and one tokens before a position."""
    third = load_before(x, ring, row, slot, position, 3, start, x_stride, channel, channels)
    second = load_before(x, ring, row, slot, position, 2, start, x_stride, channel, channels)
    return third, second, load_before(x, ring, row, slot, position, 1, start, x_stride, channel, channels)


@triton.jit
def tile_of(tiles, sequences, tile):
    """(sequence, slot, start, first position, first and last + 1 place that is new, row of place 0) of a tile."""
    n = tl.load(tiles + tile * 2).to(tl.int64)
    start, end = tl.load(sequences + n * 5 + 2), tl.load(sequences + n * 5 + 3)
    origin = start // 16 * 16 + (tile - tl.load(sequences + n * 5 + 4)).to(tl.int32) * 16
    row = tl.load(sequences + n * 5 + 1).to(tl.int64) + origin - start
    slot = tl.load(sequences + n * 5).to(tl.int64)
    return n, slot, start, origin, tl.maximum(start - origin, 0), tl.minimum(end - origin, 16), row


@triton.jit
def values_kernel(tiles, sequences, x, weight, ring, v_out, x_stride, H: tl.constexpr):
    """Grid (tiles, H), one warp: v [R, H, 128] bf16 of the new rows, from x [R, 3 H 128] conv inputs (q, k, v)."""
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, slot, start, origin, begin, stop, first_row = tile_of(tiles, sequences, tile)
    key = tl.arange(0, 128)
    channel = H * 256 + head * 128 + key
    taps = load_taps(weight, channel, H * 384)
    row, position = first_row + begin, origin + begin
    v3, v2, v1 = load_history(x, ring, row, slot, position, start, x_stride, channel, H * 384)
    following = tl.load(x + row * x_stride + channel)
    for i in tl.range(begin, stop, loop_unroll_factor=2):
        v0 = following.to(tl.float32)
        # A row ahead, so that it is on its way while this one is computed.
        mask = (i + 1 < stop) & (key >= 0)
        following = tl.load(x + (first_row + i + 1) * x_stride + channel, mask=mask, other=0.0)
        v = conv_silu(v3, v2, v1, v0, taps).to(tl.bfloat16)
        tl.store(v_out + ((first_row + i) * H + head) * 128 + key, v)
        v3, v2, v1 = v2, v1, v0


@triton.jit
def open_rows(left_open, right_open, kq, rest, slot, head, begin, place, H: tl.constexpr):
    """Copies the rows that the slot's open tile contributes to where this tile's rows go."""
    key = tl.arange(0, 128)[None, :]
    mask = (place < begin)[:, None] & (key >= 0)
    cached = ((slot * 16 + place) * H + head)[:, None] * 128 + key
    tl.store(kq + place[:, None] * 128 + key, tl.load(left_open + cached, mask=mask), mask=mask)
    tl.store(rest + place[:, None] * 128 + key, tl.load(right_open + cached, mask=mask), mask=mask)


@triton.jit
def clear_absent(kq, begin, stop):
    """Zeros for k+ and q+ of places that have no row, and for q+ of rows that came before."""
    place, key = tl.arange(0, 16)[:, None], tl.arange(0, 128)[None, :]
    row, zero = kq + place * 128 + key, tl.zeros((16, 128), tl.bfloat16)
    absent = (place >= stop) & (key >= 0)
    tl.store(row, zero, mask=absent)
    tl.store(row + 2048, zero, mask=absent | (place < begin))


@triton.jit
def unreference_tile(kq, reference):
    """k+ and q+ in place of a tile's left factors and queries."""
    key = tl.arange(0, 128)[None, :]
    for first in tl.static_range(0, 16, 4):
        some = (first + tl.arange(0, 4))[:, None]
        row = kq + some * 128 + key
        tl.store(row, unreferenced(tl.load(row), reference[None, :], some))
        tl.store(row + 2048, unreferenced(tl.load(row + 2048), reference[None, :], some))


@triton.jit
def prepare_kernel(
    tiles, sequences, x, z, b, weight, A_log, dt_bias, ring, left_open, right_open, beta_open, total_open,
    reference_open, kq_out, rest_out, inverse_out, outputs_out, decay_out, reference_out, left_kept, total_kept,
    reference_kept, x_stride, z_stride, b_stride, lower_bound, scale, H: tl.constexpr, BOUNDED: tl.constexpr,
    TWO_REFERENCES: tl.constexpr, UNROLL: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, H), one warp. x [R, 3 H 128] conv inputs (q, k, v), z [R, H 128] raw gates, b [R, H]; tiles
    [tiles, 2] int32: sequence, row of a checkpoint or -1 (recur.py); sequences [N, 5] int32: slot, first row, start,
    end, first tile.

    Writes at tile * H + head: k+ and q+ [16, 128] each, k 2^(G_15 - G) [16, 128], T Diag(beta) and M [16, 16]
    transposed, all bf16, 2^G_15 [128] fp32, and with two references r. A tile that stays open has its right factors in
    place of k 2^(G_15 - G), and at n * H + head its left ones [16, 128], its G and its r.
    """
    tile, head, key, place = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, 128), tl.arange(0, 16)
    n, slot, start, origin, begin, stop, first_row = tile_of(tiles, sequences, tile)
    channel, at = head * 128 + key, tile * H + head
    kq, rest = kq_out + at * 4096, rest_out + at * 2048
    total, reference = tl.zeros((128,), tl.int32), tl.zeros((128,), tl.int32)
    if begin > 0:
        open_rows(left_open, right_open, kq, rest, slot, head, begin, place, H)
        total = tl.load(total_open + (slot * H + head) * 128 + key)
        reference = tl.load(reference_open + (slot * H + head) * 128 + key, mask=(begin > 8) & (key >= 0), other=0)
    gate = (tl.load(dt_bias + channel), tl.exp(tl.load(A_log + head)), lower_bound, scale)
    q_taps = load_taps(weight, channel, H * 384)
    k_taps = load_taps(weight, H * 128 + channel, H * 384)
    row, position = first_row + begin, origin + begin
    q3, q2, q1 = load_history(x, ring, row, slot, position, start, x_stride, channel, H * 384)
    k3, k2, k1 = load_history(x, ring, row, slot, position, start, x_stride, H * 128 + channel, H * 384)
    # Two rows ahead, so that they are on their way while this one is computed.
    near = load_row(x, z, row, x_stride, z_stride, channel, begin < stop, H)
    far = load_row(x, z, row + 1, x_stride, z_stride, channel, begin + 1 < stop, H)
    for i in tl.range(begin, stop, loop_unroll_factor=UNROLL):
        q0, k0, raw = near[0].to(tl.float32), near[1].to(tl.float32), near[2].to(tl.float32)
        near = far
        far = load_row(x, z, first_row + i + 2, x_stride, z_stride, channel, i + 2 < stop, H)
        q, k = conv_silu(q3, q2, q1, q0, q_taps), conv_silu(k3, k2, k1, k0, k_taps)
        left, query, right, total, reference = row_factors(
            q, k, raw, total, reference, i, gate, TWO_REFERENCES, BOUNDED
        )
        tl.store(kq + i * 128 + key, left)
        tl.store(kq + 2048 + i * 128 + key, query)
        tl.store(rest + i * 128 + key, right)
        q3, q2, q1, k3, k2, k1 = q2, q1, q0, k2, k1, k0
    if stop - begin < 16:
        clear_absent(kq, begin, stop)
    if TWO_REFERENCES:
        tl.store(reference_out + at * 128 + key, reference)
    tl.debug_barrier()
    kept = tl.load(beta_open + (slot * 16 + place) * H + head, mask=place < begin, other=0.0)
    new = (place >= begin) & (place < stop)
    logit = tl.load(b + (first_row + place) * b_stride + head, mask=new, other=0.0).to(tl.float32)
    beta = tl.where(new, sigmoid(logit), kept)
    made = (kq + place * 128, kq + 2048 + place * 128, rest + place * 128)
    late = reference_out + at * 128
    inverse, outputs = tile_matrices(made, place < stop, new, beta, late, stop > 8, TWO_REFERENCES, KEYS, True)
    square = at * 256 + place[:, None] * 16 + place[None, :]
    tl.store(inverse_out + square, inverse)
    tl.store(outputs_out + square, outputs)
    if stop < 16:
        rows = place[:, None] * 128 + key[None, :]
        tl.store(total_kept + (n * H + head) * 128 + key, total)
        tl.store(reference_kept + (n * H + head) * 128 + key, reference)
        tl.store(left_kept + (n * H + head) * 2048 + rows, tl.load(kq + rows))
    if TWO_REFERENCES:
        tl.debug_barrier()
        unreference_tile(kq, reference)
    if stop == 16:
        close_tile(rest, 128, rest, decay_out + at * 128, total, reference, TWO_REFERENCES)
