"""Decode kernel: one new row a sequence. It forms the open tile again from its cached rows, with prefill's functions.

The row kernel has put the new row into the slot's open rows. Nothing of the tile's algebra is cached: L, M, T, U cost
MMAs that hide behind the read of S, and the open rows are a quarter of S in bytes (k, v bf16, gates int32), of which a
step reads the rows that exist. S is written only when the tile closes.
"""

import triton
import triton.language as tl

from forkpoint.kernels.kda.triton.tile_ops import closing_factors, fold, read_state, tile_factors


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
        exists = place <= newest
        cached = (slot * 16 + place) * H + head
        rows = cached[:, None] * 128 + key[None, :]
        k = tl.load(k_open + rows, mask=exists[:, None], other=0.0).to(tl.float32)
        g = tl.load(g_open + rows, mask=exists[:, None], other=0)
        beta = tl.load(beta_open + cached, mask=exists, other=0.0)
        v = tl.load(v_open + cached[None, :] * 128 + value, mask=exists[None, :], other=0.0).to(tl.float32)
        query = tl.load(q_new + (n * H + head) * 128 + key).to(tl.float32)
        q = tl.where(is_newest[:, None], query[None, :], 0.0)
        total = tl.cumsum(g, 0)
        kp, qp, inverse, outputs = tile_factors(k, q, total, beta, place, TWO_REFERENCES)
        u, out = read_state(state, tl.trans(kp), tl.trans(qp), v, inverse, outputs)
        tl.store(answer, out.to(o.dtype.element_ty), mask=is_newest[None, :])
        if newest == 15:
            rest, decay = closing_factors(k, total, tl.sum(g, 0))
            tl.store(pool, fold(state, u, rest, decay, S.dtype.element_ty).to(S.dtype.element_ty))
    else:
        zero = tl.zeros((BV, 16), tl.float32).to(o.dtype.element_ty)
        tl.store(answer, zero, mask=is_newest[None, :])
