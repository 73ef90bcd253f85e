"""Prepare kernel: everything of a tile that does not depend on S, one program a tile and head."""

import triton
import triton.language as tl

from forkpoint.kernels.kda.triton.rows import row_gates
from forkpoint.kernels.kda.triton.tile_ops import closing_factors, grown_rows, pair_row, shrunk_keys, tile_matrices


@triton.jit(do_not_specialize=["z_step"])
def prepare_kernel(
    tiles,
    sequences,
    z,
    A_log,
    dt_bias,
    q_new,
    k_new,
    beta_new,
    k_open,
    g_open,
    beta_open,
    kq_out,
    rest_out,
    inverse_out,
    outputs_out,
    decay_out,
    z_step,
    lower_bound,
    H: tl.constexpr,
    BOUNDED: tl.constexpr,
    TWO_REFERENCES: tl.constexpr,
):
    """Grid (tiles, H). tiles [tiles, 2] int32: sequence, slot of a checkpoint or -1 (recur.py); sequences [N, 5];
    q_new, k_new [R, H, 128] and beta_new [R, H] of the row kernel, z [R, H 128] raw gates of the new rows.

    Writes at tile * H + head: k+ and q+ [32, 128] (pair_row), k 2^(G_15 - G) [16, 128], T Diag(beta) and M [16, 16]
    transposed, all bf16, and 2^G_15 [128] fp32. A tile that stays open folds into nothing: its k 2^(G_15 - G) is 0 and
    its decay 1.
    """
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.load(tiles + tile * 2)
    slot = tl.load(sequences + n * 5).to(tl.int64)
    first_row = tl.load(sequences + n * 5 + 1).to(tl.int64)
    start, end = tl.load(sequences + n * 5 + 2), tl.load(sequences + n * 5 + 3)
    place, key = tl.arange(0, 16), tl.arange(0, 128)[None, :]
    position = start // 16 * 16 + (tile - tl.load(sequences + n * 5 + 4)).to(tl.int32) * 16 + place
    old, new = position < start, (position >= start) & (position < end)
    row = first_row + position - start
    cached = (slot * 16 + place) * H + head
    source = row * H + head
    before, fresh = cached[:, None] * 128 + key, source[:, None] * 128 + key
    # The address is picked before the load; open rows and new ones have one dtype.
    k_at = tl.where(old[:, None], k_open + before, k_new + fresh)
    k = tl.load(k_at, mask=(old | new)[:, None], other=0.0).to(tl.float32)
    q = tl.load(q_new + fresh, mask=new[:, None], other=0.0).to(tl.float32)
    gates = row_gates(z, A_log, dt_bias, (row, z_step, new), head, lower_bound, BOUNDED)
    g = tl.where(new[:, None], gates, tl.load(g_open + before, mask=old[:, None], other=0))
    kept = tl.load(beta_open + cached, mask=old, other=0.0)
    beta = tl.where(old, kept, tl.load(beta_new + source, mask=new, other=0.0))
    total, last = tl.cumsum(g, 0), tl.sum(g, 0)
    at = tile * H + head
    rows = at * 2048 + place[:, None] * 128 + key
    square = at * 256 + place[:, None] * 16 + place[None, :]
    ke, qe = grown_rows(k, q, total)
    shrunk = shrunk_keys(k, total, TWO_REFERENCES)
    pairs = at * 4096 + pair_row(place)[:, None] * 128 + key
    tl.store(kq_out + pairs, ke.to(tl.bfloat16))
    tl.store(kq_out + pairs + 128, qe.to(tl.bfloat16))
    rest, decay = closing_factors(k, shrunk, total, last, TWO_REFERENCES)
    closes = tl.max(position, 0) < end
    tl.store(rest_out + rows, tl.where(closes, rest, tl.zeros_like(rest)))
    tl.store(decay_out + at * 128 + tl.arange(0, 128), tl.where(closes, decay, 1.0))
    inverse, outputs = tile_matrices(k, q, ke, qe, shrunk, total, beta, place, TWO_REFERENCES)
    tl.store(inverse_out + square, inverse)
    tl.store(outputs_out + square, outputs)
