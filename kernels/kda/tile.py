"""KDA in tiles of 16 tokens: one numerics for prefill and decode, bit for bit.

Tiles lie on the absolute grid of positions and a tile's arithmetic is the same whoever computes it: a decode step
computes the whole open tile again, with rows that do not exist yet as zeros. A bit is touched only by elementwise
operations, products of fixed shape, and integer sums. With G the inclusive sum of log2 gates inside the tile and S
[V, K] before it:

    k+ = k 2^G    q+ = q 2^G    L_ij = <k_i 2^(G_i - G_j), k_j> (j < i)    M_ij = <q_i 2^(G_i - G_j), k_j> (j <= i)
    T = (I + beta L)^-1    U = T (beta (V - k+ S^T))    O = q+ S^T + M U    S' = S 2^(G_15) + U^T (k 2^(G_15 - G))

2^(G_i - G_j) is split over the two factors of L and M around a reference that depends on rows <= i only
(references.py). Row i of O never depends on later rows: they meet zeros of M. S moves on only when its tile closes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from forkpoint.kernels.elementwise import pow2_fixed
from forkpoint.kernels.kda.plan import Step, TilePlan, tile_plan
from forkpoint.kernels.kda.references import masked_products
from forkpoint.kernels.matmul.naive import bmm_fixed
from forkpoint.limits import TILE_TOKENS

HALF = TILE_TOKENS // 2


@dataclass(frozen=True)
class OpenRows:
    """Inputs of the open tile's tokens, one set a slot, each row at position % 16."""

    k: Tensor
    """[slots, 16, H, K] fp32, normalised."""
    v: Tensor
    """[slots, 16, H, V] fp32."""
    g: Tensor
    """[slots, 16, H, K] int32, log2 gates in units of 2^-22."""
    beta: Tensor
    """[slots, 16, H] fp32."""


@dataclass(frozen=True)
class _Prepared:
    """What the serial pass needs of B = tiles * H tiles, all of it independent of S."""

    kq: Tensor
    """[B, 32, K]: k+ above q+."""
    k_rest: Tensor
    """[B, 16, K]: k 2^(G_15 - G)."""
    decay: Tensor
    """[B, 1, K]: 2^G_15."""
    inverse: Tensor
    """[B, 16, 16]: T."""
    outputs: Tensor
    """[B, 16, 16]: M."""
    v: Tensor
    """[B, 16, V]."""
    beta: Tensor
    """[B, 16, 1]."""


def _unit_lower_inverse(n: Tensor) -> Tensor:
    """(I - n)^-1 of strictly lower n [B, 16, 16].

    The 8 x 8 diagonal blocks by squaring, (I + n)(I + n^2)(I + n^4), exact because n^8 = 0; the block below them as
    T22 n21 T11. Squaring at 16 needs no fewer products, and its powers grow to thousands when keys repeat: it would
    lose four digits where this loses one.
    """
    blocks = torch.cat((n[:, :HALF, :HALF], n[:, HALF:, HALF:]))
    eye = torch.eye(HALF, dtype=n.dtype, device=n.device)
    squared = bmm_fixed(blocks, blocks)
    fourth = bmm_fixed(squared, squared)
    diagonal = bmm_fixed(bmm_fixed(blocks + eye, squared + eye), fourth + eye)
    upper, lower = diagonal.chunk(2)
    inverse = torch.zeros_like(n)
    inverse[:, :HALF, :HALF] = upper
    inverse[:, HALF:, HALF:] = lower
    inverse[:, HALF:, :HALF] = bmm_fixed(bmm_fixed(lower, n[:, HALF:, :HALF].contiguous()), upper)
    return inverse


def _gather(new: Tensor, opened: Tensor, plan: TilePlan, heads: int) -> Tensor:
    """Rows [R, H, X] and open rows [slots, 16, H, X] into tiles [tiles * H, 16, X]; rows that do not exist are 0."""
    tiles = new.new_zeros((plan.tiles * heads * TILE_TOKENS, new.shape[-1]))
    tiles.index_copy_(0, plan.new_head_rows, new.reshape(-1, new.shape[-1]))
    if plan.open_slots.numel():
        rows = opened[plan.open_slots, plan.open_places]
        tiles.index_copy_(0, plan.open_head_rows, rows.reshape(-1, new.shape[-1]))
    return tiles.view(plan.tiles * heads, TILE_TOKENS, -1)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: OpenRows, plan: TilePlan, lower_bound: float | None
) -> _Prepared:
    heads = q.shape[1]
    tiles_q = q.new_zeros((plan.tiles * heads * TILE_TOKENS, q.shape[-1]))
    tiles_q.index_copy_(0, plan.new_head_rows, q.reshape(-1, q.shape[-1]))
    tiles_q = tiles_q.view(plan.tiles * heads, TILE_TOKENS, -1)
    tiles_k = _gather(k, rows.k, plan, heads)
    tiles_v = _gather(v, rows.v, plan, heads)
    tiles_beta = _gather(beta[..., None], rows.beta[..., None], plan, heads)
    total = _gather(g, rows.g, plan, heads).cumsum(1, dtype=torch.int32)
    last = total[:, -1:]
    kq = torch.cat((tiles_k, tiles_q), dim=1)
    lower, outputs = masked_products(kq, tiles_k, total, lower_bound)
    grown = pow2_fixed(total)
    return _Prepared(
        kq=(kq.view(-1, 2, TILE_TOKENS, k.shape[-1]) * grown[:, None]).view(kq.shape),
        k_rest=tiles_k * pow2_fixed(last - total),
        decay=grown[:, -1:],
        inverse=_unit_lower_inverse(lower * -tiles_beta),
        outputs=outputs,
        v=tiles_v,
        beta=tiles_beta,
    )


def _serial_pass(p: _Prepared, state: Tensor, steps: tuple[Step, ...], heads: int) -> Tensor:
    """Walks the tiles in order and moves `state` [N' * H, V, K] on in place; returns O [B, 16, V]."""
    tiles, _, values = p.v.shape
    read = p.v.new_empty((tiles, 2 * TILE_TOKENS, values))
    u = p.v.new_empty((tiles, TILE_TOKENS, values))
    for step in steps:
        now = slice(step.first * heads, step.last * heads)
        active = state[: (step.last - step.first) * heads]
        read[now] = bmm_fixed(p.kq[now], active.transpose(1, 2))
        residual = (p.v[now] - read[now, :TILE_TOKENS]) * p.beta[now]
        u[now] = bmm_fixed(p.inverse[now], residual)
        if step.closing:
            closing = slice(step.first * heads, (step.first + step.closing) * heads)
            moved = state[: step.closing * heads]
            added = bmm_fixed(u[closing].transpose(1, 2), p.k_rest[closing])
            # + 0.0 makes every zero positive, so that equal numbers are equal bytes.
            moved.mul_(p.decay[closing]).add_(added).add_(0.0)
    return (read[:, TILE_TOKENS:] + bmm_fixed(p.outputs, u)).add_(0.0)


def tile_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    S: Tensor,
    open_rows: OpenRows,
    slots: list[int],
    cu_seqlens: list[int],
    starts: list[int],
    lower_bound: float | None,
) -> Tensor:
    """Consumes packed rows and returns o [R, H, V]; moves S and the open rows of the named slots on, in place.

    q [R, H, K] normalised and scaled, k [R, H, K] normalised, v [R, H, V], g [R, H, K] int32 log2 gates in units of
    2^-22 (kda_gate), beta [R, H]; S [slots, H, V, K] at each slot's last grid point. Sequence n owns rows
    cu_seqlens[n]:cu_seqlens[n+1], starts at position starts[n] and lives in slots[n]; slots must differ. Open rows
    below starts[n] % 16 are read, none other; those of the tile that stays open are written. lower_bound (natural
    logarithm, or None for the unbounded gate) picks the references and must be the model's own.
    """
    rows, heads, values = v.shape
    if rows == 0:
        return torch.empty_like(v)
    plan = tile_plan(tuple(slots), tuple(cu_seqlens), tuple(starts), heads, v.device)
    state = S[plan.state_slots].view(-1, values, k.shape[-1])
    prepared = _prepare(q, k, v, g, beta, open_rows, plan, lower_bound)
    tiles_o = _serial_pass(prepared, state, plan.steps, heads)
    if plan.closing_slots.numel():
        S[plan.closing_slots] = state.view(-1, heads, values, k.shape[-1])[: plan.closing_slots.numel()]
    if plan.keep_rows.numel():
        where = (plan.keep_slots, plan.keep_places)
        open_rows.k[where] = k[plan.keep_rows]
        open_rows.v[where] = v[plan.keep_rows]
        open_rows.g[where] = g[plan.keep_rows]
        open_rows.beta[where] = beta[plan.keep_rows]
    return tiles_o.view(-1, values).index_select(0, plan.new_head_rows).view(rows, heads, values)
